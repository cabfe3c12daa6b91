"""How many tokens a prompt and its answer may take together."""

from collections.abc import Sequence
from typing import NamedTuple

from model.generate import room_left

DEFAULT_MAX_NEW_TOKENS = 128


class ContextLengthExceeded(ValueError):
    """Prompt and answer do not fit into the model's context; the message has both numbers."""

    def __init__(self, prompt_tokens: int, max_new_tokens: int, max_seq_len: int) -> None:
        super().__init__(
            f"the prompt has {prompt_tokens} tokens and {max_new_tokens} more were asked for, but the context holds "
            f"{max_seq_len} tokens: shorten the prompt or ask for fewer."
        )


class FittedPrompt(NamedTuple):
    """A prompt that fits, with the room for its answer."""

    tokens: tuple[int, ...]
    max_new_tokens: int
    truncated_tokens: int


def fit_prompt(
    prompt: Sequence[int], max_new_tokens: int | None, max_seq_len: int, *, truncate_left: bool = False
) -> FittedPrompt:
    """Returns the prompt with its max_new_tokens, cut at the left only if that was asked for.

    Args:
        prompt: Token ids, at least one.
        max_new_tokens: Tokens asked for, in 1..max_seq_len; None takes the room left, at most 128.
        max_seq_len: The model's context.
        truncate_left: Drop the oldest prompt tokens instead of failing.

    Raises:
        ContextLengthExceeded: It does not fit and may not be cut, or the answer alone fills the context.
    """
    room = room_left(len(prompt), max_seq_len)
    wanted = max_new_tokens or min(DEFAULT_MAX_NEW_TOKENS, room or max(max_seq_len // 2, 1))
    if wanted <= room:
        return FittedPrompt(tuple(prompt), wanted, 0)
    kept = max_seq_len - wanted
    if not truncate_left or kept < 1:
        raise ContextLengthExceeded(len(prompt), wanted, max_seq_len)
    return FittedPrompt(tuple(prompt[-kept:]), wanted, len(prompt) - kept)
