"""What becomes of every row: kept for training or validation, or removed and why.

1. Scan parts give each row's hash, size and first state (`scan.py`); blank rows and boilerplate are out.
2. Of the rest, documents equal to an earlier one go where documents are known, and every row of a run that stands
   earlier (`repeats.py`).
3. Of what is kept, whole stretches are held out (`stretches.py`).

At any time the driver holds one array of hashes and a few of one byte a row: 13 bytes a row at most. Sizes of rows
are read again from the parts, range by range, when they are needed.
"""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rayjob.corpus.errors import CorpusError
from rayjob.corpus.repeats import Flags, Hashes, RepeatedRun, find_repeats, slabs
from rayjob.corpus.rows import RowRange
from rayjob.corpus.scan import DUPLICATE, TRAIN, VAL, ScanPart, ScanSettings, load_part
from rayjob.corpus.stretches import content_hash, hold_out

States = npt.NDArray[np.uint8]


class Repeat(NamedTuple):
    """Rows [first, end) of the corpus that stand earlier: the first of them at row `original`."""

    first: int
    end: int
    original: int


@dataclass(frozen=True, slots=True)
class RowCatalog:
    """All that is known of the rows but their text.

    Attributes:
        ranges: of all sources in order; rows are counted through them from 0. starts: first row of each range.
        settings: where their scan parts lie.
        states: (N,) what becomes of each row.
        document_starts, document_ids: rows at which documents start, and their names; empty if none are known.
        repeats: what was removed as repeated, in order.
        sha256s: by split, of the hashes of its rows.
    """

    ranges: tuple[RowRange, ...]
    starts: tuple[int, ...]
    settings: ScanSettings
    states: States
    document_starts: tuple[int, ...]
    document_ids: tuple[str, ...]
    repeats: tuple[Repeat, ...]
    sha256s: dict[str, str]

    def parts(self) -> Iterator[tuple[RowRange, int, ScanPart]]:
        """Each range with its first row in the corpus and its scan part, one in memory at a time."""
        for rows, start in zip(self.ranges, self.starts, strict=True):
            yield rows, start, load_part(rows, self.settings)

    def place(self, row: int) -> tuple[str, int]:
        """The file and the row in it of a row of the corpus."""
        index = int(np.searchsorted(self.starts, row, side="right")) - 1
        rows = self.ranges[index]
        return rows.source.name, rows.first + row - self.starts[index]


def build_row_catalog(
    ranges: Sequence[RowRange], settings: ScanSettings, *, dedup: bool, val_fraction: float
) -> RowCatalog:
    """Decides about every row, from the scan parts of the ranges.

    Raises:
        CorpusError: no row is left, or none can be held out.
    """
    sizes = [rows.end - rows.first for rows in ranges]
    starts = tuple(itertools.accumulate(sizes, initial=0))[:-1]
    states, documents = _first_states(ranges, starts, settings)
    if not (states == TRAIN).any():
        raise CorpusError(["The corpus is empty: every row is blank, null or boilerplate."])
    document_starts = [row for row, _ in documents]
    repeats = _remove_repeats(ranges, settings, states, document_starts) if dedup else []
    hashes = _load_hashes(ranges, settings, states)
    kept = Numbering(states == TRAIN)
    # Of documents that begin at the same kept row, only the last has any.
    kept_documents = {kept.number_of(row): document for row, document in documents}
    kept_documents.pop(len(hashes), None)
    is_held = hold_out(hashes, kept_documents, val_fraction)
    states[states == TRAIN] = np.where(is_held, np.uint8(VAL), np.uint8(TRAIN))
    sha256s = {"train": _sha256(hashes, ~is_held), "val": _sha256(hashes, is_held)}
    ids = tuple(document for _, document in documents)
    return RowCatalog(tuple(ranges), starts, settings, states, tuple(document_starts), ids, tuple(repeats), sha256s)


class Numbering:
    """Numbers the flagged rows 0, 1, … and finds rows by number, in memory for the flags alone."""

    _SLAB = 2**16

    def __init__(self, is_flagged: Flags) -> None:
        self._is_flagged = is_flagged
        counts = [np.count_nonzero(is_flagged[i : i + self._SLAB]) for i in range(0, len(is_flagged), self._SLAB)]
        self._before = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])

    def number_of(self, row: int) -> int:
        """The number of the first flagged row at `row` or later."""
        slab = row // self._SLAB
        return int(self._before[slab] + np.count_nonzero(self._is_flagged[slab * self._SLAB : row]))

    def row_of(self, number: int) -> int:
        """The row with a number."""
        slab = int(np.searchsorted(self._before, number, side="right")) - 1
        inside = np.flatnonzero(self._is_flagged[slab * self._SLAB : (slab + 1) * self._SLAB])
        return slab * self._SLAB + int(inside[number - self._before[slab]])


def _first_states(
    ranges: Sequence[RowRange], starts: Sequence[int], settings: ScanSettings
) -> tuple[States, list[tuple[int, str]]]:
    states = np.empty(starts[-1] + ranges[-1].end - ranges[-1].first, dtype=np.uint8)
    documents: list[tuple[int, str]] = []
    for rows, start in zip(ranges, starts, strict=True):
        part = load_part(rows, settings)
        states[start : start + len(part.states)] = part.states
        for row, document in part.documents:
            if not documents or documents[-1][1] != document:
                documents.append((start + row, document))
    return states, documents


def _load_hashes(ranges: Sequence[RowRange], settings: ScanSettings, states: States) -> Hashes:
    """The hashes of the rows that are still kept."""
    hashes = np.empty(np.count_nonzero(states == TRAIN), dtype=np.uint64)
    row = filled = 0
    for rows in ranges:
        part = load_part(rows, settings)
        kept = part.hashes[states[row : row + len(part.hashes)] == TRAIN]
        hashes[filled : filled + len(kept)] = kept
        row, filled = row + len(part.hashes), filled + len(kept)
    return hashes


def _remove_repeats(
    ranges: Sequence[RowRange], settings: ScanSettings, states: States, document_starts: Sequence[int]
) -> list[Repeat]:
    numbering = Numbering(states == TRAIN)
    hashes = _load_hashes(ranges, settings, states)
    copies = _document_copies(hashes, [numbering.number_of(row) for row in document_starts])
    is_repeated, runs = find_repeats(hashes)
    for first, end, _ in copies:
        is_repeated[first:end] = True
    states[states == TRAIN] = np.where(is_repeated, np.uint8(DUPLICATE), np.uint8(TRAIN))
    found = sorted({*runs, *(copy for copy in copies if not _is_inside(copy, runs))})
    return [
        Repeat(numbering.row_of(first), numbering.row_of(end - 1) + 1, numbering.row_of(original))
        for first, end, original in found
    ]


def _document_copies(hashes: Hashes, starts: Sequence[int]) -> list[RepeatedRun]:
    first_with: dict[str, int] = {}
    copies = []
    for start, end in itertools.pairwise([*starts, len(hashes)]):
        if start < end:
            original = first_with.setdefault(content_hash(hashes[start:end]), start)
            if original != start:
                copies.append(RepeatedRun(start, end, original))
    return copies


def _is_inside(copy: RepeatedRun, runs: Sequence[RepeatedRun]) -> bool:
    index = int(np.searchsorted([run.first for run in runs], copy.first, side="right")) - 1
    return index >= 0 and copy.end <= runs[index].end


def _sha256(hashes: Hashes, is_taken: Flags) -> str:
    digest = hashlib.sha256()
    for start, end in slabs(len(hashes)):
        digest.update(hashes[start:end][is_taken[start:end]].astype("<u8").tobytes())
    return digest.hexdigest()
