"""The text of a unit on its way to a block, whatever the source it comes from."""

from typing import NamedTuple


class Text(NamedTuple):
    """Normalised text for one row of a block; EOS follows if its document ends there."""

    doc_id: str
    text: str
    is_end: bool
