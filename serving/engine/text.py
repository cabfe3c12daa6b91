"""Text of one sequence as its tokens arrive, so that nothing sent ever has to be taken back.

1. Tokens become bytes, bytes become characters: an unfinished UTF-8 character waits for its other bytes.
2. The new text is searched for stop strings; text ends before the earliest one.
3. An end of the text that could still grow into a stop string is held back.
"""

import codecs
from collections.abc import Callable, Sequence


class TextStream:
    """Incremental detokenizer with stop strings.

    Attributes:
        stop_reason: The stop string that ended the text, or None.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
    ) -> None:
        """Starts an empty text.

        Args:
            token_bytes: Bytes of one token; empty for control tokens.
            stop: Non-empty strings that end the text.
            include_stop: Whether the stop string itself belongs to the text.
        """
        self.stop_reason: str | None = None
        self._token_bytes = token_bytes
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def push(self, token: int, *, is_last: bool = False) -> str:
        """Adds one token and returns the text that is now certain.

        Args:
            token: The next token id.
            is_last: No token follows, so whatever was held back is returned too; an unfinished character
                becomes U+FFFD.
        """
        text = self._held + self._decoder.decode(self._token_bytes(token), final=is_last)
        hit = _earliest_stop(text, self._stop)
        if hit is not None:
            return self._end_at(text, *hit)
        certain = len(text) if is_last else len(text) - _held_length(text, self._stop)
        self._held = text[certain:]
        return text[:certain]

    def _end_at(self, text: str, start: int, stop: str) -> str:
        self.stop_reason = stop
        self._held = ""
        return text[:start] + (stop if self._include_stop else "")


def _earliest_stop(text: str, stop: Sequence[str]) -> tuple[int, str] | None:
    """Start and value of the stop string that begins first; the longest of those that begin together."""
    hits = [(text.find(s), s) for s in stop]
    return min(((at, s) for at, s in hits if at >= 0), key=lambda hit: (hit[0], -len(hit[1])), default=None)


def _held_length(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of `text` that is a proper beginning of a stop string."""
    longest = max((len(s) - 1 for s in stop), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(s.startswith(text[-length:]) for s in stop if len(s) > length):
            return length
    return 0
