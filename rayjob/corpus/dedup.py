"""Copies: which documents to drop, and which share passages and so must stand on the same side of the split.

1. A document whose normalised text equals an earlier one's is a copy.
2. A document of which at least COPY_SHARE of the long sentences stand in earlier documents is a near copy:
   another edition, or a novel with a chapter of another inserted.
3. Two documents that share at least SHARED_PASSAGES long sentences, or a run of REPEAT_ROWS lines, are related:
   lines see dialogue, verse and scripts without these full stops. What stands in more than MAX_OWNERS documents
   is boilerplate, such as a licence, and relates nobody.

Earlier means earlier by name. Copies are dropped before the split, so that no copy of a training text can be
in validation.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain, combinations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rayjob.corpus.repeats import Hashes, hash_rows, run_hashes

LEAST_CHARS, MOST_CHARS = 60, 400  # of a long sentence; shorter ones recur by chance ("he said nothing")
SENTENCE = re.compile(f"[^.!?]{{{LEAST_CHARS},{MOST_CHARS}}}")
MIN_SENTENCES = 8  # below it a share says nothing
COPY_SHARE = 0.8
SHARED_PASSAGES = 3
MAX_OWNERS = 4

NO_HASHES: Hashes = np.empty(0, dtype=np.uint64)


class Fingerprint(NamedTuple):
    """64-bit hashes of what a text is made of, blind to case and to white space.

    Attributes:
        sentences: (N,) the long ones, however lines are broken.
        runs: (M,) runs of REPEAT_ROWS lines, blank ones passed over. Both sorted, each hash once.
    """

    sentences: Hashes
    runs: Hashes


class Copy(NamedTuple):
    """Document `copy` (an index) is a copy of `original`; `share` of its long sentences are known."""

    copy: int
    original: int
    share: float


class Fingerprinter:
    """Makes the fingerprint of a normalised text that comes in slabs.

    Sentences are those of the whole text; a line that is cut between slabs is two lines.
    """

    def __init__(self) -> None:
        self._sentences = list[Hashes]()
        self._lines = list[Hashes]()
        self._rest = ""  # of the text, in which a sentence may go on

    def add(self, slab: str) -> None:
        """Takes the next slab of the text."""
        self._lines.append(hash_rows([_plain(line) for line in slab.splitlines() if line.strip()]))
        text = self._rest + slab
        end = max(map(text.rfind, ".!?")) + 1
        end += (len(text) - end) // MOST_CHARS * MOST_CHARS  # what SENTENCE takes however the text goes on
        self._take_sentences(text[:end])
        self._rest = text[end:]

    def fingerprint(self) -> Fingerprint:
        """What the slabs so far give, taken as the whole text."""
        self._take_sentences(self._rest)
        self._rest = ""
        sentences, lines = (np.concatenate([NO_HASHES, *parts]) for parts in (self._sentences, self._lines))
        return Fingerprint(np.unique(sentences), np.unique(run_hashes(lines)))

    def _take_sentences(self, text: str) -> None:
        self._sentences.append(hash_rows([_plain(match[0]) for match in SENTENCE.finditer(text)]))


def find_copies(sha256s: Sequence[str], fingerprints: Sequence[Fingerprint]) -> list[Copy]:
    """The documents to drop, in order; the first of equal documents stays."""
    first_with_text: dict[str, int] = {}
    numbers, n_numbers = _number([each.sentences for each in fingerprints])
    owners = np.full(n_numbers, -1, dtype=np.int32)  # the document that has a sentence first
    copies = []
    for index, (sha256, sentences) in enumerate(zip(sha256s, numbers, strict=True)):
        if sha256 in first_with_text:
            copies.append(Copy(index, first_with_text[sha256], 1.0))
            continue
        first_with_text[sha256] = index
        is_known = owners[sentences] >= 0
        share = is_known.mean() if len(sentences) >= MIN_SENTENCES else 0.0
        if share >= COPY_SHARE:
            # The smallest index on a tie.
            original = int(np.bincount(owners[sentences[is_known]]).argmax())
            copies.append(Copy(index, original, float(share)))
        else:
            owners[sentences[~is_known]] = index
    return copies


def group_related(sha256s: Sequence[str], fingerprints: Sequence[Fingerprint]) -> list[list[int]]:
    """Indices of the documents in groups that share passages or are equal; most groups have one member."""
    leader = list(range(len(sha256s)))

    def find(index: int) -> int:
        while leader[index] != index:
            leader[index] = leader[leader[index]]
            index = leader[index]
        return index

    first_with_text: dict[str, int] = {}
    equal = ((first_with_text.setdefault(sha256, index), index) for index, sha256 in enumerate(sha256s))
    by_sentences = _pairs([each.sentences for each in fingerprints], SHARED_PASSAGES)
    by_runs = _pairs([each.runs for each in fingerprints], 1)
    for one, other in chain(equal, by_sentences, by_runs):
        low, high = sorted((find(one), find(other)))
        leader[high] = low
    groups = defaultdict(list)
    for index in range(len(sha256s)):
        groups[find(index)].append(index)
    return list(groups.values())


def _number(sets: Sequence[Hashes]) -> tuple[list[npt.NDArray[np.int64]], int]:
    """The sets with their hashes numbered 0, 1, …, and how many different ones there are."""
    known, numbers = np.unique(np.concatenate([NO_HASHES, *sets]), return_inverse=True)
    return np.split(numbers, np.cumsum([len(each) for each in sets])[:-1]), len(known)


def _pairs(sets: Sequence[Hashes], least: int) -> Iterator[tuple[int, int]]:
    """Pairs of sets that share at least so many hashes, of those in at most MAX_OWNERS sets."""
    hashes = np.concatenate([NO_HASHES, *sets])
    owners = np.repeat(np.arange(len(sets), dtype=np.int32), [len(each) for each in sets])
    order = np.argsort(hashes, kind="stable")
    hashes, owners = hashes[order], owners[order]
    firsts = np.flatnonzero(np.append(True, hashes[1:] != hashes[:-1])[: len(hashes)])
    counts = np.diff(np.append(firsts, len(hashes)))
    firsts, counts = firsts[counts <= MAX_OWNERS], counts[counts <= MAX_OWNERS]
    shared = [
        np.stack([owners[firsts[counts > other] + one], owners[firsts[counts > other] + other]])
        for one, other in combinations(range(MAX_OWNERS), 2)
    ]
    pairs, times = np.unique(np.concatenate(shared, axis=1), axis=1, return_counts=True)
    yield from zip(*pairs[:, times >= least].tolist(), strict=True)


def _plain(text: str) -> bytes:
    return " ".join(text.split()).casefold().encode()
