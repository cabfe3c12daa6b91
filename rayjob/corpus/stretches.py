"""Which rows are held out for validation: whole stretches, chosen by content.

1. Where documents are known, a stretch is a document, and those of one name stay together. Elsewhere it begins at a
   row where the hash of the next REPEAT_ROWS rows is a multiple of MEAN_ROWS, at least MIN_ROWS after the last: the
   same rows give the same stretches wherever they stand.
2. Stretches are held out as `split.py` does with documents: those whose hash is a number below val_fraction, so that
   files added later neither move them nor take them away; by other rules only where a few stretches are the corpus.
3. No run of REPEAT_ROWS rows of validation may stand in training, neither in the corpus as it is nor where rows
   dropped in between bring others together. A stretch with such a run goes back to training, with those of its name,
   until there is none.
"""

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from rayjob.corpus.errors import CorpusError
from rayjob.corpus.repeats import REPEAT_ROWS, Flags, Hashes, RunSet, run_hashes, slabs
from rayjob.corpus.split import choose_validation

MEAN_ROWS = 256  # 16 to 25 kB of text: many windows of training, and 200,000 stretches in BookCorpus
MIN_ROWS = 64

Bounds = list[tuple[int, int]]
Groups = list[list[int]]


def hold_out(hashes: Hashes, documents: Mapping[int, str], val_fraction: float) -> Flags:
    """(N,) which of the kept rows are held out.

    Args:
        hashes: (N,) hash of each kept row.
        documents: the name of a document by the row where it starts, the first of them 0; empty if none are known.

    Raises:
        CorpusError: every stretch that could be held out stands in training too.
    """
    starts = sorted(documents) or stretch_starts(hashes)
    bounds = list(itertools.pairwise([*starts, len(hashes)]))
    groups = _group([documents.get(start, start) for start in starts])
    is_held = np.zeros(len(hashes), dtype=bool)
    for start, end in _choose(hashes, bounds, groups, val_fraction):
        is_held[start:end] = True
    return _give_back_shared(hashes, is_held, bounds, groups)


def stretch_starts(hashes: Hashes) -> list[int]:
    """The rows at which stretches begin, by rule 1 for unknown documents."""
    starts = [0]
    for start, end in slabs(len(hashes)):
        runs = run_hashes(hashes[start : end + REPEAT_ROWS - 1])
        for place in (start + np.flatnonzero(runs % np.uint64(MEAN_ROWS) == 0)).tolist():
            if place - starts[-1] >= MIN_ROWS:
                starts.append(place)
    return starts


def content_hash(hashes: Hashes) -> str:
    """Hex hash of a sequence of rows."""
    return hashlib.blake2b(hashes.astype("<u8").tobytes(), digest_size=8).hexdigest()


def _group(names: Sequence[str | int]) -> Groups:
    """Indices of the stretches of each name."""
    groups = defaultdict(list)
    for index, name in enumerate(names):
        groups[name].append(index)
    return list(groups.values())


def _choose(hashes: Hashes, bounds: Bounds, groups: Groups, val_fraction: float) -> Bounds:
    sizes = [end - start for start, end in bounds]
    ranks = [content_hash(hashes[start:end]) for start, end in bounds]
    split = choose_validation(ranks, sizes, groups, val_fraction)
    held = [bounds[index] for index in sorted(split.held_out)]
    if split.cut_document is not None:
        end = bounds[split.cut_document][1]
        held.append((end - max(1, min(split.tail_bytes, sizes[split.cut_document] - 1)), end))
    return held


def _give_back_shared(hashes: Hashes, is_held: Flags, bounds: Bounds, groups: Groups) -> Flags:
    starts = np.array([start for start, _ in bounds])
    group_of = {index: group for group in groups for index in group}
    while len(shared := _shared_rows(hashes, is_held)):
        for stretch in np.unique(np.searchsorted(starts, shared, side="right") - 1).tolist():
            for start, end in (bounds[index] for index in group_of[stretch]):
                is_held[start:end] = False
    if not is_held.any():
        raise CorpusError(
            [
                "No part of the corpus can be held out for validation: all of it stands in the corpus more than once. "
                "Set data.dedup=true, or add text."
            ]
        )
    return is_held


def _shared_rows(hashes: Hashes, is_held: Flags) -> npt.NDArray[np.int64]:
    """Rows of validation at which a run begins that stands in training too."""
    rows = np.flatnonzero(is_held)
    runs = run_hashes(hashes[rows])
    if not len(runs):
        return rows[:0]
    held_runs = RunSet(runs)
    is_shared = np.zeros(len(held_runs.runs), dtype=bool)
    carried = hashes[:0]
    for start, end in slabs(len(hashes)):
        training = np.concatenate([carried, hashes[start:end][~is_held[start:end]]])
        is_shared[held_runs.find(run_hashes(training))[1]] = True
        carried = training[-(REPEAT_ROWS - 1) :]
    return rows[: len(runs)][np.isin(runs, held_runs.runs[is_shared])]
