"""The text of a unit on its way to a block, whatever the source it comes from."""

from collections.abc import Iterable
from typing import NamedTuple


class Text(NamedTuple):
    """Normalised text for one row of a block, in parts that begin where a word does; EOS follows if its document ends.

    The parts can be taken once, and before the next text.
    """

    doc_id: str
    parts: Iterable[str]
    is_end: bool
