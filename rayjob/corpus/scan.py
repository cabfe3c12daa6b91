"""First reading of the rows: hash, size and kind of each, one part on storage for each range.

A part depends only on the file's content and the range, so it serves every later `prepare` of the same file. Ray
tasks make the missing ones, several ranges each; the driver reads them back one at a time.
"""

import functools
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rayjob.corpus.boilerplate import PATTERN, find_boilerplate
from rayjob.corpus.decoding import decode_utf8
from rayjob.corpus.documents import FORMAT
from rayjob.corpus.errors import CorpusError
from rayjob.corpus.parts import read_part, write_part
from rayjob.corpus.repeats import Hashes, hash_rows
from rayjob.corpus.rows import RowRange, read_column
from rayjob.corpus.sources import Source
from rayjob.corpus.tasks import Progress, run_tasks
from rayjob.store.fetch import fetch_some

SPACES, QUOTES = b" \t\n\v\f\r", b"\"'`"
MARKS = {"\ufeff".encode(): b"", "\u2581".encode(): b"_"}
TREEBANK_MARKS = {quote.encode(): b"" for quote in "“”‘’"} | {"…".encode(): b"..."}
BRACKET = re.compile(rb"-[lLrR][rRsScC][bB]-")
BRACKETS = {b"-lrb-": b"(", b"-rrb-": b")", b"-lsb-": b"[", b"-rsb-": b"]", b"-lcb-": b"{", b"-rcb-": b"}"}
RANGES_PER_TASK = 8  # half a second
MOST_FREQUENT_LINES = 200  # boilerplate lines that a part remembers for the corpus card

TRAIN, VAL, EMPTY, BOILERPLATE, DUPLICATE = range(5)
"""What becomes of a row, one byte each."""


class ScanSettings(NamedTuple):
    """What decides a part beside the file: the columns and what will be made of the text; and where parts lie."""

    text_column: str
    doc_column: str | None
    lowercase: bool
    detokenize: bool
    folder: str

    def part_path(self, rows: RowRange) -> Path:
        key = [FORMAT, rows.source.sha256, rows.first, rows.end, *self[:-1], PATTERN]
        return Path(self.folder) / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]}.parquet"


class ScanPart(NamedTuple):
    """What was seen in a range.

    Attributes:
        hashes: (N,) uint64, of what of each row decides whether it is a copy (`_essences`).
        bytes: (N,) uint32, size of each row and its line break.
        states: (N,) uint8, TRAIN, EMPTY or BOILERPLATE so far.
        documents: (row in the range, document) where a document starts; empty without a doc_column. The first row of
            the range is always among them.
        invalid_bytes: that were not UTF-8. invalid_row: the first row with one, counted in the file.
        replaced_chars: NUL; a lone surrogate is not UTF-8. replaced_row: the first row with one.
        empty_row: the first row that is null or blank, counted in the file.
        nameless_rows: without a document's name, where there is a doc_column. nameless_row: the first of them.
        boilerplate: the most frequent boilerplate lines.
    """

    hashes: Hashes
    bytes: npt.NDArray[np.uint32]
    states: npt.NDArray[np.uint8]
    documents: list[tuple[int, str]]
    invalid_bytes: int
    invalid_row: int | None
    replaced_chars: int
    replaced_row: int | None
    empty_row: int | None
    nameless_rows: int
    nameless_row: int | None
    boilerplate: dict[str, int]


def ensure_scanned(ranges: Sequence[RowRange], settings: ScanSettings, is_cancelled: Callable[[], bool]) -> None:
    """Makes the parts that are missing.

    Raises:
        CorpusError: a file cannot be read; it is named with the rows.
        PrepareCancelled: the caller asked to stop.
    """
    _fetch_parts(ranges, settings)
    missing = [rows for rows in ranges if not settings.part_path(rows).exists()]
    if not missing:
        return
    batches = [missing[i : i + RANGES_PER_TASK] for i in range(0, len(missing), RANGES_PER_TASK)]
    progress = Progress("scan", sum(rows.end - rows.first for rows in missing), "rows")
    function = functools.partial(_scan_ranges, settings=settings)
    for result in run_tasks(function, [_to_json(batch) for batch in batches], is_cancelled=is_cancelled):
        progress.add(result["rows"], result["bytes"])
    _fetch_parts(ranges, settings)  # that tasks on other nodes made


def _fetch_parts(ranges: Sequence[RowRange], settings: ScanSettings) -> None:
    fetch_some(Path(settings.folder), [settings.part_path(rows) for rows in ranges])


def load_part(rows: RowRange, settings: ScanSettings) -> ScanPart:
    """Reads the part of a range, making it if it was damaged."""
    found = read_part(settings.part_path(rows))
    if found is None:
        _scan_range(rows, settings)
        found = read_part(settings.part_path(rows))
        assert found is not None  # it was just written
    table, facts = found
    hashes, sizes, states = (table.column(name).to_numpy() for name in ("hash", "bytes", "state"))
    documents = [(row, document) for row, document in facts.pop("documents")]
    return ScanPart(hashes, sizes, states, documents, **facts)


def _scan_ranges(item: dict[str, Any], settings: ScanSettings) -> dict[str, Any]:
    n_rows = n_bytes = 0
    problems: list[str] = []
    for rows in _from_json(item["item"]):
        try:
            if not settings.part_path(rows).exists():  # it does if this process was killed and Ray started it again
                n_bytes += _scan_range(rows, settings)
        except CorpusError as error:
            problems += error.problems
        n_rows += rows.end - rows.first
    if problems:
        raise CorpusError(problems)
    return {"rows": n_rows, "bytes": n_bytes}


def _scan_range(rows: RowRange, settings: ScanSettings) -> int:
    batches = [_scan_batch(batch, settings) for batch in read_column(rows, settings.text_column)]
    if not batches or sum(len(batch.hashes) for batch in batches) != rows.end - rows.first:
        raise CorpusError([f"{rows.source.path}: {rows.where} are not all there: it changed or is damaged."])
    sizes, states = (np.concatenate([getattr(batch, name) for batch in batches]) for name in ("bytes", "states"))
    bad_rows, nul_rows = (np.concatenate([getattr(b, name) for b in batches]) for name in ("invalid_bytes", "nuls"))
    lines: Counter[str] = sum((batch.boilerplate for batch in batches), Counter())
    documents, is_nameless = _read_documents(rows, settings.doc_column)
    facts = {
        "documents": documents,
        "nameless_rows": int(is_nameless.sum()),
        "nameless_row": _first_row(rows, is_nameless),
        "invalid_bytes": int(bad_rows.sum()),
        "invalid_row": _first_row(rows, bad_rows > 0),
        "replaced_chars": int(nul_rows.sum()),
        "replaced_row": _first_row(rows, nul_rows > 0),
        "empty_row": _first_row(rows, states == EMPTY),
        # Ties in the order of lines: the order of reading must not decide what is kept.
        "boilerplate": dict(sorted(lines.items(), key=lambda line: (-line[1], line[0]))[:MOST_FREQUENT_LINES]),
    }
    hashes = np.concatenate([batch.hashes for batch in batches])
    write_part(settings.part_path(rows), {"hash": hashes, "bytes": sizes, "state": states}, facts)
    return int(sizes.sum())


class _Batch(NamedTuple):
    hashes: Hashes
    bytes: npt.NDArray[np.uint32]
    states: npt.NDArray[np.uint8]
    invalid_bytes: npt.NDArray[np.int64]
    nuls: npt.NDArray[np.int64]
    boilerplate: Counter[str]


def _scan_batch(values: pa.Array, settings: ScanSettings) -> _Batch:
    rows = values.fill_null(b"").to_pylist()
    is_boilerplate = find_boilerplate(values).fill_null(False).to_numpy(zero_copy_only=False)
    is_empty = np.fromiter((not row or row.isspace() for row in rows), dtype=bool, count=len(rows))
    states = np.where(is_empty, EMPTY, np.where(is_boilerplate, BOILERPLATE, TRAIN)).astype(np.uint8)
    sizes = np.fromiter(map(len, rows), dtype=np.uint32, count=len(rows)) + np.uint32(1)
    lines = Counter(decode_utf8(rows[index])[0].strip() for index in np.flatnonzero(states == BOILERPLATE))
    nuls = np.fromiter((row.count(b"\0") for row in rows), dtype=np.int64, count=len(rows))
    mended, invalid_bytes = _mend(rows)
    return _Batch(hash_rows(_essences(mended, settings)), sizes, states, invalid_bytes, nuls, lines)


def _essences(rows: Sequence[bytes], settings: ScanSettings) -> list[bytes]:
    """Each row without what cleaning takes from it or may change: line ends and marks, and where it will be, case or
    the spaces, quotes, brackets and dots of the treebank style. A stand-in for the normaliser, at a tenth of its cost.
    """
    plain = _without_treebank(rows) if settings.detokenize else [_put(MARKS, row).strip(SPACES) for row in rows]
    return [_lower(row) for row in plain] if settings.lowercase else plain


def _without_treebank(rows: Sequence[bytes]) -> list[bytes]:
    joined = b"\0".join(rows)  # one long text takes a fraction of the time of many rows
    texts = [joined] if joined.count(b"\0") == len(rows) - 1 else rows  # one of them may hold a NUL
    plain = [
        BRACKET.sub(lambda match: BRACKETS[match[0].lower()], _put(MARKS | TREEBANK_MARKS, text)).translate(
            None, SPACES + QUOTES
        )
        for text in texts
    ]
    return plain[0].split(b"\0") if texts is not rows else plain


def _put(spellings: Mapping[bytes, bytes], text: bytes) -> bytes:
    if not text.isascii():
        for spelling, plain in spellings.items():
            text = text.replace(spelling, plain)
    return text


def _lower(row: bytes) -> bytes:
    return row.lower() if row.isascii() else row.decode().lower().encode()


def _mend(rows: list[bytes]) -> tuple[list[bytes], npt.NDArray[np.int64]]:
    """The rows in valid UTF-8, and how many bytes of each were not."""
    try:
        b"\n".join(rows).decode()
    except UnicodeDecodeError:
        decoded = [decode_utf8(row) for row in rows]
        return [text.encode() for text, _ in decoded], np.array([invalid for _, invalid in decoded], dtype=np.int64)
    return rows, np.zeros(len(rows), dtype=np.int64)


def _read_documents(rows: RowRange, doc_column: str | None) -> tuple[list[tuple[int, str]], npt.NDArray[np.bool_]]:
    """Where documents start, and which rows name none: neighbours among them are one document with an empty name."""
    starts: list[tuple[int, str]] = []
    is_nameless = np.zeros(rows.end - rows.first, dtype=bool)
    if doc_column is None:
        return starts, is_nameless
    row = 0
    for values in read_column(rows, doc_column):
        for value in values.to_pylist():
            document = decode_utf8(value or b"")[0]
            if not starts or starts[-1][1] != document:
                starts.append((row, document))
            is_nameless[row] = not document
            row += 1
    return starts, is_nameless


def _first_row(rows: RowRange, is_marked: npt.NDArray[np.bool_]) -> int | None:
    marked = np.flatnonzero(is_marked)
    return rows.first + int(marked[0]) if len(marked) else None


def _to_json(ranges: Sequence[RowRange]) -> str:
    return json.dumps([[rows.source.to_json(), rows.first, rows.end] for rows in ranges])


def _from_json(item: str) -> Iterator[RowRange]:
    for source, first, end in json.loads(item):
        yield RowRange(Source.from_json(source), first, end)
