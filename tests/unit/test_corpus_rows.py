import hashlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayjob.corpus import rows
from rayjob.corpus.errors import CorpusError
from rayjob.corpus.rows import RowRange, inspect_files, plan_ranges, read_column, read_runs
from rayjob.corpus.sources import Source


def source(path: Path) -> Source:
    content = path.read_bytes()
    return Source(path.name, str(path), len(content), hashlib.sha256(content).hexdigest())


def write(path: Path, values: Any, group_rows: int = 1000, **settings: Any) -> Source:
    pq.write_table(pa.table({"text": values}), path, row_group_size=group_rows, **settings)
    return source(path)


def read(rows_of: RowRange, column: str = "text") -> list[bytes | None]:
    return [value for values in read_column(rows_of, column) for value in values.to_pylist()]


def ranges_of(file: Source) -> list[RowRange]:
    [footer] = inspect_files([file], "text", None)
    return plan_ranges(file, footer)


@pytest.mark.parametrize("group_rows", [3, 10, 1000])
def test_ranges_cover_every_row_once_in_order(tmp_path: Path, group_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "RANGE_BYTES", 100)
    lines = [f"row {number}" for number in range(100)]
    ranges = ranges_of(write(tmp_path / "a.parquet", lines, group_rows))
    assert len(ranges) > 3
    assert [value for part in ranges for value in read(part)] == [line.encode() for line in lines]


def test_range_is_whole_row_groups_unless_one_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "RANGE_BYTES", 2_000)
    small = ranges_of(write(tmp_path / "small.parquet", [f"{i:010d}" for i in range(1000)], 50))
    assert all(part.first % 50 == 0 for part in small)
    large = ranges_of(write(tmp_path / "large.parquet", [f"{i:010d}" for i in range(1000)], 1000))
    assert len(large) >= 5
    assert max(part.end - part.first for part in large) <= 200


def test_batches_stay_small_when_rows_are_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "BATCH_BYTES", 1_000)
    file = write(tmp_path / "a.parquet", [f"{i:02d}" * 250 for i in range(40)])
    batches = list(read_column(RowRange(file, 0, 40), "text"))
    assert len(batches) >= 20


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())])
def test_batches_stay_small_when_a_long_row_is_stored_once_and_repeated(tmp_path: Path, kind: pa.DataType) -> None:
    row = "word " * 3_000
    value_kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    values = pa.array([row, None] * 2_000, value_kind)
    file = write(tmp_path / "a.parquet", values.cast(kind), group_rows=4_000)
    assert file.bytes < 100_000
    batches = list(read_column(RowRange(file, 0, 4_000), "text"))
    assert max(batch.nbytes for batch in batches) < 2 * rows.BATCH_BYTES
    assert [value for batch in batches for value in batch.to_pylist()] == [row.encode(), None] * 2_000


def test_small_row_groups_come_joined(tmp_path: Path) -> None:
    lines = [f"row {number}" for number in range(5_000)]
    file = write(tmp_path / "a.parquet", lines, group_rows=10)
    [batch] = read_column(RowRange(file, 0, 5_000), "text")
    assert batch.to_pylist() == [line.encode() for line in lines]


def test_row_of_fifty_megabytes_is_read(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", ["short", "word " * 10_000_000, "end"])
    assert [len(value or b"") for part in ranges_of(file) for value in read(part)] == [5, 50_000_000, 3]


@pytest.mark.parametrize(
    "values",
    [
        pa.array(["a", None, "b"]),
        pa.array(["a", None, "b"], pa.large_string()),
        pa.array(["a", None, "b"], pa.string_view()),
        pa.array([b"a", None, b"b"], pa.binary()),
        pa.array([b"a", None, b"b"], pa.large_binary()),
        pa.array(["a", None, "b"]).dictionary_encode(),
    ],
)
def test_every_kind_of_text_column_reads_the_same(tmp_path: Path, values: pa.Array) -> None:
    [rows_of_file] = ranges_of(write(tmp_path / "a.parquet", values))
    assert read(rows_of_file) == [b"a", None, b"b"]


@pytest.mark.parametrize("count", [0, 3])
def test_column_without_a_type_is_one_of_nulls(tmp_path: Path, count: int) -> None:
    untyped, other = write(tmp_path / "a.parquet", pa.nulls(count)), write(tmp_path / "b.parquet", ["text"])
    footers = inspect_files([untyped, other], "text", "text")
    assert [footer.n_rows for footer in footers] == [count, 1]
    assert [value for part in plan_ranges(untyped, footers[0]) for value in read(part)] == [None] * count


def test_column_is_read_by_its_own_name_beside_others_that_look_like_it(tmp_path: Path) -> None:
    nested, dotted = pa.array([{"b": "nested"}]), pa.array(["dotted"])
    pq.write_table(pa.table({"a": nested, "a.b.c": dotted, "a.b": pa.array(["text"])}), tmp_path / "a.parquet")
    assert read(RowRange(source(tmp_path / "a.parquet"), 0, 1), "a.b") == [b"text"]


def test_thousands_of_row_groups_are_a_few_ranges(tmp_path: Path) -> None:
    ranges = ranges_of(write(tmp_path / "a.parquet", ["a sentence ."] * 7_000, 1))
    assert len(ranges) == 1
    assert len(read(ranges[0])) == 7_000


def problems_of(*files: Source, text_column: str = "text", doc_column: str | None = None) -> list[str]:
    with pytest.raises(CorpusError) as raised:
        inspect_files(files, text_column, doc_column)
    return raised.value.problems


def test_empty_and_cut_files_are_all_named(tmp_path: Path) -> None:
    (tmp_path / "empty.parquet").write_bytes(b"")
    whole = write(tmp_path / "whole.parquet", ["x" * 1000] * 100)
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "whole.parquet").read_bytes()[:-300])
    empty, cut = problems_of(source(tmp_path / "empty.parquet"), whole, source(tmp_path / "cut.parquet"))
    assert "empty.parquet is no whole Parquet file (0 bytes)" in empty
    assert "cut.parquet is no whole Parquet file" in cut


def test_missing_column_is_named_with_those_there_are(tmp_path: Path) -> None:
    [text, doc] = problems_of(write(tmp_path / "a.parquet", ["x"]), text_column="sentence", doc_column="title")
    assert "there is no column 'sentence' (data.text_column); it has 'text'" in text
    assert "'title' (data.doc_column)" in doc


def test_column_that_is_there_twice_is_named(tmp_path: Path) -> None:
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(twice, tmp_path / "a.parquet")
    [problem] = problems_of(source(tmp_path / "a.parquet"))
    assert "several columns 'text' (data.text_column)" in problem


def test_column_of_another_type_is_named_with_its_type(tmp_path: Path) -> None:
    [problem] = problems_of(write(tmp_path / "a.parquet", [1, 2]))
    assert "column 'text' (data.text_column) is of type int64, expected text" in problem


def test_files_without_a_row_are_a_problem(tmp_path: Path) -> None:
    [problem] = problems_of(write(tmp_path / "a.parquet", pa.array([], pa.string())))
    assert problem == "The corpus is empty: none of its 1 files holds a row."


def test_page_that_was_overwritten_is_named_with_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write(path, [f"sentence number {i}" for i in range(5000)], compression="snappy", use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[2_000:12_000] = bytes(10_000)
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=r"a.parquet: a.parquet rows 0 to 4,999 cannot be read"):
        read(RowRange(source(path), 0, 5000))


@pytest.mark.parametrize("group_rows", [1, 7, 40, 1000])
@pytest.mark.parametrize("runs", [[(0, 100)], [(0, 1), (99, 100)], [(3, 4), (5, 30), (30, 31), (69, 80)], [(41, 43)]])
def test_runs_of_rows_are_those_of_the_file(
    tmp_path: Path, group_rows: int, runs: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "BATCH_BYTES", 64)
    lines = [f"row {number}".encode() for number in range(100)]
    file = write(tmp_path / "a.parquet", lines, group_rows)
    found: list[list[bytes]] = [[] for _ in runs]
    for run, values in read_runs(file, runs, "text"):
        found[run] += values.to_pylist()
    assert found == [lines[first:end] for first, end in runs]


def test_rows_that_are_not_there_are_named(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", [b"row"] * 10, 4)
    with pytest.raises(CorpusError, match=r"rows 8 to 11 cannot be read \(it ends after 10 rows"):
        list(read_runs(file, [(8, 12)], "text"))
