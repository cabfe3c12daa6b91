"""Bodies of successful answers; the OpenAPI schema shows these classes."""

from typing import Literal

from pydantic import BaseModel

MIN_LOGPROB = -9999.0
"""Floor of every logprob in an answer: JSON has no minus infinity."""


class CheckpointId(BaseModel):
    """Which weights answered."""

    step: int
    sha256: str


class TokenLogprob(BaseModel):
    """A token and the log-softmax of the raw logits at it."""

    token: int
    text: str
    logprob: float


class StepLogprobs(TokenLogprob):
    """The generated token's logprob beside the most probable ones, most probable first."""

    top: list[TokenLogprob]


class Output(BaseModel):
    """One generated continuation; outputs are ordered by prompt, then by choice."""

    index: int
    text: str
    tokens: list[int]
    finish_reason: Literal["stop", "length"]
    stop_reason: str | None
    seed: int
    logprobs: list[StepLogprobs] | None


class Usage(BaseModel):
    """Token counts of a request; each prompt counts once, whatever n is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_truncated: int


class Timings(BaseModel):
    """Where a request's time went: its first sequence until the first token, all of them after it."""

    queue_ms: float
    prefill_ms: float
    ttft_ms: float
    decode_ms: float
    tokens_per_s: float


class GenerateAnswer(BaseModel):
    """Answer of POST /generate."""

    id: str
    model: str
    checkpoint: CheckpointId
    text: str
    outputs: list[Output]
    usage: Usage
    timings: Timings


class StreamEvent(BaseModel):
    """One token of a streamed answer. `logprobs` is there when they were asked for."""

    index: int
    text: str
    token: int
    finish_reason: Literal["stop", "length"] | None
    logprobs: StepLogprobs | None = None


class StreamEnd(BaseModel):
    """Last event of a streamed answer, and its only one without a token."""

    usage: Usage
    timings: Timings
    seed: int


class Health(BaseModel):
    """State of a ready service. `update_error` says why the last change of checkpoint was refused."""

    status: Literal["ok"]
    model: str
    checkpoint: CheckpointId
    max_seq_len: int
    slots: int
    running: int
    waiting: int
    update_error: str | None


class ErrorDetail(BaseModel):
    """What was wrong."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(BaseModel):
    """Body of every answer other than 200."""

    error: ErrorDetail
