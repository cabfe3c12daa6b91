"""Which stretch of one document is held out where whole documents cannot give validation its share (split.py, rule 4).

1. The end of the largest document is the first choice.
2. Where that shares passages with what stays in training, as documents may that are related (dedup.py), earlier
   stretches of the same size are tried, and those of the next largest documents.
3. Where all of them do, the first choice is taken, and said to be shared.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from model.normalizer import Normalizer
from rayjob.corpus.dedup import NO_HASHES, SHARED_PASSAGES, Fingerprint, Fingerprinter
from rayjob.corpus.documents import Document, Piece, find_cut, read_pieces

MOST_DOCUMENTS, MOST_PLACES = 4, 16  # tried; each place costs one reading of the document

Pieces = tuple[Piece, ...]


class HeldStretch(NamedTuple):
    """The document's index, what stays in training before and behind the stretch, and whether it shares passages."""

    document: int
    before: Pieces
    held: Pieces
    behind: Pieces
    is_shared: bool


def choose_stretch(
    documents: Sequence[Document],
    fingerprints: Sequence[Fingerprint],
    held_out: Collection[int],
    n_bytes: int,
    normalizer: Normalizer,
) -> HeldStretch:
    """Applies the rules above.

    Args:
        documents, fingerprints: all that are kept.
        held_out: indices of those in validation already.
        n_bytes: wanted size of the stretch.

    Raises:
        CorpusError: a file is gone or has changed.
    """
    training = [index for index in range(len(documents)) if index not in held_out]
    candidates = sorted(training, key=lambda index: -documents[index].bytes)[:MOST_DOCUMENTS]
    first: HeldStretch | None = None
    for index in candidates:
        others = _join([fingerprints[other] for other in training if other != index])
        for end in _ends(documents[index].bytes, n_bytes):
            found = _hold(index, documents[index], end - n_bytes, end, others, normalizer)
            if not found.is_shared:
                return found
            first = first or found
    assert first is not None  # there is a document, and each has an end
    return first


def _ends(size: int, n_bytes: int) -> Iterator[int]:
    """Ends of stretches to try, from the end of a document to its beginning."""
    n_places = max(1, min(size // max(n_bytes, 1), MOST_PLACES))
    yield size
    for place in range(1, n_places):
        yield size - (size - n_bytes) * place // (n_places - 1)


def _hold(
    index: int, document: Document, start: int, end: int, others: Fingerprint, normalizer: Normalizer
) -> HeldStretch:
    before, rest = _cut(document, document.pieces, start, normalizer)
    held, behind = _cut(document, rest, end - sum(piece.bytes for piece in before), normalizer)
    taken = _fingerprint(document, held, normalizer)
    rests = [_fingerprint(document, pieces, normalizer) for pieces in (before, behind) if pieces]
    return HeldStretch(index, before, held, behind, _is_shared(taken, _join([others, *rests])))


def _cut(document: Document, pieces: Pieces, place: int, normalizer: Normalizer) -> tuple[Pieces, Pieces]:
    """Cuts before white space at most `place` bytes behind the first piece's beginning."""
    ends = list(accumulate(piece.bytes for piece in pieces))
    number = bisect_right(ends, place)  # of the piece to cut
    if number == len(ends):
        return pieces, ()
    piece = pieces[number]
    (text,) = read_pieces(document, [piece], normalizer)
    cut = find_cut(text, 0, len(text) - round(len(text) * (ends[number] - place) / piece.bytes))
    head_bytes = len(text[:cut].encode())
    head = piece._replace(stop=piece.start + cut, bytes=head_bytes, is_end=False)
    tail = piece._replace(start=piece.start + cut, bytes=piece.bytes - head_bytes)
    heads, tails = ([each] if each.bytes else [] for each in (head, tail))
    return (*pieces[:number], *heads), (*tails, *pieces[number + 1 :])


def _fingerprint(document: Document, pieces: Pieces, normalizer: Normalizer) -> Fingerprint:
    fingerprinter = Fingerprinter()
    for text in read_pieces(document, pieces, normalizer):
        fingerprinter.add(text)
    return fingerprinter.fingerprint()


def _join(fingerprints: Sequence[Fingerprint]) -> Fingerprint:
    sentences = np.concatenate([NO_HASHES, *(each.sentences for each in fingerprints)])
    return Fingerprint(sentences, np.concatenate([NO_HASHES, *(each.runs for each in fingerprints)]))


def _is_shared(one: Fingerprint, other: Fingerprint) -> bool:
    n_sentences = np.count_nonzero(np.isin(one.sentences, other.sentences))
    return bool(n_sentences >= SHARED_PASSAGES or np.isin(one.runs, other.runs).any())
