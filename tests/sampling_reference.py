"""Sampling as the contract's words have it, in plain Python, and random rows to compare with it."""

import math
import random
from collections import Counter

import torch
from torch import Tensor

from model.sampling import SamplingParams


def slow_distribution(logits: Tensor, params: SamplingParams, prompt: list[int], output: list[int]) -> dict[int, float]:
    """The probability of each token that stays, in plain Python."""
    scores = {token: score for token, score in enumerate(logits.float().tolist())}
    for token in set(prompt) | set(output):
        factor = params.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token, count in Counter(output).items():
        scores[token] -= params.frequency_penalty * count + params.presence_penalty
    order = sorted(scores, key=lambda token: (-scores[token], token))
    if params.temperature < 1e-5:
        return {order[0]: 1.0}
    if params.top_k > 0:
        order = order[: params.top_k]
    top = scores[order[0]]
    weights = {token: math.exp((scores[token] - top) / params.temperature) for token in order}
    total = math.fsum(weights.values())
    if params.top_p < 1:
        kept, mass = [], 0.0
        for token in order:
            if kept and mass >= params.top_p * total:
                break
            kept.append(token)
            mass += weights[token]
        order = kept
    order = [token for token in order if weights[token] >= params.min_p * weights[order[0]]]
    total = math.fsum(weights[token] for token in order)
    return {token: weights[token] / total for token in sorted(order)}


def random_logits(rng: random.Random, row: int) -> Tensor:
    size = rng.choice([2, 5, 60, 300])
    logits = torch.randn(size, generator=torch.Generator().manual_seed(row)) * rng.choice([0.1, 1.0, 20.0])
    if row % 3 == 0:
        logits = logits.round()  # ties
    if row % 4 == 0:
        logits[torch.rand(size, generator=torch.Generator().manual_seed(row)) < 0.3] = -math.inf
        logits[rng.randrange(size)] = 1.0
    return logits.bfloat16() if row % 5 == 0 else logits


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 1e-8, 0.3, 1.0, 2.0]),
        top_k=rng.choice([-1, 0, 1, 3, 50, 10**12]),
        top_p=rng.choice([1e-6, 0.3, 0.9, 0.95, 1.0]),
        min_p=rng.choice([0.0, 0.0, 0.05, 0.5, 1.0]),
        repetition_penalty=rng.choice([1.0, 1.3, 0.5]),
        frequency_penalty=rng.choice([0.0, 0.5, -0.5]),
        presence_penalty=rng.choice([0.0, 1.0, -1.0]),
    )
