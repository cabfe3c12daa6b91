"""A request between its checked form and its answer: prompts become tokens, and deltas are collected."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from serving.engine.context import ContextLengthExceeded, FittedPrompt, fit_prompt
from serving.engine.engine import IndexedDelta, RequestStream
from serving.engine.loading import ServedModel
from serving.engine.sequence import Delta, FinishReason, PromptScores, SequenceSpec
from serving.http.answers import MIN_LOGPROB, StepLogprobs, Timings, TokenLogprob, Usage
from serving.http.errors import ApiError, describe, invalid_value
from serving.http.schemas import MAX_PROMPT_TOKENS, GenerateRequest, Prompt


@dataclass(slots=True)
class Generation:
    """One request from its prompts to its answer: it collects the deltas that the engine's stream yields.

    Attributes:
        prompt_scores: The engine's, by sequence; see `RequestStream`.
        spans_s: When each sequence's first and last delta was made, in the time of `time.monotonic()`.
    """

    request: GenerateRequest
    served: ServedModel
    accepted_at_s: float
    prompts: list[FittedPrompt]
    seed: int
    deltas: list[list[Delta]] = field(init=False)
    first_delta_at_s: float = 0.0
    last_delta_at_s: float = 0.0
    spans_s: list[list[float]] = field(init=False)
    prompt_scores: list[PromptScores | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        num_sequences = len(self.prompts) * self.request.n
        self.deltas = [[] for _ in range(num_sequences)]
        self.spans_s = [[0.0, 0.0] for _ in range(num_sequences)]

    def specs(self) -> list[SequenceSpec]:
        """Returns the sequences to decode, prompt-major."""
        request = self.request
        prompt_logprobs = request.logprobs or 0 if request.scores_prompt or self.is_scoring else None
        return [
            SequenceSpec(
                prompt=prompt.tokens,
                max_new_tokens=prompt.max_new_tokens,
                seed=self.seed,
                choice=choice,
                params=request.params,
                stop=request.stop,
                include_stop=request.include_stop,
                ignore_eos=request.ignore_eos,
                n_top_logprobs=request.logprobs or 0,
                prompt_logprobs=prompt_logprobs,
            )
            for prompt in self.prompts
            for choice in range(request.n)
        ]

    @property
    def is_scoring(self) -> bool:
        """Whether nothing is generated: the request only asks for the logprobs of its prompts."""
        return self.request.max_new_tokens == 0

    def add(self, event: IndexedDelta) -> str:
        """Keeps a delta and returns its text; with `echo` a sequence's first one begins with the prompt."""
        self.last_delta_at_s = event.made_at_s
        self.first_delta_at_s = self.first_delta_at_s or self.last_delta_at_s
        is_first = not self.deltas[event.index]
        self.spans_s[event.index][0 if is_first else 1] = self.last_delta_at_s
        self.deltas[event.index].append(event.delta)
        return self._echo(event.index) + event.delta.text if is_first else event.delta.text

    def finish_reasons(self) -> list[FinishReason | None]:
        """Returns why each sequence ended; None for one that did not."""
        if self.is_scoring:
            return [None if scores is None else "length" for scores in self.prompt_scores]
        return [deltas[-1].finish_reason if deltas else None for deltas in self.deltas]

    def tpots_s(self) -> list[float]:
        """Returns the mean gap between the later tokens of each sequence that has at least two."""
        spans = zip(self.spans_s, self.deltas, strict=True)
        return [(last - first) / (len(deltas) - 1) for (first, last), deltas in spans if len(deltas) > 1]

    def usage(self) -> Usage:
        """Returns the token counts so far."""
        prompt_tokens = sum(len(prompt.tokens) for prompt in self.prompts)
        completion_tokens = sum(map(len, self.deltas))
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_truncated=sum(prompt.truncated_tokens for prompt in self.prompts),
        )

    def timings(self, stream: RequestStream) -> Timings:
        """Returns where the time went, once all deltas are there."""
        started_at_s = stream.started_at_s or self.first_delta_at_s
        prefill_s = self.first_delta_at_s - started_at_s
        decode_s = self.last_delta_at_s - self.first_delta_at_s
        tokens = sum(map(len, self.deltas))
        return Timings(
            queue_ms=_ms(started_at_s - self.accepted_at_s),
            prefill_ms=_ms(prefill_s),
            ttft_ms=_ms(self.first_delta_at_s - self.accepted_at_s),
            decode_ms=_ms(decode_s),
            tokens_per_s=round(tokens / max(decode_s or prefill_s, 1e-6), 1),
        )

    def logprobs(self, delta: Delta) -> StepLogprobs | None:
        """Returns a delta's logprobs if the request asked for them; 0 asks for the token's own."""
        if self.request.logprobs is None:
            return None
        own = self._token_logprob(delta.token, delta.logprob)
        top = [self._token_logprob(token, logprob) for token, logprob in delta.top_logprobs]
        return StepLogprobs(**own.model_dump(), top=top)

    def text(self, index: int) -> str:
        """Returns a sequence's text so far, after the prompt with `echo`."""
        return self._echo(index) + "".join(delta.text for delta in self.deltas[index])

    def prompt(self, index: int) -> FittedPrompt:
        """Returns the prompt of a sequence."""
        return self.prompts[index // self.request.n]

    def _echo(self, index: int) -> str:
        if not self.request.echo:
            return ""
        return self.served.tokenizer.decode(self.prompt(index).tokens)

    def _token_logprob(self, token: int, logprob: float) -> TokenLogprob:
        text = self.served.tokenizer.token_bytes(token).decode("utf-8", errors="replace")
        return TokenLogprob(token=token, text=text, logprob=max(logprob, MIN_LOGPROB))


def prepare_generation(request: GenerateRequest, served: ServedModel, accepted_at_s: float) -> Generation:
    """Turns the prompts into tokens that fit; slow for long texts, so keep it off the event loop.

    Raises:
        ApiError: 400 for a prompt or max_new_tokens that this model cannot take.
    """
    max_seq_len = served.max_seq_len
    if request.max_new_tokens is not None and request.max_new_tokens > max_seq_len:
        message = f"max_new_tokens must be in 1..{max_seq_len}, got {request.max_new_tokens}"
        raise invalid_value("max_new_tokens", message)
    prompts = [_fit(_encode(prompt, served), request, served) for prompt in request.prompts]
    seed = secrets.randbits(63) if request.seed is None else request.seed
    return Generation(request, served, accepted_at_s, prompts, seed)


def _encode(prompt: Prompt, served: ServedModel) -> list[int]:
    if isinstance(prompt, tuple):
        _check_count(prompt, served)
        return check_tokens("prompt", prompt, served)
    tokens = served.tokenizer.encode_prompt(prompt)
    if not tokens:
        message = "the prompt is empty after the checkpoint's text normaliser: send at least one character"
        raise ApiError(400, "empty_prompt", message, param="prompt")
    return tokens


def check_tokens(name: str, tokens: Sequence[int], served: ServedModel) -> list[int]:
    """Returns the tokens, or raises the ApiError that names the first one beyond the vocabulary."""
    vocab_size = served.tokenizer.vocab_size
    for index, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            message = f"{name}[{index}] must be a token id in 0..{vocab_size - 1}, got {describe(token)}"
            raise invalid_value(name, message)
    return list(tokens)


def _check_count(prompt: tuple[int, ...], served: ServedModel) -> None:
    limit = max(MAX_PROMPT_TOKENS, served.max_seq_len)
    if len(prompt) > limit:
        message = f"the prompt has {len(prompt)} token ids, but a list of them may have at most {limit}"
        raise ApiError(400, "context_length_exceeded", message, param="prompt")


def _fit(tokens: list[int], request: GenerateRequest, served: ServedModel) -> FittedPrompt:
    wanted, max_seq_len = request.max_new_tokens, served.max_seq_len
    try:
        if wanted == 0:
            return _fit_scored(tokens, max_seq_len)
        fitted = fit_prompt(tokens, wanted, max_seq_len, truncate_left=request.truncate == "left")
    except ContextLengthExceeded as error:
        raise ApiError(400, "context_length_exceeded", str(error), param="prompt") from None
    if wanted is None:
        return fitted._replace(max_new_tokens=min(fitted.max_new_tokens, request.most_by_default))
    return fitted


def _fit_scored(tokens: list[int], max_seq_len: int) -> FittedPrompt:
    """A prompt that is only scored may fill the context."""
    if len(tokens) > max_seq_len:
        raise ContextLengthExceeded(len(tokens), 0, max_seq_len)
    return FittedPrompt(tuple(tokens), 0, 0)


def _ms(seconds: float) -> float:
    return round(seconds * 1000.0, 3)
