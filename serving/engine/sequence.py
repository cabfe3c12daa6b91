"""What the engine decodes, and what it hands out token by token."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from model.generate import GeneratedToken, generate
from model.sampling import SamplingParams
from model.tokenizer import Tokenizer
from serving.engine.loading import ServedModel
from serving.engine.text import TextStream

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """One sequence to decode: `prompt` plus at most `max_new_tokens`, reproducible by (seed, choice).

    Attributes:
        prompt_logprobs: None, or ask for the scores of the prompt with so many alternatives for each token;
            then max_new_tokens may be 0, which decodes nothing.
    """

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
class Delta:
    """One decoded token with the text that became certain through it; `finish_reason` is set on the last."""

    token: int
    text: str
    logprob: float
    top_logprobs: list[tuple[int, float]]
    finish_reason: FinishReason | None
    stop_reason: str | None


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Natural logarithms of the probabilities of `prompt[1:]`, each after the tokens before it.

    Attributes:
        logprobs: The log-softmax of the raw logits in fp32; one fewer than the prompt has tokens.
        top_logprobs: For each of them the most probable tokens, best first, the lowest token id on a tie.
    """

    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)


class Transcript:
    """What a sequence has said so far: it turns tokens into deltas and knows when the sequence ends.

    Attributes:
        output: Tokens so far.
    """

    def __init__(self, spec: SequenceSpec, tokenizer: Tokenizer) -> None:
        self.output: list[int] = []
        self._max_new_tokens = spec.max_new_tokens
        self._eos_id = None if spec.ignore_eos else tokenizer.eos_id
        self._text = TextStream(tokenizer.token_bytes, spec.stop, include_stop=spec.include_stop)

    def push(self, generated: GeneratedToken) -> Delta:
        """Adds a token and returns its delta. EOS comes before a stop string, and that before the length."""
        token, logprob, top_logprobs = generated
        self.output.append(token)
        is_eos = token == self._eos_id
        is_last = is_eos or len(self.output) == self._max_new_tokens
        piece = self._text.push(token, is_last=is_last)
        is_stopped = is_eos or self._text.stop_reason is not None
        finish: FinishReason | None = "stop" if is_stopped else "length" if is_last else None
        return Delta(token, piece, logprob, top_logprobs, finish, self._text.stop_reason)


def decode_sequence(served: ServedModel, spec: SequenceSpec) -> Iterator[Delta]:
    """Yields the deltas of one sequence by naive generation: the oracle of the engine."""
    transcript = Transcript(spec, served.tokenizer)
    tokens = generate(
        served.model,
        spec.prompt,
        spec.params,
        max_new_tokens=spec.max_new_tokens,
        seed=spec.seed,
        choice=spec.choice,
        eos_id=None if spec.ignore_eos else served.tokenizer.eos_id,
        n_top_logprobs=spec.n_top_logprobs,
    )
    for generated in tokens:
        delta = transcript.push(generated)
        yield delta
        if delta.finish_reason is not None:
            return
