"""The answers of POST /v1/completions."""

import time
import uuid
from collections.abc import Iterator
from typing import Any

from serving.engine.engine import IndexedDelta, RequestStream
from serving.engine.loading import ServedModel
from serving.engine.sequence import Delta
from serving.http.completion_answers import Completion, CompletionChoice, CompletionLogprobs, CompletionUsage
from serving.http.completion_logprobs import LogprobArrays, ScoredToken
from serving.http.completion_schema import CompletionRequest, model_not_found
from serving.http.errors import describe, invalid_value
from serving.http.generation import Generation


class CompletionFormat:
    """OpenAI's form: `choices` in every answer and chunk, logprobs as parallel arrays."""

    def __init__(self, request: CompletionRequest) -> None:
        self._request = request
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._arrays: dict[int, LogprobArrays] = {}

    def check(self, served: ServedModel) -> None:
        """Raises the 404 of a request for another model, the 400 of one for more tokens than this one has."""
        if self._request.model not in (None, served.name):
            raise model_not_found(str(self._request.model), served.name)
        most = self._request.generate.max_new_tokens
        if most is not None and most > served.max_seq_len:
            raise invalid_value("max_tokens", f"max_tokens must be in 0..{served.max_seq_len}, got {describe(most)}")

    def whole(self, generation: Generation, stream: RequestStream) -> str:
        """Returns the body of an unstreamed answer."""
        answer = Completion(**self._head(generation), choices=self._choices(generation), usage=_usage(generation))
        return answer.model_dump_json()

    def event(self, generation: Generation, delta: IndexedDelta) -> dict[str, Any]:
        """Returns one token's chunk, a `Completion`: a plain dict, as there may be thousands a second."""
        is_first = not generation.deltas[delta.index]
        text = generation.add(delta)
        logprobs = self._logprobs(generation, delta.index, [delta.delta], with_prompt=is_first)
        choice = {
            "index": delta.index,
            "text": text,
            "logprobs": None if logprobs is None else logprobs.model_dump(),
            "finish_reason": delta.delta.finish_reason,
            "stop_reason": delta.delta.stop_reason,
        }
        return self._chunk(generation, [choice])

    def closing(self, generation: Generation, stream: RequestStream) -> list[dict[str, Any]]:
        """Returns the chunks of sequences without a token, and the usage chunk if it was asked for."""
        chunks = []
        if generation.is_scoring:
            chunks = [self._chunk(generation, [choice.model_dump()]) for choice in self._choices(generation)]
        if self._request.include_usage:
            chunks.append({**self._head(generation), "choices": [], "usage": _usage(generation).model_dump()})
        return chunks

    def _chunk(self, generation: Generation, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head(generation), "choices": choices}
        if self._request.continuous_usage_stats:
            return {**chunk, "usage": _usage(generation).model_dump()}
        return {**chunk, "usage": None} if self._request.include_usage else chunk

    def _head(self, generation: Generation) -> dict[str, Any]:
        served = generation.served
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": served.name,
            "system_fingerprint": served.sha256,
        }

    def _choices(self, generation: Generation) -> list[CompletionChoice]:
        return [
            CompletionChoice(
                index=index,
                text=generation.text(index),
                logprobs=self._logprobs(generation, index, deltas, with_prompt=True),
                finish_reason=finish_reason,
                stop_reason=deltas[-1].stop_reason if deltas else None,
            )
            for index, (deltas, finish_reason) in enumerate(
                zip(generation.deltas, generation.finish_reasons(), strict=True)
            )
        ]

    def _logprobs(
        self, generation: Generation, index: int, deltas: list[Delta], *, with_prompt: bool
    ) -> CompletionLogprobs | None:
        """Returns the arrays of some deltas; with `echo` the first ones begin with the prompt's entries."""
        if generation.request.logprobs is None:
            return None
        if index not in self._arrays:
            self._arrays[index] = LogprobArrays(generation.served.tokenizer)
        arrays = self._arrays[index]
        if with_prompt and generation.request.echo:
            return arrays.add(_scored_prompt(generation, index), is_end=True) + arrays.add(_scored(deltas))
        return arrays.add(_scored(deltas))


def _scored(deltas: list[Delta]) -> Iterator[ScoredToken]:
    return (ScoredToken(delta.token, delta.logprob, delta.top_logprobs) for delta in deltas)


def _scored_prompt(generation: Generation, index: int) -> Iterator[ScoredToken]:
    """The prompt's tokens; before its first one stands nothing, so that has no logprob."""
    prompt, scores = generation.prompt(index).tokens, generation.prompt_scores[index]
    assert scores is not None, "they are there before a sequence's first delta"
    yield ScoredToken(prompt[0], None, [])
    yield from map(ScoredToken, prompt[1:], scores.logprobs, scores.top_logprobs)


def _usage(generation: Generation) -> CompletionUsage:
    usage = generation.usage()
    return CompletionUsage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
    )
