"""What units of work have in common: their place among the blocks, and the names that follow."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from model.normalizer import Normalizer
from rayjob.corpus.text import Text


@dataclass(frozen=True, slots=True)
class BlockUnit(ABC):
    """The work for one block; of documents (units.py) or of rows (row_units.py)."""

    split: str
    number: int

    @property
    def block_name(self) -> str:
        return f"part-{self.number:05d}.parquet"

    @property
    def hash(self) -> str:
        """Names the content of the block."""
        return hashlib.sha256(json.dumps([self.split, self.number, self.content_hash]).encode()).hexdigest()

    @property
    @abstractmethod
    def content_hash(self) -> str:
        """Names the text of the unit; where the files lie and its number do not enter."""

    @property
    @abstractmethod
    def source_bytes(self) -> int:
        """Size of the text as the spans tell it."""

    @abstractmethod
    def texts(self, normalizer: Normalizer) -> Iterator[Text]:
        """The normalised text of each span."""
