"""The text of a unit on its way to a block, whatever the source it comes from."""

from collections.abc import Iterable
from typing import NamedTuple


class Text(NamedTuple):
    """Normalised text for one row of a block; EOS follows if its document ends.

    `parts` can be taken once, and before the next text. Of a word longer than a slab, one may hold only the beginning.
    """

    doc_id: str
    parts: Iterable[str]
    is_end: bool
