import dataclasses

import pytest

from rayjob.corpus.catalog import Stretch
from rayjob.corpus.documents import Document, Piece
from rayjob.corpus.units import Unit, plan_units


def stretch(doc_id: str, text: str, start: int = 0) -> Stretch:
    """A document of ASCII in pieces of at most 10 characters, from one of them on."""
    ends = [*range(10, len(text), 10), len(text)]
    pieces = tuple(
        Piece(first, end, f"digest {first}", 0, end - first, end - first, is_end=end == len(text))
        for first, end in zip([0, *ends], ends, strict=False)
    )
    document = Document(doc_id, f"/x/{doc_id}", 0, len(text), None, f"sha of {doc_id}", len(text), pieces)
    if not start:
        return Stretch(document, pieces)
    cut = pieces[start // 10]
    tail = cut._replace(start=start % 10, bytes=cut.bytes - start % 10)
    return Stretch(document, (tail, *pieces[start // 10 + 1 :]))


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayjob.corpus.units.BLOCK_BYTES", 25)


def layout(units: list[Unit]) -> list[list[tuple[str, int, int, bool]]]:
    """Document, characters and end of each row of each block."""
    return [
        [
            (
                span.document.doc_id,
                span.pieces[0].first_byte + span.pieces[0].start,
                span.pieces[-1].end_byte,
                span.pieces[-1].is_end,
            )
            for span in unit.spans
        ]
        for unit in units
    ]


def test_short_documents_share_a_block_in_order() -> None:
    units = plan_units("train", [stretch("a", "a" * 8), stretch("b", "b" * 9), stretch("c", "c" * 8)])
    assert layout(units) == [[("a", 0, 8, True), ("b", 0, 9, True), ("c", 0, 8, True)]]
    assert units[0].block_name == "part-00000.parquet"


def test_long_document_runs_over_blocks_and_ends_once() -> None:
    units = plan_units("train", [stretch("a", "a" * 8), stretch("long", "x" * 52), stretch("c", "c" * 3)])
    assert layout(units) == [
        [("a", 0, 8, True), ("long", 0, 10, False)],
        [("long", 10, 30, False)],
        [("long", 30, 52, True), ("c", 0, 3, True)],
    ]


def test_tail_of_a_document_starts_where_the_head_ended() -> None:
    assert layout(plan_units("val", [stretch("a", "a" * 30, start=18)])) == [[("a", 18, 30, True)]]


def test_unit_survives_its_journey_to_a_task() -> None:
    for unit in plan_units("train", [stretch("naïve", "x" * 52)]):
        assert Unit.from_json(unit.to_json()) == unit


def test_hash_names_the_content_and_not_the_place() -> None:
    [unit] = plan_units("train", [stretch("a", "text")])
    [span] = unit.spans
    moved = dataclasses.replace(span.document, path="/elsewhere")
    changed = dataclasses.replace(span.document, sha256="other")
    assert dataclasses.replace(unit, spans=(span._replace(document=moved),)).hash == unit.hash
    assert dataclasses.replace(unit, spans=(span._replace(document=changed),)).hash != unit.hash
    assert dataclasses.replace(unit, split="val").hash != unit.hash
