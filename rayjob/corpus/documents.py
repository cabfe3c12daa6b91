"""From the bytes of a file to documents: the rule for odd bytes, the cleaning, and the pieces of a long text.

Bytes: a file that begins with a UTF-16 byte-order mark is UTF-16, everything else is UTF-8. A byte that is
not valid UTF-8 is read on its own as Windows-1252, the usual origin of such bytes, or becomes U+FFFD where
that code page has no character; the three bytes of a lone surrogate become one U+FFFD. Such bytes are counted.
Line ends, marks and NUL are the normaliser's; NUL is counted here.
"""

import codecs
import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, NamedTuple, cast

from model.normalizer import UNENCODABLE, Normalizer, is_encodable
from rayjob.corpus.errors import CorpusError
from rayjob.corpus.files import open_binary, sha256_of
from rayjob.corpus.sources import Source, is_packed

# Of all that is kept on storage: raise it when the rules for cleaning, copies, the split or the blocks change.
FORMAT = 6

# At most 1 MiB of UTF-8, so that a block fills up well whatever the length of its documents.
PIECE_CHARS = 2**18

UTF_16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
ESCAPED = re.compile("[\udc80-\udcff]")  # how Python marks a byte that is not UTF-8
SURROGATE = re.compile("\udced[\udca0-\udcbf][\udc80-\udcbf]")  # its three bytes, escaped so
WINDOWS_1252 = {0xDC00 + byte: bytes([byte]).decode("cp1252", "replace") for byte in range(0x80, 0x100)}


class Piece(NamedTuple):
    """Characters [start, stop) of a normalised text, and their size in UTF-8."""

    start: int
    stop: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Document:
    """One text of the corpus: where its bytes lie, and what it is once normalised.

    Attributes:
        doc_id: the file's name, with `:line` for a line of .jsonl.
        path: the file as it lies now.
        first_byte, end_byte: its bytes in the file's (unpacked) content.
        field: key of the text in its JSON object; None where the bytes are the text.
        sha256: of the normalised text in UTF-8.
        bytes, chars: size of the normalised text.
        pieces: the normalised text cut before white space, in order and without a gap.
    """

    doc_id: str
    path: str
    first_byte: int
    end_byte: int
    field: str | None
    sha256: str
    bytes: int
    chars: int
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


class ScannedDocument(NamedTuple):
    """A document with its normalised text and what was odd about it."""

    document: Document
    text: str
    odd: Oddities


def decode_bytes(data: bytes) -> tuple[str, int]:
    """The text of `data` by the rule above, and how many of its bytes were not valid."""
    if data.startswith(UTF_16_MARKS):
        text = data.decode("utf-16", "replace")
        return text, text.count(REPLACEMENT)
    return decode_utf8(data)


def decode_utf8(data: bytes) -> tuple[str, int]:
    """The text of UTF-8 bytes, odd ones read by the rule above, and how many were odd."""
    text = data.decode("utf-8", "surrogateescape")
    invalid = sum(1 for _ in ESCAPED.finditer(text))
    return (SURROGATE.sub(REPLACEMENT, text).translate(WINDOWS_1252) if invalid else text), invalid


def scan_source(source: Source, normalizer: Normalizer, text_column: str) -> Iterator[ScannedDocument]:
    """Reads one file and yields its documents in order; the file is in memory, one at a time.

    Raises:
        CorpusError: the file is not what its suffix says, or changed since it was hashed.
    """
    content = _read_source(source)
    if not source.has_rows:
        text, invalid = decode_bytes(content)
        odd = _oddities_of_file(content, text, invalid)
        yield _describe(source.name, source.path, (0, len(content)), None, normalizer(text), odd)
        return
    first = 0
    for number, line in enumerate(content.splitlines(keepends=True), start=1):
        end = first + len(line)
        if line.strip():
            text, invalid = _parse_line(line, text_column, f"{source.name}:{number}")
            doc_id = f"{source.name}:{number}"
            odd = Oddities(invalid, _count_replaced(text), number, number)
            yield _describe(doc_id, source.path, (first, end), text_column, normalizer(text), odd)
        first = end


def read_document(document: Document, normalizer: Normalizer) -> str:
    """The normalised text of a document that was scanned before.

    Raises:
        CorpusError: the file is gone or its text is no longer the one that was scanned.
    """
    with _reading(document.path), _open(document.path) as file:
        file.seek(document.first_byte)
        content = file.read(document.end_byte - document.first_byte)
    if document.field is None:
        text, _ = decode_bytes(content)
    else:
        text, _ = _parse_line(content, document.field, document.doc_id)
    text = normalizer(text)
    if hashlib.sha256(text.encode()).hexdigest() != document.sha256:
        raise _changed(document.path)
    return text


def cut_pieces(text: str, start: int = 0, stop: int | None = None) -> tuple[Piece, ...]:
    """Cuts characters [start, stop) into pieces of at most PIECE_CHARS, before white space where there is any."""
    end = len(text) if stop is None else stop
    pieces = []
    while start < end:
        cut = end if end - start <= PIECE_CHARS else find_cut(text, start, start + PIECE_CHARS)
        pieces.append(Piece(start, cut, len(text[start:cut].encode())))
        start = cut
    return tuple(pieces)


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


def _read_source(source: Source) -> bytes:
    """The whole content of a file, unpacked, if it still is the file that was hashed."""
    with _reading(source.path):
        if sha256_of(source.path) != source.sha256:
            raise _changed(source.path)
        with _open(source.path) as content:
            return content.read()


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


def _oddities_of_file(content: bytes, text: str, invalid_bytes: int) -> Oddities:
    replaced_chars = _count_replaced(text)
    replaced = UNENCODABLE.search(text) if replaced_chars else None
    return Oddities(
        invalid_bytes,
        replaced_chars,
        _line_of_invalid(content, text) if invalid_bytes else None,
        text.count("\n", 0, replaced.start()) + 1 if replaced else None,
    )


def _line_of_invalid(content: bytes, text: str) -> int:
    if content.startswith(UTF_16_MARKS):
        return text.count("\n", 0, text.index(REPLACEMENT)) + 1
    escaped = ESCAPED.search(content.decode("utf-8", "surrogateescape"))
    assert escaped is not None  # it was counted
    return escaped.string.count("\n", 0, escaped.start()) + 1


def _count_replaced(text: str) -> int:
    return 0 if is_encodable(text) else len(UNENCODABLE.findall(text))


def _describe(
    doc_id: str, path: str, span: tuple[int, int], field: str | None, text: str, odd: Oddities
) -> ScannedDocument:
    encoded = text.encode()
    digest = hashlib.sha256(encoded).hexdigest()
    document = Document(doc_id, path, *span, field, digest, len(encoded), len(text), cut_pieces(text))
    return ScannedDocument(document, text, odd)
