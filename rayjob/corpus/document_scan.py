"""First reading of files of whole documents: what each holds, one part on storage for each larger file.

A part depends only on the file's content and how it is cleaned, so a start after a kill, and every later `prepare` of
the same file, reads the part in place of the text.
"""

import dataclasses
import hashlib
import json
import operator
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from model.normalizer import Normalizer
from rayjob.corpus.dedup import Fingerprint
from rayjob.corpus.documents import FORMAT, Document, Piece, scan_source
from rayjob.corpus.parts import read_part, write_part
from rayjob.corpus.sources import Source, is_packed

LEAST_BYTES = 2**18  # of a file that is worth a part: a smaller one is read as fast


class SourceFacts(NamedTuple):
    """What one file gave: documents found, their bytes as they stand and as normalised text, and what was odd in them.

    `invalid_bytes` and `replaced_chars` are those of `Oddities`.
    """

    documents: int
    source_bytes: int
    text_bytes: int
    invalid_bytes: int
    replaced_chars: int


class DocumentScan(NamedTuple):
    """What one file holds.

    Attributes:
        documents, fingerprints: of those with text. empty: ids of those without.
        invalid_line, replaced_line: the first odd ones, as in `Oddities`.
    """

    documents: list[Document]
    fingerprints: list[Fingerprint]
    empty: list[str]
    facts: SourceFacts
    invalid_line: int | None
    replaced_line: int | None


def part_path(source: Source, normalizer: Normalizer, text_column: str, folder: Path) -> Path:
    """Where the part of a file lies, if it has one."""
    read_as = text_column if source.has_rows else is_packed(source.path)
    key = json.dumps([FORMAT, source.sha256, read_as, normalizer.to_json()])
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.parquet"


def scan_documents(source: Source, normalizer: Normalizer, text_column: str, folder: Path) -> DocumentScan:
    """Reads the part of a file in `folder`, or else the file, and keeps the part.

    Raises:
        CorpusError: the file is not what its suffix says, or changed since it was hashed.
    """
    path = part_path(source, normalizer, text_column, folder)
    if (found := read_part(path)) is not None:
        return _from_part(source, *found)
    scan = _scan(source, normalizer, text_column)
    if source.bytes >= LEAST_BYTES:
        write_part(path, *_to_part(source, scan))
    return scan


def _scan(source: Source, normalizer: Normalizer, text_column: str) -> DocumentScan:
    documents, fingerprints, empty = list[Document](), list[Fingerprint](), list[str]()
    facts = SourceFacts(0, 0, 0, 0, 0)
    invalid_lines, replaced_lines = list[int | None](), list[int | None]()
    for document, fingerprint, is_blank, odd in scan_source(source, normalizer, text_column):
        n_bytes = document.end_byte - document.first_byte
        of_document = (1, n_bytes, document.bytes, odd.invalid_bytes, odd.replaced_chars)
        facts = SourceFacts(*map(operator.add, facts, of_document))
        invalid_lines += [odd.invalid_line] if odd.invalid_bytes else []
        replaced_lines += [odd.replaced_line] if odd.replaced_chars else []
        if is_blank:
            empty.append(document.doc_id)
        else:
            documents.append(document)
            fingerprints.append(fingerprint)
    first_lines = (next(iter(lines), None) for lines in (invalid_lines, replaced_lines))
    return DocumentScan(documents, fingerprints, empty, facts, *first_lines)


def _to_part(source: Source, scan: DocumentScan) -> tuple[dict[str, Any], dict[str, Any]]:
    """Columns and facts of a part; names and places of files are left out, as files are moved and renamed."""
    hashes = pa.list_(pa.uint64())
    columns = {
        "document": [_describe(source, document) for document in scan.documents],
        "sentences": pa.array([each.sentences for each in scan.fingerprints], hashes),
        "runs": pa.array([each.runs for each in scan.fingerprints], hashes),
    }
    empty = [doc_id.removeprefix(source.name) for doc_id in scan.empty]
    return columns, {"rest": [empty, scan.facts, scan.invalid_line, scan.replaced_line]}


def _from_part(source: Source, table: pa.Table, facts: Mapping[str, Any]) -> DocumentScan:
    documents = [_restore(source, line) for line in table.column("document").to_pylist()]
    sentences, runs = (_arrays(table.column(name)) for name in ("sentences", "runs"))
    fingerprints = [Fingerprint(*each) for each in zip(sentences, runs, strict=True)]
    suffixes, counts, *lines = facts["rest"]
    empty = [source.name + suffix for suffix in suffixes]
    return DocumentScan(documents, fingerprints, empty, SourceFacts(*counts), *lines)


def _arrays(column: pa.ChunkedArray) -> Iterator[np.ndarray[Any, np.dtype[np.uint64]]]:
    for chunk in column.chunks:
        offsets, values = chunk.offsets.to_numpy(), chunk.values.to_numpy()
        yield from (values[start:end].copy() for start, end in zip(offsets[:-1], offsets[1:], strict=True))


def _describe(source: Source, document: Document) -> str:
    fields = dataclasses.asdict(document)
    del fields["path"]
    return json.dumps(fields | {"doc_id": document.doc_id.removeprefix(source.name)})


def _restore(source: Source, line: str) -> Document:
    fields = json.loads(line)
    pieces = tuple(Piece(*piece) for piece in fields.pop("pieces"))
    return Document(**{**fields, "doc_id": source.name + fields["doc_id"]}, path=source.path, pieces=pieces)
