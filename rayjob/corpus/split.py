"""Which documents are held out for validation.

The corpus should give `val_fraction` of its bytes to validation, in whole documents, and a document's chance
must not depend on its name or its place among the files:

1. Documents that share passages form a group (`dedup.py`) and stay together. A group's rank is its smallest
   sha256.
2. In the order of ranks, groups are held out until validation has its share. One that would bring it to more
   than half above its share is passed over, so the longest book is never the one held out in a small corpus.
3. If validation then has less than half of its share, the smallest group passed over is held out as well,
   unless that is more than half of the corpus.
4. If it still has less, the largest document is cut before white space and its tail is held out: a corpus of
   one book.

A book added later takes no document out of validation unless it ranks before it, and enters validation itself
only by its own rank.
"""

from collections.abc import Sequence
from typing import NamedTuple

OVERSHOOT = 1.5
UNDERSHOOT = 0.5


class Split(NamedTuple):
    """Indices of the documents held out; the document of which only a tail is, and that tail's size."""

    held_out: frozenset[int]
    cut_document: int | None
    tail_bytes: int


def choose_validation(
    sha256s: Sequence[str], sizes_bytes: Sequence[int], groups: Sequence[Sequence[int]], val_fraction: float
) -> Split:
    """Applies the rule above to documents by content hash and size, grouped by `dedup.group_related`."""
    total = sum(sizes_bytes)
    target = val_fraction * total
    size_of = [sum(sizes_bytes[index] for index in group) for group in groups]
    ranked = sorted(range(len(groups)), key=lambda number: min(sha256s[index] for index in groups[number]))
    chosen, passed_over = _walk(ranked, size_of, target)
    held_bytes = sum(size_of[number] for number in chosen)
    if held_bytes < UNDERSHOOT * target and passed_over:
        smallest = min(passed_over, key=lambda number: size_of[number])
        if size_of[smallest] <= total / 2:
            chosen.append(smallest)
            held_bytes += size_of[smallest]
    held_out = frozenset(index for number in chosen for index in groups[number])
    if held_bytes >= UNDERSHOOT * target:
        return Split(held_out, None, 0)
    largest = max(
        (index for index in range(len(sizes_bytes)) if index not in held_out), key=sizes_bytes.__getitem__
    )
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
