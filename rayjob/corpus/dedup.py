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
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from rayjob.corpus.repeats import Hashes, hash_rows, run_hashes

SENTENCE = re.compile(r"[^.!?]{60,400}")  # characters; shorter ones recur by chance ("he said nothing")
MIN_SENTENCES = 8  # below it a share says nothing
COPY_SHARE = 0.8
SHARED_PASSAGES = 3
MAX_OWNERS = 4


class Fingerprint(NamedTuple):
    """64-bit hashes of what a text is made of, blind to case and to white space.

    Attributes:
        sentences: the long ones, however lines are broken.
        runs: (M,) runs of REPEAT_ROWS lines, blank ones passed over; sorted, each once.
    """

    sentences: frozenset[int]
    runs: Hashes


class Copy(NamedTuple):
    """Document `copy` (an index) is a copy of `original`; `share` of its long sentences are known."""

    copy: int
    original: int
    share: float


def fingerprint(text: str) -> Fingerprint:
    """The fingerprint of a normalised text."""
    lines = [_plain(line) for line in text.splitlines() if line.strip()]
    sentences = [_plain(match[0]) for match in SENTENCE.finditer(text)]
    return Fingerprint(frozenset(hash_rows(sentences).tolist()), np.unique(run_hashes(hash_rows(lines))))


def find_copies(sha256s: Sequence[str], fingerprints: Sequence[Fingerprint]) -> list[Copy]:
    """The documents to drop, in order; the first of equal documents stays."""
    first_with_text: dict[str, int] = {}
    first_with_sentence: dict[int, int] = {}
    copies = []
    for index, (sha256, (sentences, _)) in enumerate(zip(sha256s, fingerprints, strict=True)):
        if sha256 in first_with_text:
            copies.append(Copy(index, first_with_text[sha256], 1.0))
            continue
        first_with_text[sha256] = index
        owners = Counter(first_with_sentence[s] for s in sentences if s in first_with_sentence)
        if len(sentences) >= MIN_SENTENCES and owners.total() >= COPY_SHARE * len(sentences):
            # The smallest index on a tie: the order of a set's elements must not decide.
            original = min(owners, key=lambda owner: (-owners[owner], owner))
            copies.append(Copy(index, original, owners.total() / len(sentences)))
            continue
        for sentence in sentences:
            first_with_sentence.setdefault(sentence, index)
    return copies


def group_related(sha256s: Sequence[str], fingerprints: Sequence[Fingerprint]) -> list[list[int]]:
    """Indices of the documents in groups that share passages or are equal; most groups have one member."""
    leader = list(range(len(sha256s)))

    def find(index: int) -> int:
        while leader[index] != index:
            leader[index] = leader[leader[index]]
            index = leader[index]
        return index

    for one, other in chain(_pairs_by_sentences(sha256s, fingerprints), _pairs_by_runs(fingerprints)):
        low, high = sorted((find(one), find(other)))
        leader[high] = low
    groups = defaultdict(list)
    for index in range(len(sha256s)):
        groups[find(index)].append(index)
    return list(groups.values())


def _pairs_by_sentences(sha256s: Sequence[str], fingerprints: Sequence[Fingerprint]) -> Iterator[tuple[int, int]]:
    first_with_text: dict[str, int] = {}
    owners: dict[int, list[int]] = defaultdict(list)
    for index, sha256 in enumerate(sha256s):
        yield first_with_text.setdefault(sha256, index), index
        for sentence in fingerprints[index].sentences:
            owners[sentence].append(index)
    shared = Counter(
        (one, other)
        for indices in owners.values()
        if 1 < len(indices) <= MAX_OWNERS
        for place, one in enumerate(indices)
        for other in indices[place + 1 :]
    )
    yield from (pair for pair, count in shared.items() if count >= SHARED_PASSAGES)


def _pairs_by_runs(fingerprints: Sequence[Fingerprint]) -> Iterator[tuple[int, int]]:
    runs = np.concatenate([np.empty(0, dtype=np.uint64), *(each.runs for each in fingerprints)])
    owners = np.repeat(np.arange(len(fingerprints)), [len(each.runs) for each in fingerprints])
    order = np.argsort(runs, kind="stable")
    runs, owners = runs[order], owners[order]
    firsts = np.flatnonzero(np.append(True, runs[1:] != runs[:-1])[: len(runs)])
    counts = np.diff(np.append(firsts, len(runs)))
    for place in range(1, MAX_OWNERS):
        shared = firsts[(counts > place) & (counts <= MAX_OWNERS)]
        pairs = np.unique(np.stack([owners[shared], owners[shared + place]]), axis=1)
        yield from zip(*pairs.tolist(), strict=True)


def _plain(text: str) -> bytes:
    return " ".join(text.split()).casefold().encode()
