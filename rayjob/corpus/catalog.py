"""The documents that are kept, the side of the split each stands on, and what was noticed on the way."""

import functools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from model.normalizer import Normalizer
from rayjob.corpus.dedup import Copy, find_copies, group_related
from rayjob.corpus.document_scan import DocumentScan, SourceFacts, part_path, scan_documents
from rayjob.corpus.documents import Document, Piece, read_pieces
from rayjob.corpus.errors import CorpusError, PrepareCancelled
from rayjob.corpus.held_stretch import HeldStretch, choose_stretch
from rayjob.corpus.sources import TEXT, Source
from rayjob.corpus.split import choose_validation
from rayjob.corpus.tasks import Progress
from rayjob.store.fetch import fetch_some

logger = logging.getLogger(__name__)

TINY_BYTES = 100  # a text file this short is more likely a mistake than a book; it is used, and named
NAMED_PER_KIND = 20  # warnings of one kind written out; the rest are counted


@dataclass(frozen=True, slots=True)
class CatalogSettings:
    """The part of the config that decides which documents are kept and where they stand."""

    normalizer: Normalizer
    text_column: str
    dedup: bool
    val_fraction: float


class Stretch(NamedTuple):
    """A document, or the part of one that stands on this side of the split."""

    document: Document
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        return sum(piece.bytes for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Catalog:
    """All of the corpus but the texts themselves.

    Attributes:
        train, val: what is tokenized for each side, in the order of document names.
        source_facts: one entry per source, in order.
        rows_in, rows_empty, rows_duplicate: documents found; without text; dropped as copies.
        bytes_in, bytes_kept: of the documents found and kept, as they stand in the (unpacked) files.
        warnings: full sentences that name files.
    """

    train: tuple[Stretch, ...]
    val: tuple[Stretch, ...]
    source_facts: tuple[SourceFacts, ...]
    rows_in: int
    rows_empty: int
    rows_duplicate: int
    bytes_in: int
    bytes_kept: int
    warnings: tuple[str, ...]

    def splits(self) -> dict[str, tuple[Stretch, ...]]:
        return {"train": self.train, "val": self.val}


@functools.lru_cache(maxsize=1)  # `check` and `prepare` of one job need the same one; sources carry their hashes
def build_catalog(
    sources: tuple[Source, ...], settings: CatalogSettings, cache: Path, is_cancelled: Callable[[], bool]
) -> Catalog:
    """Reads every source once, drops empty documents and copies, and splits the rest.

    Args:
        sources: the files.
        settings: what to make of them.
        cache: folder for what was read, so that it need not be read again.
        is_cancelled: asked before each file.

    Raises:
        CorpusError: no text at all, or a file that is not what its suffix says (all such files are named).
        PrepareCancelled: the caller asked to stop.
    """
    scans = _scan(sources, settings, cache, is_cancelled)
    found = [document for scan in scans for document in scan.documents]
    fingerprints = [each for scan in scans for each in scan.fingerprints]
    if not found:
        raise CorpusError([f"The corpus is empty: none of its {len(sources)} files holds any text. {TEXT.words}"])
    copies = find_copies([document.sha256 for document in found], fingerprints) if settings.dedup else []
    dropped = {copy.copy for copy in copies}
    kept = [index for index in range(len(found)) if index not in dropped]
    documents = [found[index] for index in kept]
    sha256s = [document.sha256 for document in documents]
    fingerprints = [fingerprints[index] for index in kept]
    groups = group_related(sha256s, fingerprints)
    sizes = [document.bytes for document in documents]
    split = choose_validation(sha256s, sizes, groups, settings.val_fraction)
    stretch = None
    if split.cut_document is not None:
        stretch = choose_stretch(documents, fingerprints, split.held_out, split.tail_bytes, settings.normalizer)
    train, val = _deal(documents, split.held_out, stretch)
    n_empty = sum(len(scan.empty) for scan in scans)
    return Catalog(
        train,
        val,
        tuple(scan.facts for scan in scans),
        rows_in=len(found) + n_empty,
        rows_empty=n_empty,
        rows_duplicate=len(copies),
        bytes_in=sum(scan.facts.source_bytes for scan in scans),
        bytes_kept=sum(document.end_byte - document.first_byte for document in documents),
        warnings=(*_warnings(sources, scans, copies), *_shared_warning(documents, stretch)),
    )


def read_texts(stretches: Sequence[Stretch], settings: CatalogSettings) -> Iterator[str]:
    """The normalised texts of one side of the split, one at a time."""
    for document, pieces in stretches:
        yield "".join(read_pieces(document, pieces, settings.normalizer))


def _scan(
    sources: tuple[Source, ...], settings: CatalogSettings, cache: Path, is_cancelled: Callable[[], bool]
) -> list[DocumentScan]:
    fetch_some(cache, [part_path(source, settings.normalizer, settings.text_column, cache) for source in sources])
    progress = Progress("read", len(sources), "files")
    scans = []
    problems = []
    for source in sources:
        if is_cancelled():
            raise PrepareCancelled(f"Stopped while reading the sources, before {source.name}.")
        try:
            scans.append(scan_documents(source, settings.normalizer, settings.text_column, cache))
        except CorpusError as error:
            problems += error.problems
        progress.add(1, source.bytes)
    if problems:
        raise CorpusError(problems)
    return scans


def _deal(
    documents: Sequence[Document], held_out: Collection[int], stretch: HeldStretch | None
) -> tuple[tuple[Stretch, ...], tuple[Stretch, ...]]:
    train, val = [], []
    for index, document in enumerate(documents):
        if stretch is not None and index == stretch.document:
            train += [Stretch(document, pieces) for pieces in (stretch.before, stretch.behind) if pieces]
            val += [Stretch(document, stretch.held)] if stretch.held else []
        else:
            (val if index in held_out else train).append(Stretch(document, document.pieces))
    return tuple(train), tuple(val)


def _warnings(sources: Sequence[Source], scans: Sequence[DocumentScan], copies: Sequence[Copy]) -> Iterator[str]:
    documents = [document for scan in scans for document in scan.documents]
    of_sources = list(zip(sources, scans, strict=True))
    yield from some_of(
        invalid_warning(source.name, scan.facts.invalid_bytes, f"line {scan.invalid_line}")
        for source, scan in of_sources
        if scan.facts.invalid_bytes
    )
    yield from some_of(
        replaced_warning(source.name, scan.facts.replaced_chars, f"line {scan.replaced_line}")
        for source, scan in of_sources
        if scan.facts.replaced_chars
    )
    yield from some_of(f"{doc_id} is empty and was left out." for scan in scans for doc_id in scan.empty)
    yield from some_of(f"{source.name} holds no document." for source, scan in of_sources if not scan.facts.documents)
    yield from some_of(
        f"{document.doc_id} is only {document.bytes} bytes long."
        for document in documents
        if document.field is None and document.bytes < TINY_BYTES
    )
    ids = [document.doc_id for document in documents]
    yield from some_of(_describe_copy(copy, ids) for copy in copies)


def _shared_warning(documents: Sequence[Document], stretch: HeldStretch | None) -> list[str]:
    if stretch is None or not stretch.is_shared:
        return []
    return [
        f"{documents[stretch.document].doc_id}: the part held out for validation shares passages with what is trained "
        "on, as every other part that was tried does; the validation loss says little. Add other texts."
    ]


def _describe_copy(copy: Copy, ids: Sequence[str]) -> str:
    if copy.share == 1.0:
        return f"{ids[copy.copy]} is a copy of {ids[copy.original]} and was left out."
    return (
        f"{ids[copy.copy]} was left out: {copy.share:.0%} of its long sentences stand in earlier documents, "
        f"most of them in {ids[copy.original]}."
    )


def invalid_warning(name: str, n_bytes: int, place: str) -> str:
    """Tells of bytes that were read by the rule of `documents.py`."""
    return f"{name}: {n_bytes} bytes are not UTF-8, the first in {place}, and were read as Windows-1252 or U+FFFD."


def replaced_warning(name: str, n_chars: int, place: str) -> str:
    """Tells of characters that the normaliser replaces."""
    return f"{name}: {n_chars} characters are NUL or lone surrogates, the first in {place}, and became U+FFFD."


def some_of(sentences: Iterable[str]) -> Iterator[str]:
    """The first NAMED_PER_KIND warnings of a kind, and how many more there are."""
    rest = 0
    for number, sentence in enumerate(sentences):
        if number < NAMED_PER_KIND:
            last = sentence
            yield sentence
        else:
            rest += 1
    if rest:
        yield f"… and {rest} more like the last one ({last})"
