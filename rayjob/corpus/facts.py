"""What the manifest tells of a corpus beside its blocks, the same for documents and for rows."""

import csv
import hashlib
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rayjob.corpus.blocks import SPLITS
from rayjob.corpus.catalog import Catalog, Stretch, invalid_warning, replaced_warning, some_of
from rayjob.corpus.row_catalog import RowCatalog
from rayjob.corpus.row_units import RowUnit
from rayjob.corpus.scan import BOILERPLATE, DUPLICATE, EMPTY, TRAIN, VAL
from rayjob.corpus.sources import Source

REMOVED_LINES = 20  # most frequent boilerplate lines that the manifest names
N_STATES = 5
SOURCE_COUNTS = "rows", "source_bytes", "invalid_bytes", "replaced_chars"


class CorpusFacts(NamedTuple):
    """Counts and statistics of a corpus.

    Attributes:
        sources: one entry per file.
        documents, sha256s: by split, their number (see `SplitTotals`) and the hash of their contents.
        totals, statistics, warnings: see `Manifest`.
        repeats: what was removed because it stands earlier, as CSV; None where the warnings name it.
    """

    sources: list[dict[str, Any]]
    documents: dict[str, int]
    sha256s: dict[str, str]
    totals: dict[str, int]
    statistics: dict[str, dict[str, int]]
    warnings: list[str]
    repeats: bytes | None


def document_facts(sources: Sequence[Source], catalog: Catalog) -> CorpusFacts:
    """Facts of whole documents, none of which is ever boilerplate."""
    described = [
        {**source.identity(), **facts._asdict()} for source, facts in zip(sources, catalog.source_facts, strict=True)
    ]
    totals = {
        "rows_in": catalog.rows_in,
        "rows_empty": catalog.rows_empty,
        "rows_boilerplate": 0,
        "rows_duplicate": catalog.rows_duplicate,
        "rows_kept": catalog.rows_in - catalog.rows_empty - catalog.rows_duplicate,
        "bytes_in": catalog.bytes_in,
        "bytes_removed": catalog.bytes_in - catalog.bytes_kept,
        "bytes_kept": catalog.bytes_kept,
    }
    splits = catalog.splits()
    sizes = np.array([stretch.bytes for stretches in splits.values() for stretch in stretches], dtype=np.int64)
    sha256s = {split: _documents_sha256(stretches) for split, stretches in splits.items()}
    statistics = {"row_bytes": _histogram([sizes]), "removed_lines": {}}
    documents = {split: len({each.document.doc_id for each in stretches}) for split, stretches in splits.items()}
    return CorpusFacts(described, documents, sha256s, totals, statistics, list(catalog.warnings), None)


def row_facts(sources: Sequence[Source], catalog: RowCatalog, units: Sequence[RowUnit]) -> CorpusFacts:
    """Facts of rows, added up over the scan parts."""
    n_rows, n_bytes = np.zeros(N_STATES, dtype=np.int64), np.zeros(N_STATES, dtype=np.int64)
    by_source = {source: Counter[str]() for source in sources}
    first_seen: dict[tuple[Source, str], int] = {}
    lines: Counter[str] = Counter()
    buckets: Counter[int] = Counter()
    for rows, start, part in catalog.parts():
        states = catalog.states[start : start + len(part.states)]
        n_rows += np.bincount(states, minlength=N_STATES)
        n_bytes += np.bincount(states, weights=part.bytes, minlength=N_STATES).astype(np.int64)
        lines.update(part.boilerplate)
        buckets.update(_buckets(part.bytes[states <= VAL]))
        count = by_source[rows.source]
        count.update(rows=len(states), invalid_bytes=part.invalid_bytes, replaced_chars=part.replaced_chars)
        count.update(empty=int(np.count_nonzero(states == EMPTY)), source_bytes=int(part.bytes.sum(dtype=np.int64)))
        count.update(nameless=part.nameless_rows)
        for kind in ("invalid", "replaced", "empty", "nameless"):
            if (row := getattr(part, f"{kind}_row")) is not None:
                first_seen.setdefault((rows.source, kind), row)
    statistics = {
        "row_bytes": _name_buckets(buckets),
        "removed_lines": dict(sorted(lines.items(), key=lambda line: (-line[1], line[0]))[:REMOVED_LINES]),
    }
    described = [
        {**source.identity(), **{name: by_source[source][name] for name in SOURCE_COUNTS}} for source in sources
    ]
    warnings = list(_row_warnings(by_source, first_seen))
    return CorpusFacts(
        described,
        {split: _count_documents(units, split) for split in SPLITS},
        catalog.sha256s,
        _row_totals(n_rows, n_bytes),
        statistics,
        warnings,
        _repeats_csv(catalog),
    )


def _documents_sha256(stretches: Sequence[Stretch]) -> str:
    texts = sorted(f"{stretch.document.sha256} {stretch.pieces[0].start} {stretch.bytes}" for stretch in stretches)
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def _count_documents(units: Sequence[RowUnit], split: str) -> int:
    """Documents of one side; without known ones each run of rows has a name of its own."""
    return len({span.doc_id for unit in units if unit.split == split for span in unit.spans})


def _row_totals(n_rows: npt.NDArray[np.int64], n_bytes: npt.NDArray[np.int64]) -> dict[str, int]:
    kept = [TRAIN, VAL]
    return {
        "rows_in": int(n_rows.sum()),
        "rows_empty": int(n_rows[EMPTY]),
        "rows_boilerplate": int(n_rows[BOILERPLATE]),
        "rows_duplicate": int(n_rows[DUPLICATE]),
        "rows_kept": int(n_rows[kept].sum()),
        "bytes_in": int(n_bytes.sum()),
        "bytes_removed": int(n_bytes.sum() - n_bytes[kept].sum()),
        "bytes_kept": int(n_bytes[kept].sum()),
    }


def _row_warnings(by_source: dict[Source, Counter[str]], first_seen: dict[tuple[Source, str], int]) -> Iterator[str]:
    yield from some_of(f"{source.name} holds no rows." for source, count in by_source.items() if not count["rows"])
    yield from some_of(
        invalid_warning(source.name, count["invalid_bytes"], f"row {first_seen[source, 'invalid']}")
        for source, count in by_source.items()
        if count["invalid_bytes"]
    )
    yield from some_of(
        replaced_warning(source.name, count["replaced_chars"], f"row {first_seen[source, 'replaced']}")
        for source, count in by_source.items()
        if count["replaced_chars"]
    )
    yield from some_of(
        f"{source.name}: {count['empty']} rows are null or blank, the first is row {first_seen[source, 'empty']}; "
        "they were left out."
        for source, count in by_source.items()
        if count["empty"]
    )
    yield from _nameless_warnings(by_source, first_seen)


def _nameless_warnings(
    by_source: dict[Source, Counter[str]], first_seen: dict[tuple[Source, str], int]
) -> Iterator[str]:
    return some_of(
        f"{source.name}: {count['nameless']} rows name no document (data.doc_column), the first is row "
        f"{first_seen[source, 'nameless']}; neighbours among them were taken as one document."
        for source, count in by_source.items()
        if count["nameless"]
    )


def _repeats_csv(catalog: RowCatalog) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["file", "first_row", "last_row", "removed_rows", "original_file", "original_row"])
    counted = 0
    for first, end, original in catalog.repeats:
        # A copied document may reach into a repeated passage: a row counts for the first that names it.
        removed = int(np.count_nonzero(catalog.states[max(first, counted) : end] == DUPLICATE))
        counted = max(counted, end)
        (file, row), (_, last) = catalog.place(first), catalog.place(end - 1)
        writer.writerow([file, row, last, removed, *catalog.place(original)])
    return text.getvalue().encode()


def _histogram(sizes: Iterable[npt.NDArray[np.integer[Any]]]) -> dict[str, int]:
    return _name_buckets(sum((_buckets(part) for part in sizes), Counter()))


def _buckets(sizes: npt.NDArray[np.integer[Any]]) -> Counter[int]:
    powers = np.ceil(np.log2(np.maximum(sizes, 1))).astype(np.int64)
    return Counter({power: int(count) for power, count in enumerate(np.bincount(powers)) if count})


def _name_buckets(buckets: Counter[int]) -> dict[str, int]:
    return {str(2**power): buckets[power] for power in sorted(buckets)}
