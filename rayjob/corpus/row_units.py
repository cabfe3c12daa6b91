"""The units of work of a corpus of rows: which rows make which numbered block.

Training: the kept rows of one range of a file (`rows.py`) make one block. Validation: stretches from all over the
corpus fill a block of about RANGE_BYTES. A row of a block is a run of neighbouring source rows, each with a line
break behind it, so the text is that of a file with one sentence a line. EOS follows where a document is known to
end and nowhere else.
"""

import hashlib
import itertools
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from model.normalizer import Normalizer
from rayjob.corpus.block_unit import BlockUnit
from rayjob.corpus.decoding import cut_slabs, decode_utf8
from rayjob.corpus.row_catalog import RowCatalog, States
from rayjob.corpus.rows import RANGE_BYTES, RowRange, read_runs
from rayjob.corpus.scan import TRAIN, VAL
from rayjob.corpus.sources import Source
from rayjob.corpus.text import Text


class RowSpan(NamedTuple):
    """Neighbouring rows of a source, a row of a block; `bytes` is their size with line breaks, as they stand."""

    rows: RowRange
    bytes: int
    doc_id: str
    is_end: bool


@dataclass(frozen=True, slots=True)
class RowUnit(BlockUnit):
    """The work for one block."""

    text_column: str
    spans: tuple[RowSpan, ...]

    @property
    def source_bytes(self) -> int:
        return sum(span.bytes for span in self.spans)

    @property
    def content_hash(self) -> str:
        spans = [(s.rows.source.sha256, s.rows.first, s.rows.end, s.doc_id, s.is_end) for s in self.spans]
        return hashlib.sha256(json.dumps([self.text_column, spans]).encode()).hexdigest()

    def texts(self, normalizer: Normalizer) -> Iterator[Text]:
        for source, of_source in itertools.groupby(self.spans, key=lambda span: span.rows.source):
            spans = list(of_source)
            runs = [(span.rows.first, span.rows.end) for span in spans]
            pieces = itertools.groupby(read_runs(source, runs, self.text_column), key=lambda piece: piece[0])
            for span, (_, values) in zip(spans, pieces, strict=True):
                lines = (b"\n".join([*each.to_pylist(), b""]) for _, each in values)
                yield Text(span.doc_id, (normalizer(decode_utf8(slab)[0]) for slab in cut_slabs(lines)), span.is_end)

    def to_json(self) -> str:
        sources = list(dict.fromkeys(span.rows.source for span in self.spans))
        spans = [(sources.index(s.rows.source), s.rows.first, s.rows.end, *s[1:]) for s in self.spans]
        return json.dumps([self.split, self.number, self.text_column, [s.to_json() for s in sources], spans])

    @classmethod
    def from_json(cls, data: str) -> "RowUnit":
        split, number, text_column, sources, spans = json.loads(data)
        files = [Source.from_json(source) for source in sources]
        made = (RowSpan(RowRange(files[i], first, end), *rest) for i, first, end, *rest in spans)
        return cls(split, number, text_column, tuple(made))


def plan_row_units(catalog: RowCatalog) -> list[RowUnit]:
    """The units of both sides, training first; a pure function of the catalog."""
    train: list[RowUnit] = []
    val: list[RowUnit] = []
    waiting: list[RowSpan] = []  # for a validation block to fill up
    column = catalog.settings.text_column
    for rows, start, part in catalog.parts():
        if spans := _spans(catalog, rows, start, part.bytes, TRAIN):
            train.append(RowUnit("train", len(train), column, tuple(spans)))
        for span in _spans(catalog, rows, start, part.bytes, VAL):
            if waiting and sum(s.bytes for s in waiting) + span.bytes > RANGE_BYTES:
                val.append(RowUnit("val", len(val), column, tuple(waiting)))
                waiting = []
            waiting.append(span)
    if waiting:
        val.append(RowUnit("val", len(val), column, tuple(waiting)))
    return [*train, *val]


def _spans(catalog: RowCatalog, rows: RowRange, start: int, sizes: npt.NDArray[np.uint32], state: int) -> list[RowSpan]:
    """The runs of rows of one side in a range, cut where documents start."""
    is_taken = catalog.states[start : start + len(sizes)] == state
    ends = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    spans = []
    for first, end in _runs(is_taken, _document_cuts(catalog.document_starts, start, start + len(sizes))):
        span_rows = RowRange(rows.source, rows.first + first, rows.first + end)
        doc_id, is_end = _document_of(catalog, start + first, start + end)
        doc_id = f"{rows.source.name}:{span_rows.first}" if doc_id is None else doc_id
        spans.append(RowSpan(span_rows, int(ends[end] - ends[first]), doc_id, is_end))
    return spans


def _runs(is_taken: npt.NDArray[np.bool_], cuts: Sequence[int]) -> Iterator[tuple[int, int]]:
    edges = np.flatnonzero(is_taken[1:] != is_taken[:-1]) + 1
    places = sorted({0, *edges.tolist(), *cuts, len(is_taken)})
    return ((first, end) for first, end in itertools.pairwise(places) if is_taken[first])


def _document_cuts(starts: Sequence[int], first: int, end: int) -> list[int]:
    return [row - first for row in starts[bisect_right(starts, first) : bisect_right(starts, end - 1)]]


def _document_of(catalog: RowCatalog, first: int, end: int) -> tuple[str | None, bool]:
    """The name of a run's document and whether it ends there; nothing of it may follow on either side."""
    if not catalog.document_starts:
        return None, False
    index = bisect_right(catalog.document_starts, first) - 1
    following = catalog.document_starts[index + 1 : index + 2]
    document_end = following[0] if following else len(catalog.states)
    return catalog.document_ids[index], not _holds_kept(catalog.states[end:document_end])


def _holds_kept(states: States) -> bool:
    return bool(np.isin(states, (TRAIN, VAL)).any())
