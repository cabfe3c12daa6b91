"""The units of work: which stretches of text make which numbered block.

The plan is a pure function of the catalog, so blocks do not depend on how many tasks write them, and after a
kill only the missing ones are written.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from model.normalizer import Normalizer
from rayjob.corpus.block_unit import BlockUnit
from rayjob.corpus.catalog import Stretch
from rayjob.corpus.documents import Document, Piece, read_pieces
from rayjob.corpus.row_units import RowUnit
from rayjob.corpus.text import Text

BLOCK_BYTES = 2 * 2**20  # of text: about 0.5M tokens, 0.8 MB of Parquet, half a second of one core


class Span(NamedTuple):
    """Neighbouring pieces of a document, one row of a block."""

    document: Document
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        return sum(piece.bytes for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Unit(BlockUnit):
    """The work for one block: spans in order, a document's neighbouring pieces joined."""

    spans: tuple[Span, ...]

    @property
    def source_bytes(self) -> int:
        return sum(span.bytes for span in self.spans)

    @property
    def content_hash(self) -> str:
        content = [(span.document.doc_id, span.document.sha256, span.pieces) for span in self.spans]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def texts(self, normalizer: Normalizer) -> Iterator[Text]:
        for document, pieces in self.spans:
            yield Text(document.doc_id, read_pieces(document, pieces, normalizer), pieces[-1].is_end)

    def to_json(self) -> str:
        spans = [[asdict(document), pieces] for document, pieces in self.spans]
        return json.dumps({"split": self.split, "number": self.number, "spans": spans})

    @classmethod
    def from_json(cls, data: str) -> "Unit":
        fields = json.loads(data)
        spans = [
            Span(Document(**{**document, "pieces": ()}), tuple(Piece(*piece) for piece in pieces))
            for document, pieces in fields["spans"]
        ]
        return cls(fields["split"], fields["number"], tuple(spans))


AnyUnit = Unit | RowUnit


def load_unit(data: str) -> AnyUnit:
    """The unit that `to_json` of either kind wrote: an object of documents or an array of rows."""
    return RowUnit.from_json(data) if data.startswith("[") else Unit.from_json(data)


def plan_units(split: str, stretches: Sequence[Stretch]) -> list[Unit]:
    """Fills blocks of at most BLOCK_BYTES with pieces in order; a document goes on in the next block."""
    units: list[Unit] = []
    waiting: list[tuple[Document, Piece]] = []
    filled = 0
    for document, piece in _pieces(stretches):
        if waiting and filled + piece.bytes > BLOCK_BYTES:
            units.append(_unit(split, len(units), waiting))
            waiting, filled = [], 0
        waiting.append((document, piece))
        filled += piece.bytes
    if waiting:
        units.append(_unit(split, len(units), waiting))
    return units


def _pieces(stretches: Sequence[Stretch]) -> Iterator[tuple[Document, Piece]]:
    for document, pieces in stretches:
        bare = replace(document, pieces=())
        yield from ((bare, piece) for piece in pieces)


def _unit(split: str, number: int, pieces: Sequence[tuple[Document, Piece]]) -> Unit:
    spans: list[Span] = []
    for document, piece in pieces:
        last = spans[-1] if spans else None
        if last is not None and last.document == document and piece.follows(last.pieces[-1]):
            spans[-1] = Span(document, (*last.pieces, piece))
        else:
            spans.append(Span(document, (piece,)))
    return Unit(split, number, tuple(spans))
