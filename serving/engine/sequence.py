"""What the engine decodes, and what it hands out token by token."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch

from model.generate import describe_token, generate
from model.sampling import SamplingParams
from serving.engine.loading import ServedModel
from serving.engine.text import TextStream

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """One sequence to decode: `prompt` plus at most `max_new_tokens`, reproducible by (seed, choice)."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    seed: int
    choice: int = 0
    params: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    n_top_logprobs: int = 0
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Logprob of each prompt token but the first, and so many most probable ones at its place."""

    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]]


@dataclass(frozen=True, slots=True)
class Delta:
    """One decoded token with the text that became certain through it; `finish_reason` is set on the last."""

    token: int
    text: str
    logprob: float
    top_logprobs: list[tuple[int, float]]
    finish_reason: FinishReason | None
    stop_reason: str | None


@torch.inference_mode()
def score_prompt(served: ServedModel, prompt: tuple[int, ...], n_top_logprobs: int) -> PromptScores:
    """Returns the log-softmax of the raw fp32 logits at each prompt token but the first."""
    batch = torch.tensor([prompt], device=served.model.model.embed_tokens.weight.device)
    logits = served.model(batch)[0, :-1]
    scored = [describe_token(row, token, n_top_logprobs) for row, token in zip(logits, prompt[1:], strict=True)]
    return PromptScores([one.logprob for one in scored], [one.top_logprobs for one in scored])


def decode_sequence(served: ServedModel, spec: SequenceSpec) -> Iterator[Delta]:
    """Yields the tokens of one sequence, decoded alone; the last one carries the finish reason."""
    eos_id = None if spec.ignore_eos else served.tokenizer.eos_id
    text = TextStream(served.tokenizer.token_bytes, spec.stop, include_stop=spec.include_stop)
    tokens = generate(
        served.model,
        spec.prompt,
        spec.params,
        max_new_tokens=spec.max_new_tokens,
        seed=spec.seed,
        choice=spec.choice,
        eos_id=eos_id,
        n_top_logprobs=spec.n_top_logprobs,
    )
    for count, (token, logprob, top_logprobs) in enumerate(tokens, start=1):
        is_eos = token == eos_id
        is_last = is_eos or count == spec.max_new_tokens
        piece = text.push(token, is_last=is_last)
        is_stopped = is_eos or text.stop_reason is not None
        finish: FinishReason | None = "stop" if is_stopped else "length" if is_last else None
        yield Delta(token, piece, logprob, top_logprobs, finish, text.stop_reason)
        if finish is not None:
            return
