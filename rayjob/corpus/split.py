"""Which documents are held out for validation.

The corpus should give `val_fraction` of its bytes to validation, in whole documents, and neither a document's name
nor its place among the files nor the other files may decide:

1. Documents that share passages form a group (`dedup.py`) and stay together. A group's rank is a number in [0, 1)
   that its smallest content hash gives, such that groups of any size are below `val_fraction` equally often. Those
   are held out: documents of other groups that are added later neither move them nor take them away.
2. A corpus of few documents may have none below, or one that is most of the corpus. Where rule 1 would give less
   than a twentieth of the share, or more than half of the corpus, groups are held out in the order of their ranks
   until validation has its share. One that would bring it to more than half above its share is passed over, so the
   longest book is never the one held out.
3. If validation then has less than half of its share, the smallest group passed over is held out as well,
   unless that is more than half of the corpus.
4. If it still has less, a document is cut before white space and its tail is held out: a corpus of one book. It is
   the largest, unless what is held out would share passages with training (`held_stretch.py`).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

OVERSHOOT = 1.5
UNDERSHOOT = 0.5
LEAST_SHARE = 0.05  # of the share wanted; a note beside a book is no validation split
MOST_OF_CORPUS = 0.5


class Split(NamedTuple):
    """Indices of the documents held out; the document of which only a tail is, and that tail's size."""

    held_out: frozenset[int]
    cut_document: int | None
    tail_bytes: int


def choose_validation(
    hashes: Sequence[str], sizes: Sequence[int], groups: Sequence[Sequence[int]], val_fraction: float
) -> Split:
    """Applies the rules above.

    Args:
        hashes: hex content hash of each document, of 16 digits at least.
        sizes: of each document, in any unit (`Split.tail_bytes` is in the same).
        groups: indices of related documents, by `dedup.group_related`; each document is in one group.
        val_fraction: in (0, 0.5].
    """
    total = sum(sizes)
    target = val_fraction * total
    size_of = [sum(sizes[index] for index in group) for group in groups]
    ranks = [_rank([hashes[index] for index in group]) for group in groups]
    below = [number for number, rank in enumerate(ranks) if rank < val_fraction]
    most = max(MOST_OF_CORPUS, OVERSHOOT * val_fraction) * total
    if below and LEAST_SHARE * target <= sum(size_of[number] for number in below) <= most:
        return Split(frozenset(index for number in below for index in groups[number]), None, 0)
    return _choose_by_order(sizes, groups, size_of, sorted(range(len(groups)), key=ranks.__getitem__), target)


def _rank(hashes: Sequence[str]) -> float:
    """The smallest of n uniform numbers is below x with probability 1 - (1 - x)^n, so that of it is uniform again."""
    smallest = (int(min(hashes)[:16], 16) >> 11) / 2**53  # below 1 also in floating point
    return -math.expm1(len(hashes) * math.log1p(-smallest))


def _choose_by_order(
    sizes: Sequence[int], groups: Sequence[Sequence[int]], size_of: Sequence[int], ranked: Sequence[int], target: float
) -> Split:
    """Rules 2 to 4."""
    chosen, passed_over = _walk(ranked, size_of, target)
    held_bytes = sum(size_of[number] for number in chosen)
    if held_bytes < UNDERSHOOT * target and passed_over:
        smallest = min(passed_over, key=lambda number: size_of[number])
        if size_of[smallest] <= MOST_OF_CORPUS * sum(sizes):
            chosen.append(smallest)
            held_bytes += size_of[smallest]
    held_out = frozenset(index for number in chosen for index in groups[number])
    if held_bytes >= UNDERSHOOT * target:
        return Split(held_out, None, 0)
    largest = max((index for index in range(len(sizes)) if index not in held_out), key=sizes.__getitem__)
    return Split(held_out, largest, round(target - held_bytes))


def _walk(ranked: Sequence[int], size_of: Sequence[int], target: float) -> tuple[list[int], list[int]]:
    """The groups held out by rank, and those passed over as too large."""
    chosen: list[int] = []
    passed_over: list[int] = []
    held_bytes = 0
    for number in ranked:
        if held_bytes >= target:
            break
        if held_bytes + size_of[number] > OVERSHOOT * target:
            passed_over.append(number)
        else:
            chosen.append(number)
            held_bytes += size_of[number]
    return chosen, passed_over
