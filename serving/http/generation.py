"""POST /generate between the checked request and its answer: prompts to tokens, deltas to outputs."""

import secrets
import time
import uuid
from dataclasses import dataclass, field

from serving.engine.context import ContextLengthExceeded, FittedPrompt, fit_prompt
from serving.engine.engine import IndexedDelta, RequestStream
from serving.engine.loading import ServedModel
from serving.engine.sequence import Delta, SequenceSpec
from serving.http.answers import (
    MIN_LOGPROB,
    GenerateAnswer,
    Output,
    StepLogprobs,
    Timings,
    TokenLogprob,
    Usage,
)
from serving.http.errors import ApiError, describe, invalid_value
from serving.http.schemas import MAX_PROMPT_TOKENS, GenerateRequest, Prompt
from serving.http.service import checkpoint_id


@dataclass(slots=True)
class Generation:
    """One request from its prompts to its answer: it collects the deltas that the engine's stream yields."""

    request: GenerateRequest
    served: ServedModel
    accepted_at_s: float
    prompts: list[FittedPrompt]
    seed: int
    deltas: list[list[Delta]] = field(init=False)
    first_delta_at_s: float = 0.0
    last_delta_at_s: float = 0.0

    def __post_init__(self) -> None:
        self.deltas = [[] for _ in range(len(self.prompts) * self.request.n)]

    def specs(self) -> list[SequenceSpec]:
        """Returns the sequences to decode, prompt-major."""
        request = self.request
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
            )
            for prompt in self.prompts
            for choice in range(request.n)
        ]

    def add(self, event: IndexedDelta) -> str:
        """Keeps a delta and returns its text; with `echo` a sequence's first one begins with the prompt."""
        self.last_delta_at_s = time.monotonic()
        self.first_delta_at_s = self.first_delta_at_s or self.last_delta_at_s
        is_first = not self.deltas[event.index]
        self.deltas[event.index].append(event.delta)
        return self._echo(event.index) + event.delta.text if is_first else event.delta.text

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

    def answer(self, stream: RequestStream) -> GenerateAnswer:
        """Returns the whole answer, once all deltas are there."""
        outputs = [self._output(index) for index in range(len(self.deltas))]
        return GenerateAnswer(
            id=f"gen-{uuid.uuid4().hex}",
            model=self.served.name,
            checkpoint=checkpoint_id(self.served),
            text=outputs[0].text,
            outputs=outputs,
            usage=self.usage(),
            timings=self.timings(stream),
        )

    def logprobs(self, delta: Delta) -> StepLogprobs | None:
        """Returns a delta's logprobs if the request asked for them; 0 asks for the token's own."""
        if self.request.logprobs is None:
            return None
        own = self._token_logprob(delta.token, delta.logprob)
        top = [self._token_logprob(token, logprob) for token, logprob in delta.top_logprobs]
        return StepLogprobs(**own.model_dump(), top=top)

    def _output(self, index: int) -> Output:
        deltas = self.deltas[index]
        finish_reason = deltas[-1].finish_reason
        assert finish_reason is not None, "an unfinished sequence has no output"
        logprobs = [entry for delta in deltas if (entry := self.logprobs(delta)) is not None]
        return Output(
            index=index,
            text=self._echo(index) + "".join(delta.text for delta in deltas),
            tokens=[delta.token for delta in deltas],
            finish_reason=finish_reason,
            stop_reason=deltas[-1].stop_reason,
            seed=self.seed,
            logprobs=None if self.request.logprobs is None else logprobs,
        )

    def _echo(self, index: int) -> str:
        if not self.request.echo:
            return ""
        return self.served.tokenizer.decode(self.prompts[index // self.request.n].tokens)

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
        return _check_tokens(prompt, served)
    tokens = served.tokenizer.encode_prompt(prompt)
    if not tokens:
        message = "the prompt is empty after the checkpoint's text normaliser: send at least one character"
        raise ApiError(400, "empty_prompt", message, param="prompt")
    return tokens


def _check_tokens(prompt: tuple[int, ...], served: ServedModel) -> list[int]:
    limit = max(MAX_PROMPT_TOKENS, served.max_seq_len)
    if len(prompt) > limit:
        message = f"the prompt has {len(prompt)} token ids, but a list of them may have at most {limit}"
        raise ApiError(400, "context_length_exceeded", message, param="prompt")
    vocab_size = served.tokenizer.vocab_size
    for index, token in enumerate(prompt):
        if not 0 <= token < vocab_size:
            raise invalid_value(
                "prompt", f"prompt[{index}] must be a token id in 0..{vocab_size - 1}, got {describe(token)}"
            )
    return list(prompt)


def _fit(tokens: list[int], request: GenerateRequest, served: ServedModel) -> FittedPrompt:
    try:
        is_cut = request.truncate == "left"
        return fit_prompt(tokens, request.max_new_tokens, served.max_seq_len, truncate_left=is_cut)
    except ContextLengthExceeded as error:
        raise ApiError(400, "context_length_exceeded", str(error), param="prompt") from None


def _ms(seconds: float) -> float:
    return round(seconds * 1000.0, 3)
