"""Bodies of POST /v1/completions and GET /v1/models in OpenAI's shapes; the OpenAPI schema shows them."""

from typing import Literal

from pydantic import BaseModel


class CompletionLogprobs(BaseModel):
    """Parallel arrays with one entry per token; with `echo` those of the prompt come first, its first one null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]

    def __add__(self, later: "CompletionLogprobs") -> "CompletionLogprobs":
        return CompletionLogprobs(
            tokens=self.tokens + later.tokens,
            token_logprobs=self.token_logprobs + later.token_logprobs,
            top_logprobs=self.top_logprobs + later.top_logprobs,
            text_offset=self.text_offset + later.text_offset,
        )


class CompletionChoice(BaseModel):
    """One continuation, or in a stream one token of it; ordered by prompt, then by choice."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | None


class CompletionUsage(BaseModel):
    """Token counts of a request; each prompt counts once, whatever n is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Completion(BaseModel):
    """Answer of POST /v1/completions, and with `usage` left out or null a chunk of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: CompletionUsage | None = None


class ServedModelCard(BaseModel):
    """A model that can be asked for by its id."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    """The one model that is served."""

    object: Literal["list"]
    data: list[ServedModelCard]
