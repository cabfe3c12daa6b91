"""From a file to documents: reading them, once from the beginning and later by piece, and the cleaning.

What a file's bytes stand for, and where a long text is cut, is said in `decoding.py`. Line ends, marks and NUL are the
normaliser's; NUL is counted here.
"""

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import SEEK_END, BytesIO
from typing import IO, NamedTuple, cast

from model.normalizer import UNENCODABLE, Normalizer, is_encodable
from rayjob.corpus.decoding import (
    Decode,
    count_line_ends,
    cut_slabs,
    decode_bytes,
    decode_value,
    encode_value,
    find_invalid,
    open_utf8,
    read_bits,
    read_utf8,
)
from rayjob.corpus.dedup import Fingerprint, Fingerprinter
from rayjob.corpus.errors import CorpusError
from rayjob.corpus.files import open_binary, sha256_of
from rayjob.corpus.sources import Source, is_packed

# Of all that is kept on storage: raise it when the rules for cleaning, copies, the split or the blocks change.
FORMAT = 7


class Piece(NamedTuple):
    """A slab of a document, or a part of one.

    Attributes:
        first_byte, end_byte: of the slab, in the UTF-8 of the document's text as it stands.
        digest: of the slab's normalised text.
        start, stop: characters of that text that are meant.
        bytes: their size in UTF-8.
        is_end: whether the document ends with them, so that EOS follows.
    """

    first_byte: int
    end_byte: int
    digest: str
    start: int
    stop: int
    bytes: int
    is_end: bool

    def follows(self, other: "Piece") -> bool:
        """Whether nothing of the document stands between the other piece and this one."""
        is_same_slab = self.first_byte == other.first_byte
        return self.start == other.stop if is_same_slab else self.first_byte == other.end_byte and self.start == 0


@dataclass(frozen=True, slots=True)
class Document:
    """One text of the corpus: where its bytes lie, and what it is once normalised.

    Attributes:
        doc_id: the file's name, with `:line` for a line of .jsonl.
        path: the file as it lies now.
        first_byte, end_byte: its bytes in the file's (unpacked) content.
        field: key of the text in its JSON object; None where the bytes are the text.
        sha256: of the normalised text in UTF-8.
        bytes: size of the normalised text.
        pieces: all of the text, in order and without a gap.
    """

    doc_id: str
    path: str
    first_byte: int
    end_byte: int
    field: str | None
    sha256: str
    bytes: int
    pieces: tuple[Piece, ...]


class Oddities(NamedTuple):
    """What a document holds that no text should, and the line of its file that has the first of each kind.

    Attributes:
        invalid_bytes: not valid in the file's encoding. replaced_chars: NUL and lone surrogates.
    """

    invalid_bytes: int
    replaced_chars: int
    invalid_line: int | None
    replaced_line: int | None

    def add(self, slab: bytes, text: str, invalid_bytes: int, first_line: int) -> "Oddities":
        """With those of a slab, the text it was decoded to, and the number of its first line."""
        replaced_chars = _count_replaced(text)
        invalid_line, replaced_line = self.invalid_line, self.replaced_line
        if invalid_bytes and invalid_line is None:
            invalid_line = first_line + count_line_ends(text[: find_invalid(slab, text)])
        if replaced_chars and replaced_line is None:
            first = UNENCODABLE.search(text)
            assert first is not None  # it was counted
            replaced_line = first_line + count_line_ends(text[: first.start()])
        return Oddities(
            self.invalid_bytes + invalid_bytes, self.replaced_chars + replaced_chars, invalid_line, replaced_line
        )


class ScannedDocument(NamedTuple):
    """A document, what it is made of, whether it is nothing but white space, and what was odd about it."""

    document: Document
    fingerprint: Fingerprint
    is_blank: bool
    odd: Oddities


def scan_source(source: Source, normalizer: Normalizer, text_column: str) -> Iterator[ScannedDocument]:
    """Reads one file and yields its documents in order; a slab of a text file is in memory, or a line of .jsonl.

    Raises:
        CorpusError: the file is not what its suffix says, or changed since it was hashed.
    """
    with _reading(source.path):
        if sha256_of(source.path) != source.sha256:
            raise _changed(source.path)
        with _open(source.path) as file:
            if source.has_rows:
                yield from _scan_lines(file, source, normalizer, text_column)
            else:
                place = Document(source.name, source.path, 0, 0, None, "", 0, ())
                scanned = _scan_text(*open_utf8(file), place, normalizer)
                end_byte = file.seek(0, SEEK_END)
                yield scanned._replace(document=replace(scanned.document, end_byte=end_byte))


def read_pieces(document: Document, pieces: Sequence[Piece], normalizer: Normalizer) -> Iterator[str]:
    """The normalised text of neighbouring pieces of a document that was scanned before, one by one.

    Raises:
        CorpusError: the file is gone or its text is no longer the one that was scanned.
    """
    first = pieces[0].first_byte
    content, decode = _read_content(document, first, pieces[-1].end_byte)
    for piece in pieces:
        text = normalizer(decode(content[piece.first_byte - first : piece.end_byte - first])[0])
        if _digest(text.encode()) != piece.digest:
            raise _changed(document.path)
        yield text[piece.start : piece.stop]


def find_cut(text: str, start: int, stop: int) -> int:
    """The last place in (start, stop] where a word ends and white space begins; `stop` in text without any.

    The tokenizer's pieces take white space in front of a word, so a cut there changes no token.
    """
    place = stop
    while place > start:
        place = max(text.rfind(" ", start, place), text.rfind("\n", start, place))
        if place > start and not text[place - 1].isspace():
            return place
    return stop


def _scan_lines(file: IO[bytes], source: Source, normalizer: Normalizer, text_column: str) -> Iterator[ScannedDocument]:
    first = 0
    lines = (line for some in file for line in some.splitlines(keepends=True))  # by CR too
    for number, line in enumerate(lines, start=1):
        end = first + len(line)
        if line.strip():
            doc_id = f"{source.name}:{number}"
            text, invalid = _parse_line(line, text_column, doc_id)
            place = Document(doc_id, source.path, first, end, text_column, "", 0, ())
            scanned = _scan_text(read_bits(BytesIO(encode_value(text))), decode_value, place, normalizer)
            odd = Oddities(invalid, scanned.odd.replaced_chars, number, number)
            yield scanned._replace(odd=odd)
        first = end


def _scan_text(bits: Iterator[bytes], decode: Decode, place: Document, normalizer: Normalizer) -> ScannedDocument:
    """Reads a text slab by slab; `place` tells where it lies."""
    pieces = list[Piece]()
    sha256, fingerprinter, odd = hashlib.sha256(), Fingerprinter(), Oddities(0, 0, None, None)
    is_blank = True
    line = 1
    first = 0
    for slab in cut_slabs(bits):
        text, invalid = decode(slab)
        odd = odd.add(slab, text, invalid, line)
        line += count_line_ends(text)
        text = normalizer(text)
        encoded = text.encode()
        sha256.update(encoded)
        fingerprinter.add(text)
        is_blank = is_blank and not text.strip()
        end = first + len(slab)
        pieces.append(Piece(first, end, _digest(encoded), 0, len(text), len(encoded), is_end=False))
        first = end
    pieces[-1:] = [piece._replace(is_end=True) for piece in pieces[-1:]]
    n_bytes = sum(piece.bytes for piece in pieces)
    document = replace(place, sha256=sha256.hexdigest(), bytes=n_bytes, pieces=tuple(pieces))
    return ScannedDocument(document, fingerprinter.fingerprint(), is_blank, odd)


def _read_content(document: Document, first: int, end: int) -> tuple[bytes, Decode]:
    """Bytes [first, end) of a document's text, and how they are decoded."""
    with _reading(document.path), _open(document.path) as file:
        if document.field is None:
            return read_utf8(file, first, end)
        file.seek(document.first_byte)
        line = file.read(document.end_byte - document.first_byte)
    return encode_value(_parse_line(line, document.field, document.doc_id)[0])[first:end], decode_value


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _open(path: str) -> IO[bytes]:
    file = open_binary(path)
    return cast(IO[bytes], gzip.open(file)) if is_packed(path) else file


@contextmanager
def _reading(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        is_damaged = isinstance(error, (EOFError, zlib.error, gzip.BadGzipFile))
        hint = "fetch it again" if is_damaged else "every node must see it under this path"
        raise CorpusError([f"{path} cannot be read ({error}): {hint}."]) from None


def _changed(path: str) -> CorpusError:
    return CorpusError([f"{path} changed while it was being prepared: run the same command again."])


def _parse_line(line: bytes, field: str, where: str) -> tuple[str, int]:
    text, invalid = decode_bytes(line)
    try:
        row = json.loads(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        raise CorpusError([f"{where} is not a JSON object ({error})."]) from None
    value = row.get(field) if isinstance(row, dict) else None
    if not isinstance(value, str):
        raise CorpusError([f'{where} has no text under "{field}": expected {{"{field}": "..."}} (data.text_column).'])
    return value, invalid


def _count_replaced(text: str) -> int:
    return 0 if is_encodable(text) else len(UNENCODABLE.findall(text))
