"""Rows of Parquet files: what a file holds, which ranges of rows to work on, and reading one range.

A range is whole row groups, about RANGE_BYTES of text; a row group larger than two of those is cut by rows. A file
is never opened whole: batches are bounded by bytes, so neither long rows nor large row groups fill the memory.
"""

import functools
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rayjob.corpus.errors import CorpusError
from rayjob.corpus.files import open_input
from rayjob.corpus.sources import Source

RANGE_BYTES = 4 * 2**20  # of the text column; one block of training tokens comes from it, a second of one core
BATCH_BYTES = 2**20
MAX_BATCH_ROWS = 65_536


class RowFile(NamedTuple):
    """A Parquet file: rows of each row group, and uncompressed bytes of the text column of each."""

    group_rows: tuple[int, ...]
    group_bytes: tuple[int, ...]

    @property
    def n_rows(self) -> int:
        return sum(self.group_rows)


class RowRange(NamedTuple):
    """Rows [first, end) of a source."""

    source: Source
    first: int
    end: int

    @property
    def where(self) -> str:
        return f"{self.source.name} rows {self.first:,} to {self.end - 1:,}"


def inspect_files(sources: Sequence[Source], text_column: str, doc_column: str | None) -> list[RowFile]:
    """What each source holds, from its footer alone.

    Raises:
        CorpusError: naming every file that is no whole Parquet file, or lacks a column, or has one of another type.
    """
    files: list[RowFile] = []
    problems: list[str] = []
    for source in sources:
        try:
            files.append(_inspect(source, text_column, doc_column))
        except CorpusError as error:
            problems += error.problems
    if not problems and not any(file.n_rows for file in files):
        problems.append(f"The corpus is empty: none of its {len(sources)} files holds a row.")
    if problems:
        raise CorpusError(problems)
    return files


def plan_ranges(source: Source, file: RowFile) -> list[RowRange]:
    """Cuts a file into ranges; a pure function of its footer."""
    ranges: list[RowRange] = []
    first = row = filled = 0
    for n_rows, n_bytes in zip(file.group_rows, file.group_bytes, strict=True):
        if n_bytes > 2 * RANGE_BYTES and n_rows > 1:
            if row > first:
                ranges.append(RowRange(source, first, row))
            ranges += _cut_group(source, row, n_rows, -(-n_bytes // RANGE_BYTES))
            first, filled = row + n_rows, 0
        elif (filled := filled + n_bytes) >= RANGE_BYTES:
            ranges.append(RowRange(source, first, row + n_rows))
            first, filled = row + n_rows, 0
        row += n_rows
    if row > first:
        ranges.append(RowRange(source, first, row))
    return ranges


def read_column(rows: RowRange, column: str) -> Iterator[pa.Array]:
    """Yields the values of a text column as arrays of bytes (large_binary, nulls kept), about BATCH_BYTES each.

    Raises:
        CorpusError: the pages cannot be read; the file and the rows are named.
    """
    return (values for _, values in read_runs(rows.source, [(rows.first, rows.end)], column))


def read_runs(source: Source, runs: Sequence[tuple[int, int]], column: str) -> Iterator[tuple[int, pa.Array]]:
    """Yields (run, values) like `read_column`, of several runs of rows [first, end) in order, each row group read once.

    Raises:
        CorpusError: as `read_column`, also where rows are not there.
    """
    try:
        parquet = _open(source, column)
        groups, places = _find_runs(parquet, runs)
        run = row = 0
        for batch in _batches(parquet, groups, column):
            while run < len(places) and places[run][0] < row + len(batch):
                start, stop = places[run][0] - row, places[run][1] - row
                yield run, batch.slice(max(start, 0), min(stop, len(batch)) - max(start, 0))
                if stop > len(batch):
                    break
                run += 1
            row += len(batch)
            if run == len(places):
                return
        raise IndexError("rows that the footer names are not there")
    except (OSError, pa.ArrowException, IndexError) as error:
        where = RowRange(source, runs[0][0], runs[-1][1]).where
        raise CorpusError([f"{source.path}: {where} cannot be read ({_first_line(error)})."]) from None


def _find_runs(parquet: pq.ParquetFile, runs: Sequence[tuple[int, int]]) -> tuple[list[int], list[tuple[int, int]]]:
    """The row groups that hold runs, and where each run lies among the rows of these groups."""
    starts = [0, *itertools.accumulate(_group_rows(parquet))]
    if runs[-1][1] > starts[-1]:
        raise IndexError(f"it ends after {starts[-1]:,} rows")
    rows_before: dict[int, int] = {}  # of each group that is read
    total = 0
    for first, end in runs:
        for group in range(bisect_right(starts, first) - 1, bisect_left(starts, end)):
            if group not in rows_before:
                rows_before[group] = total
                total += starts[group + 1] - starts[group]
    shifts = [rows_before[group] - starts[group] for group in (bisect_right(starts, first) - 1 for first, _ in runs)]
    return list(rows_before), [(first + by, end + by) for (first, end), by in zip(runs, shifts, strict=True)]


def _inspect(source: Source, text_column: str, doc_column: str | None) -> RowFile:
    try:
        parquet = _open(source)
        schema = parquet.schema_arrow
        problems = [
            problem
            for key, column in (("text_column", text_column), ("doc_column", doc_column))
            if column is not None and (problem := _column_problem(schema, key, column))
        ]
        if problems:
            raise CorpusError([f"{source.path}: {problem}" for problem in problems])
        place = _leaf_index(parquet, text_column)
        groups = [parquet.metadata.row_group(g) for g in range(parquet.metadata.num_row_groups)]
        n_bytes = tuple(group.column(place).total_uncompressed_size for group in groups)
        return RowFile(tuple(group.num_rows for group in groups), n_bytes)
    except (OSError, pa.ArrowException) as error:
        size = f"{source.bytes:,} bytes"
        raise CorpusError(
            [f"{source.path} is no whole Parquet file ({size}): {_first_line(error)} Fetch it again or remove it."]
        ) from None


def _column_problem(schema: pa.Schema, key: str, column: str) -> str | None:
    if column not in schema.names:
        return f"there is no column {column!r} (data.{key}); it has {', '.join(map(repr, schema.names))}."
    if schema.names.count(column) > 1:
        return f"there are several columns {column!r} (data.{key}); rename all but one."
    kind = schema.field(column).type
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    # A file that holds nothing but nulls, or no row, often has no better type.
    if _is_text(value) or pa.types.is_null(value) or (key == "doc_column" and pa.types.is_integer(value)):
        return None
    return f"column {column!r} (data.{key}) is of type {kind}, expected text."


def _is_text(kind: pa.DataType) -> bool:
    types = pa.types
    kinds = (types.is_string, types.is_large_string, types.is_string_view, types.is_binary, types.is_large_binary)
    return any(is_kind(kind) for is_kind in kinds)


def _leaf_index(parquet: pq.ParquetFile, column: str) -> int:
    """Leaf columns are counted apart from the schema's fields where some are nested."""
    return next(i for i in range(len(parquet.schema)) if parquet.schema.column(i).path == column)


def _cut_group(source: Source, first: int, n_rows: int, n_parts: int) -> list[RowRange]:
    n_parts = min(n_parts, n_rows)
    cuts = [first + n_rows * part // n_parts for part in range(n_parts + 1)]
    return [RowRange(source, start, end) for start, end in itertools.pairwise(cuts)]


@functools.lru_cache(maxsize=4)  # a footer of 7,000 row groups takes longer to parse than a range to read
def _open(source: Source, coded_column: str | None = None) -> pq.ParquetFile:
    """Opens a file; a text column can be left in the dictionary codes that it is stored in, however long its rows."""
    codes = [coded_column] if coded_column else None
    return pq.ParquetFile(  # without a buffer, a column chunk is read whole
        open_input(source.path), buffer_size=BATCH_BYTES, read_dictionary=codes
    )


def _group_rows(parquet: pq.ParquetFile) -> list[int]:
    metadata = parquet.metadata
    return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]


def _batches(parquet: pq.ParquetFile, groups: list[int], column: str) -> Iterator[pa.Array]:
    place = _leaf_index(parquet, column)
    metadata = [parquet.metadata.row_group(group) for group in groups]
    n_bytes = sum(group.column(place).total_uncompressed_size for group in metadata)
    n_rows = sum(group.num_rows for group in metadata)
    batch_rows = min(max(BATCH_BYTES * n_rows // max(n_bytes, 1), 1), MAX_BATCH_ROWS)
    batches = parquet.iter_batches(batch_rows, row_groups=groups, columns=[column], use_threads=False)
    return _joined(values for batch in batches for values in _decoded(batch.column(column)))


def _joined(arrays: Iterable[pa.Array]) -> Iterator[pa.Array]:
    """Joins small arrays to batches: in dictionary codes a batch ends with its row group, which may have few rows."""
    waiting: list[pa.Array] = []
    n_bytes = 0
    for values in arrays:
        waiting.append(values)
        n_bytes += values.nbytes
        if n_bytes >= BATCH_BYTES:
            yield pa.concat_arrays(waiting)
            waiting, n_bytes = [], 0
    if waiting:
        yield pa.concat_arrays(waiting)


def _decoded(values: pa.Array) -> Iterator[pa.Array]:
    """Cuts an array of dictionary codes where its text would be larger than a batch: of a repeated row there is one."""
    if not pa.types.is_dictionary(values.type):
        kind = pa.string() if pa.types.is_integer(values.type) else values.type
        yield values.cast(kind).cast(pa.large_binary())
        return
    lengths = pc.binary_length(values.dictionary).take(values.indices)
    ends = np.cumsum(lengths.fill_null(0).to_numpy(), dtype=np.int64)
    start = 0
    while start < len(values):
        limit = (ends[start - 1] if start else 0) + BATCH_BYTES
        end = max(int(np.searchsorted(ends, limit, side="right")), start + 1)
        yield values[start:end].dictionary_decode().cast(pa.large_binary())
        start = end


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".") + "."
