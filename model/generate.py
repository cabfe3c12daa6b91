"""Naive generation, one sequence, one token at a time: the oracle of every faster engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from model.kv_cache import KVCache
from model.llama import Llama
from model.sampling import SamplingParams, choose_token, largest, uniform


class GeneratedToken(NamedTuple):
    """One generated token and how probable the model, before any sampling parameter, found it."""

    token: int
    logprob: float
    """Natural logarithm of its probability: the log-softmax of the raw logits in fp32."""
    top_logprobs: list[tuple[int, float]]
    """The most probable tokens with their logprob, most probable first, the lowest token id on a tie."""


def generate(
    model: Llama,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    max_new_tokens: int,
    seed: int,
    choice: int = 0,
    eos_id: int | None,
    n_top_logprobs: int = 0,
    use_cache: bool = True,
) -> Iterator[GeneratedToken]:
    """Yields the continuation of `prompt` token by token.

    Args:
        model: in eval mode; its weights decide device and dtype.
        prompt: at least one token.
        params: how each token is chosen.
        max_new_tokens: tokens to yield at most.
        seed: with `choice` and the index of the token in the output, decides each draw.
        choice: index of this continuation among several of one prompt and seed.
        eos_id: token after which the sequence ends; it is yielded too. None: never ends early.
        n_top_logprobs: length of each token's `top_logprobs`.
        use_cache: False computes all keys and values anew for every token: slow, and an oracle of the cache.

    Raises:
        ValueError: empty prompt, bad parameter, or no room in max_seq_len; raised by the call itself.
    """
    problems = params.problems()
    if not prompt:
        problems.append("the prompt is empty, expected at least one token: begin with the EOS token instead")
    room = room_left(len(prompt), model.config.max_seq_len)
    if not 1 <= max_new_tokens <= room:
        problems.append(
            f"max_new_tokens={max_new_tokens} must be at least 1 and at most {room}: model.max_seq_len is "
            f"{model.config.max_seq_len} and the prompt has {len(prompt)} tokens"
        )
    if problems:
        raise ValueError("; ".join(problems) + ".")
    return _generate(model, list(prompt), params, max_new_tokens, (seed, choice), eos_id, n_top_logprobs, use_cache)


def room_left(prompt_tokens: int, max_seq_len: int) -> int:
    """Returns how many tokens may follow a prompt: one where it fills the context, for the last is never fed back."""
    return 1 if prompt_tokens == max_seq_len else max(max_seq_len - prompt_tokens, 0)


def _generate(
    model: Llama,
    prompt: list[int],
    params: SamplingParams,
    max_new_tokens: int,
    seed_and_choice: tuple[int, int],
    eos_id: int | None,
    n_top_logprobs: int,
    use_cache: bool,
) -> Iterator[GeneratedToken]:
    weight = model.model.embed_tokens.weight
    cache = KVCache(model.config, 1, weight.dtype, weight.device) if use_cache else None
    output: list[int] = []
    new = prompt  # tokens that the model has not seen yet
    while len(output) < max_new_tokens:
        logits = _last_logits(model, new, cache)
        token = choose_token(logits, params, prompt, output, uniform(*seed_and_choice, len(output)))
        output.append(token)
        yield describe_token(logits, token, n_top_logprobs)
        if token == eos_id:
            return
        new = [token] if use_cache else prompt + output


@torch.inference_mode()
def _last_logits(model: Llama, tokens: list[int], cache: KVCache | None) -> Tensor:
    """Returns the logits (V,) after the last of `tokens`."""
    batch = torch.tensor([tokens], device=model.model.embed_tokens.weight.device)
    return model.logits(model.hidden(batch, cache)[0, -1])


def describe_token(logits: Tensor, token: int, n_top_logprobs: int) -> GeneratedToken:
    """Returns the token with its logprob and the `n_top_logprobs` most probable ones under `logits` (V,)."""
    logprobs = logits.float().log_softmax(0).cpu().numpy()
    top = [(int(index), float(logprobs[index])) for index in largest(logprobs, n_top_logprobs)]
    top.sort(key=lambda pair: (-pair[1], pair[0]))
    return GeneratedToken(token, float(logprobs[token]), top)
