"""OpenAI's four logprob arrays of one sequence, from its scored tokens as they come."""

import codecs
from collections.abc import Iterable
from typing import NamedTuple

from model.tokenizer import Tokenizer
from serving.http.answers import MIN_LOGPROB
from serving.http.completion_answers import CompletionLogprobs


class ScoredToken(NamedTuple):
    """A token with its logprob, None where nothing stands before it, and the most probable ones there."""

    token: int
    logprob: float | None
    top: list[tuple[int, float]]


class LogprobArrays:
    """Turns scored tokens into arrays; `text_offset` counts the characters finished before a token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._characters = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, scored: Iterable[ScoredToken], *, is_end: bool = False) -> CompletionLogprobs:
        """Returns the entries of further tokens; `is_end` where a text ends, as the prompt's does before the answer."""
        arrays = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token, logprob, top in scored:
            arrays.tokens.append(self._tokenizer.label(token))
            arrays.token_logprobs.append(None if logprob is None else max(logprob, MIN_LOGPROB))
            arrays.top_logprobs.append(None if logprob is None else self._tops(token, logprob, top))
            arrays.text_offset.append(self._characters)
            self._characters += len(self._decoder.decode(self._tokenizer.token_bytes(token)))
        self._characters += len(self._decoder.decode(b"", final=is_end))
        return arrays

    def _tops(self, token: int, logprob: float, top: list[tuple[int, float]]) -> dict[str, float]:
        """The most probable tokens, and the token itself where it is not among them."""
        pairs = dict(top) | {token: logprob}
        return {self._tokenizer.label(token): max(value, MIN_LOGPROB) for token, value in pairs.items()}
