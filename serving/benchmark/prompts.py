"""Prompts of a wanted length in tokens for a server whose tokenizer is not known."""

import random
from collections.abc import Sequence

import aiohttp

from serving.benchmark.client import Measurement, Target, measure

WORDS = (
    "the a his her of and to in on at with from by for was had said went came saw took looked stood sat man woman "
    "house door window road river hill field night morning evening old young little great long white dark cold warm "
    "hand face eyes voice word letter table chair fire water wind rain stone tree garden horse town street church"
).split()


class BenchmarkError(RuntimeError):
    """The server cannot be measured; the message says why."""


async def make_prompts(target: Target, num_tokens: int, count: int, *, seed: int, timeout_s: float) -> list[str]:
    """Returns `count` different texts of about `num_tokens` tokens each, the same for the same seed.

    Two requests find out how many words that is.

    Raises:
        BenchmarkError: The server does not answer.
    """
    words = max(num_tokens // 8, 1)  # few enough for any tokenizer not to go beyond the context
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session:
        for _ in range(2):
            probe = await measure(session, _probing(target), text_of(words, seed))
            words = max(round(words * num_tokens / _prompt_tokens(probe, target)), 1)
    return [text_of(words, seed + number) for number in range(count)]


def text_of(num_words: int, seed: int) -> str:
    """Returns a text of so many common words."""
    return " ".join(random.Random(seed).choices(WORDS, k=num_words))


def fixed_prompts(lines: Sequence[str]) -> list[str]:
    """Returns the non-empty lines of a file."""
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise BenchmarkError("the file of prompts is empty: write one a line.")
    return prompts


def _probing(target: Target) -> Target:
    return Target(target.url, {**target.body, "max_tokens": 1}, target.api_key)


def _prompt_tokens(probe: Measurement, target: Target) -> int:
    if probe.problem is not None:
        raise BenchmarkError(f"{target.url}/completions answers {probe.problem}: is the server up, and is it this URL?")
    if not probe.prompt_tokens:
        raise BenchmarkError(f"{target.url} does not report prompt tokens: give --prompts FILE instead.")
    return probe.prompt_tokens
