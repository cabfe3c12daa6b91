"""Scan parts, catalog and units of rows, without Ray: the parts are made as a task would make them."""

import hashlib
import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.normalizer import Normalizer
from rayjob.corpus import rows
from rayjob.corpus.decoding import decode_utf8
from rayjob.corpus.facts import CorpusFacts, row_facts
from rayjob.corpus.repeats import REPEAT_ROWS
from rayjob.corpus.row_catalog import Numbering, RowCatalog, build_row_catalog
from rayjob.corpus.row_units import RowUnit, plan_row_units
from rayjob.corpus.rows import inspect_files, plan_ranges
from rayjob.corpus.scan import ScanSettings, _essences, _mend
from rayjob.corpus.sources import Source

PLAIN = Normalizer(detokenize=False, lowercase=False)


@pytest.fixture(autouse=True)
def _small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "RANGE_BYTES", 4_000)
    monkeypatch.setattr("rayjob.corpus.row_units.RANGE_BYTES", 4_000)


def sentences(seed: int, count: int) -> list[str]:
    words = random.Random(seed)
    return [f"{''.join(words.choices('abcdefgh', k=20))} ." for _ in range(count)]


def write(folder: Path, name: str, **columns: Any) -> Source:
    path = folder / name
    pq.write_table(pa.table(columns), path, row_group_size=100)
    content = path.read_bytes()
    return Source(name, str(path), len(content), hashlib.sha256(content).hexdigest())


def catalog_of(
    folder: Path,
    *sources: Source,
    doc_column: str | None = None,
    lowercase: bool = False,
    detokenize: bool = False,
    dedup: bool = True,
    val_fraction: float = 0.1,
) -> RowCatalog:
    settings = ScanSettings("text", doc_column, lowercase, detokenize, str(folder / "scans"))
    files = inspect_files(sources, "text", doc_column)
    ranges = [part for source, file in zip(sources, files, strict=True) for part in plan_ranges(source, file)]
    return build_row_catalog(ranges, settings, dedup=dedup, val_fraction=val_fraction)


def lines(units: Sequence[RowUnit], split: str) -> list[str]:
    of_split = (unit for unit in units if unit.split == split)
    return "".join(part for unit in of_split for text in unit.texts(PLAIN) for part in text.parts).splitlines()


def facts_of(catalog: RowCatalog) -> CorpusFacts:
    sources = sorted({part.source for part in catalog.ranges}, key=lambda source: source.name)
    return row_facts(sources, catalog, plan_row_units(catalog))


def test_units_hold_every_kept_row_once_in_order(tmp_path: Path) -> None:
    text = sentences(1, 3_000)
    halves = [write(tmp_path, f"{part}.parquet", text=text[1500 * part : 1500 * part + 1500]) for part in (0, 1)]
    units = plan_row_units(catalog_of(tmp_path, *halves))
    train, val = lines(units, "train"), lines(units, "val")
    assert sorted(train + val) == sorted(text)
    order = {row: number for number, row in enumerate(text)}
    assert all(order[one] < order[two] for side in (train, val) for one, two in itertools.pairwise(side))
    assert 0 < len(val) < 0.3 * len(text)


def test_copies_and_boilerplate_go_and_totals_add_up(tmp_path: Path) -> None:
    one, other = sentences(1, 1_000), sentences(2, 1_000)
    text = [*one, "all rights reserved .", *other, *one, "isbn 3", "isbn 3", None, " \t", "the end ."]
    catalog = catalog_of(tmp_path, write(tmp_path, "a.parquet", text=text))
    facts = facts_of(catalog)
    assert {name: facts.totals[name] for name in facts.totals if name.startswith("rows")} == {
        "rows_in": 3006,
        "rows_empty": 2,
        "rows_boilerplate": 3,
        "rows_duplicate": 1000,
        "rows_kept": 2001,
    }
    assert facts.totals["bytes_in"] == sum(len(row or "") + 1 for row in text)
    assert facts.totals["bytes_in"] == facts.totals["bytes_kept"] + facts.totals["bytes_removed"]
    assert facts.totals["bytes_kept"] == sum(len(row) + 1 for row in [*one, *other, "the end ."])
    assert facts.repeats == (
        b"file,first_row,last_row,removed_rows,original_file,original_row\na.parquet,2001,3000,1000,a.parquet,0\n"
    )
    assert facts.statistics["removed_lines"] == {"isbn 3": 2, "all rights reserved .": 1}
    assert facts.warnings == ["a.parquet: 2 rows are null or blank, the first is row 3003; they were left out."]
    units = plan_row_units(catalog)
    assert sum(unit.source_bytes for unit in units) == facts.totals["bytes_kept"]


def test_no_run_of_validation_stands_in_training(tmp_path: Path) -> None:
    text = [*sentences(1, 2_000), *sentences(2, 500), *sentences(1, 2_000)[300:900], *sentences(3, 500)]
    units = plan_row_units(catalog_of(tmp_path, write(tmp_path, "a.parquet", text=text)))
    train, val = lines(units, "train"), lines(units, "val")

    def runs(side: list[str]) -> set[tuple[str, ...]]:
        return {tuple(side[start : start + REPEAT_ROWS]) for start in range(len(side) - REPEAT_ROWS + 1)}

    assert val
    assert not runs(train) & runs(val)


@pytest.mark.parametrize("lowercase", [False, True])
def test_copy_in_another_case_goes_where_the_text_is_put_into_lower_case(tmp_path: Path, lowercase: bool) -> None:
    text = [f"{row} É" for row in sentences(4, 600)]
    source = write(tmp_path, "a.parquet", text=[*text, *sentences(5, 50), *(row.upper() for row in text)])
    totals = facts_of(catalog_of(tmp_path, source, lowercase=lowercase)).totals
    assert totals["rows_duplicate"] == (600 if lowercase else 0)


@pytest.mark.parametrize("detokenize", [False, True])
def test_copy_in_another_treebank_spelling_goes_where_the_text_is_cleaned_of_it(
    tmp_path: Path, detokenize: bool
) -> None:
    text = [f"`` do n't {row} ''" for row in sentences(4, 600)]
    clean = [row.replace("`` do n't", "\"don't").replace(" . ''", '."') for row in text]
    source = write(tmp_path, "a.parquet", text=[*text, *sentences(5, 50), *clean])
    totals = facts_of(catalog_of(tmp_path, source, detokenize=detokenize)).totals
    assert totals["rows_duplicate"] == (600 if detokenize else 0)


@given(
    st.lists(st.binary(max_size=12) | st.text("aA'` ΣÉ“…-lrb\ufeff\0\r\n", max_size=8).map(str.encode)),
    st.booleans(),
    st.booleans(),
)
def test_essence_of_a_row_does_not_depend_on_its_neighbours(contents: list[bytes], lower: bool, treebank: bool) -> None:
    settings = ScanSettings("text", None, lower, treebank, "")
    rows, _ = _mend(contents)
    assert _essences(rows, settings) == [_essences(_mend([row])[0], settings)[0] for row in contents]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("“{}” ‘", '"{}" \''),
        ("“ah” {}", "`` ah '' {}"),
        ("{} …", "{} ..."),
        ("( aside ) {}", "-lrb- aside -RRB- {}"),
        ("\ufeff{}", "{}"),
        ("a\u2581b {}", "a_b {}"),
        (b"caf\xe9 \x93{}\x94", 'café "{}"'),
    ],
)
def test_copy_in_a_spelling_that_the_cleaning_makes_equal_goes(tmp_path: Path, one: str | bytes, other: str) -> None:
    text = sentences(4, 600)
    spelled = [one.replace(b"{}", row.encode()) if isinstance(one, bytes) else one.format(row) for row in text]
    again = [other.format(row).encode() for row in text]
    rows = [row.encode() if isinstance(row, str) else row for row in spelled]
    between = [row.encode() for row in sentences(5, 50)]
    source = write(tmp_path, "a.parquet", text=[*rows, *between, *again])
    assert facts_of(catalog_of(tmp_path, source, detokenize=True)).totals["rows_duplicate"] == 600
    normalizer = Normalizer(detokenize=True, lowercase=False)
    assert [normalizer(decode_utf8(row)[0]) for row in rows] == [normalizer(row.decode()) for row in again]


def test_copy_with_other_line_ends_goes(tmp_path: Path) -> None:
    text = sentences(4, 600)
    source = write(tmp_path, "a.parquet", text=[*text, *sentences(5, 50), *(f"{row}\r\n" for row in text)])
    assert facts_of(catalog_of(tmp_path, source)).totals["rows_duplicate"] == 600


def test_rows_of_many_short_runs_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other row blank: each kept row is a run, and the row groups before it must not be read again for it."""
    text = sentences(6, 1_000)
    source = write(tmp_path, "a.parquet", text=[row for kept in text for row in (kept, "")])
    units = plan_row_units(catalog_of(tmp_path, source))
    n_read = []
    read = rows._batches

    def counted(parquet: pq.ParquetFile, groups: list[int], column: str) -> Iterator[pa.Array]:
        for batch in read(parquet, groups, column):
            n_read.append(len(batch))
            yield batch

    monkeypatch.setattr(rows, "_batches", counted)
    assert sorted(lines(units, "train") + lines(units, "val")) == sorted(text)
    assert sum(n_read) <= 3 * len(text)  # once, and twice the row groups that both sides have rows of


def test_without_dedup_every_row_stays(tmp_path: Path) -> None:
    text = [*sentences(1, 1_000), *sentences(1, 1_000), *sentences(2, 1_000)]
    catalog = catalog_of(tmp_path, write(tmp_path, "a.parquet", text=text), dedup=False)
    assert facts_of(catalog).totals["rows_duplicate"] == 0
    units = plan_row_units(catalog)
    assert sorted(lines(units, "train") + lines(units, "val")) == sorted(text)


def test_validation_is_the_same_after_files_were_added(tmp_path: Path) -> None:
    old = write(tmp_path, "m.parquet", text=sentences(1, 20_000))
    before = set(lines(plan_row_units(catalog_of(tmp_path, old)), "val"))
    more = [write(tmp_path, f"{name}.parquet", text=sentences(seed, 5_000)) for name, seed in (("a", 2), ("z", 3))]
    after = set(lines(plan_row_units(catalog_of(tmp_path, more[0], old, more[1])), "val"))
    moved = {row for row in sentences(1, 20_000) if (row in before) != (row in after)}
    assert len(moved) < 2_000  # the stretch at either seam at most
    assert len(before & after) > 0.5 * len(before)


def test_known_documents_stay_whole_end_in_one_eos_and_keep_their_names(tmp_path: Path) -> None:
    books = {f"book {number}": sentences(number, 60 + number) for number in range(30)}
    text = [row for book in books.values() for row in book]
    titles = [title for title, book in books.items() for _ in book]
    cut = 777  # in the middle of a book
    files = [
        write(tmp_path, "a.parquet", text=text[:cut], title=titles[:cut]),
        write(tmp_path, "b.parquet", text=text[cut:], title=titles[cut:]),
    ]
    units = plan_row_units(catalog_of(tmp_path, *files, doc_column="title"))
    for title, book in books.items():
        spans = [(unit.split, span) for unit in units for span in unit.spans if span.doc_id == title]
        assert len({split for split, _ in spans}) == 1
        assert [span.is_end for _, span in spans] == [False] * (len(spans) - 1) + [True]
        assert sum(span.rows.end - span.rows.first for _, span in spans) == len(book)
    assert {unit.split for unit in units} == {"train", "val"}


def test_rows_that_name_no_document_are_counted(tmp_path: Path) -> None:
    titles = ["one"] * 100 + [None] * 3 + ["two"] * 97
    catalog = catalog_of(
        tmp_path, write(tmp_path, "a.parquet", text=sentences(1, 200), title=titles), doc_column="title"
    )
    assert facts_of(catalog).warnings == [
        "a.parquet: 3 rows name no document (data.doc_column), the first is row 100; neighbours among them were taken "
        "as one document."
    ]


def test_document_equal_to_an_earlier_one_goes_however_short(tmp_path: Path) -> None:
    text = [*sentences(1, 5), *sentences(2, 300), *sentences(1, 5), *sentences(3, 300)]
    titles = ["a"] * 5 + ["b"] * 300 + ["c"] * 5 + ["d"] * 300
    catalog = catalog_of(tmp_path, write(tmp_path, "a.parquet", text=text, title=titles), doc_column="title")
    facts = facts_of(catalog)
    assert facts.totals["rows_duplicate"] == 5
    assert facts.repeats is not None
    assert b"a.parquet,305,309,5,a.parquet,0" in facts.repeats


def test_row_of_a_copied_document_and_of_a_repeated_passage_is_counted_once(tmp_path: Path) -> None:
    short, passage, long = sentences(1, 5), sentences(2, 6), sentences(3, 400)
    parts = {"a": short, "b": [*long[:200], *short[3:], *passage], "c": short, "d": [*passage, *long[200:]]}
    text = list(itertools.chain.from_iterable(parts.values()))
    titles = [title for title, part in parts.items() for _ in part]
    facts = facts_of(catalog_of(tmp_path, write(tmp_path, "a.parquet", text=text, title=titles), doc_column="title"))
    assert facts.totals["rows_duplicate"] == 5 + 6  # c is a copy of a; its end and the beginning of d stand in b
    assert facts.repeats is not None
    assert [line.split(",")[3] for line in facts.repeats.decode().splitlines()[1:]] == ["5", "6"]


def test_rows_name_their_place_where_no_document_is_known(tmp_path: Path) -> None:
    units = plan_row_units(catalog_of(tmp_path, write(tmp_path, "a.parquet", text=sentences(1, 1_000))))
    spans = [span for unit in units for span in unit.spans]
    assert {span.doc_id for span in spans} == {f"a.parquet:{span.rows.first}" for span in spans}
    assert not any(span.is_end for span in spans)


def test_odd_bytes_in_a_row_are_counted_with_their_place_and_read(tmp_path: Path) -> None:
    rows_of = [row.encode() for row in sentences(1, 1_000)]
    rows_of[123] = "café ".encode("cp1252") + b"\0 \xed\xa0\x80 \xef\xbb\xbfx\r\ny"
    catalog = catalog_of(tmp_path, write(tmp_path, "a.parquet", text=pa.array(rows_of, pa.binary())))
    facts = facts_of(catalog)
    assert facts.warnings == [
        "a.parquet: 4 bytes are not UTF-8, the first in row 123, and were read as Windows-1252 or U+FFFD.",
        "a.parquet: 1 characters are NUL or lone surrogates, the first in row 123, and became U+FFFD.",
    ]
    assert facts.sources[0]["replaced_chars"] == 1
    units = plan_row_units(catalog)
    everything = "\n".join(lines(units, "train") + lines(units, "val"))
    assert "café \ufffd \ufffd x" in everything
    assert "x\ny" in everything
    assert "\r" not in everything


def test_unit_survives_its_journey_to_a_task_and_is_named_by_content(tmp_path: Path) -> None:
    source = write(tmp_path, "a.parquet", text=sentences(1, 1_000))
    units = plan_row_units(catalog_of(tmp_path, source))
    assert [RowUnit.from_json(unit.to_json()) for unit in units] == units
    (tmp_path / "moved").mkdir()
    moved = write(tmp_path / "moved", "a.parquet", text=sentences(1, 1_000))
    assert [unit.hash for unit in plan_row_units(catalog_of(tmp_path, moved))] == [unit.hash for unit in units]


def test_numbering_finds_numbers_and_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Numbering, "_SLAB", 4)
    is_flagged = np.array([0, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1], dtype=bool)
    numbering = Numbering(is_flagged)
    assert [numbering.row_of(number) for number in range(6)] == np.flatnonzero(is_flagged).tolist()
    assert [numbering.number_of(row) for row in range(14)] == [is_flagged[:row].sum() for row in range(14)]
