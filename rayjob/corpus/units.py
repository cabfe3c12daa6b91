"""The units of work: which stretches of text make which numbered block.

The plan is a pure function of the catalog, so blocks do not depend on how many tasks write them, and after a
kill only the missing ones are written.
"""

import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from model.normalizer import Normalizer
from rayjob.corpus.block_unit import BlockUnit
from rayjob.corpus.catalog import Stretch
from rayjob.corpus.documents import Document, read_document
from rayjob.corpus.row_units import RowUnit
from rayjob.corpus.text import Text

BLOCK_BYTES = 2 * 2**20  # of text: about 0.5M tokens, 0.8 MB of Parquet, half a second of one core


class Span(NamedTuple):
    """Characters [start, stop) of a document, one row of a block; `bytes` is their size in UTF-8."""

    document: Document
    start: int
    stop: int
    bytes: int

    @property
    def is_end(self) -> bool:
        """Whether the document ends here, so that EOS follows."""
        return self.stop == self.document.chars


@dataclass(frozen=True, slots=True)
class Unit(BlockUnit):
    """The work for one block: spans in order, a document's neighbouring pieces joined."""

    spans: tuple[Span, ...]

    @property
    def source_bytes(self) -> int:
        return sum(span.bytes for span in self.spans)

    @property
    def content_hash(self) -> str:
        content = [(span.document.doc_id, span.document.sha256, *span[1:]) for span in self.spans]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def texts(self, normalizer: Normalizer) -> Iterator[Text]:
        for span in self.spans:
            text = _read_text(span.document, normalizer)[span.start : span.stop]
            yield Text(span.document.doc_id, text, span.is_end)

    def to_json(self) -> str:
        spans = [{**span._asdict(), "document": asdict(span.document)} for span in self.spans]
        return json.dumps({"split": self.split, "number": self.number, "spans": spans})

    @classmethod
    def from_json(cls, data: str) -> "Unit":
        fields = json.loads(data)
        spans = [
            Span(**{**span, "document": Document(**{**span["document"], "pieces": ()})}) for span in fields["spans"]
        ]
        return cls(fields["split"], fields["number"], tuple(spans))


AnyUnit = Unit | RowUnit


def load_unit(data: str) -> AnyUnit:
    """The unit that `to_json` of either kind wrote: an object of documents or an array of rows."""
    return RowUnit.from_json(data) if data.startswith("[") else Unit.from_json(data)


def plan_units(split: str, stretches: Sequence[Stretch]) -> list[Unit]:
    """Fills blocks of at most BLOCK_BYTES with pieces in order; a document goes on in the next block."""
    spans: list[Span] = []
    units: list[Unit] = []
    filled = 0
    for piece in _pieces(stretches):
        if spans and filled + piece.bytes > BLOCK_BYTES:
            units.append(Unit(split, len(units), tuple(spans)))
            spans, filled = [], 0
        _append(spans, piece)
        filled += piece.bytes
    if spans:
        units.append(Unit(split, len(units), tuple(spans)))
    return units


@functools.lru_cache(maxsize=1)  # the units of one long document follow each other
def _read_text(document: Document, normalizer: Normalizer) -> str:
    return read_document(document, normalizer)


def _pieces(stretches: Sequence[Stretch]) -> Iterator[Span]:
    for document, pieces in stretches:
        bare = replace(document, pieces=())
        yield from (Span(bare, *piece) for piece in pieces)


def _append(spans: list[Span], piece: Span) -> None:
    last = spans[-1] if spans else None
    if last is not None and last.document == piece.document and last.stop == piece.start:
        spans[-1] = last._replace(stop=piece.stop, bytes=last.bytes + piece.bytes)
    else:
        spans.append(piece)
