"""From measurements to percentiles and rates."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from serving.benchmark.client import Measurement
from serving.benchmark.load import Outcome

PERCENTILES = (50, 95, 99)


def summarize(outcome: Outcome) -> dict[str, Any]:
    """Returns one point of the benchmark as a JSON object; times in ms, tokens/s of all answered requests."""
    answered = [one for one in outcome.measurements if one.problem is None]
    problems = Counter(one.problem for one in outcome.measurements if one.problem is not None)
    tokens = sum(one.completion_tokens for one in answered)
    return {
        outcome.load.kind: outcome.load.value,
        "requests": len(outcome.measurements),
        "answered": len(answered),
        "problems": dict(problems),
        "elapsed_s": round(outcome.elapsed_s, 3),
        "prompt_tokens_mean": _mean(answered, lambda one: one.prompt_tokens),
        "completion_tokens_mean": _mean(answered, lambda one: one.completion_tokens),
        "tokens_per_s": round(tokens / outcome.elapsed_s, 1),
        "requests_per_s": round(len(answered) / outcome.elapsed_s, 2),
        "ttft_ms": _percentiles(answered, lambda one: one.ttft_s),
        "tpot_ms": _percentiles(answered, lambda one: one.tpot_s),
        "e2e_ms": _percentiles(answered, lambda one: one.e2e_s),
    }


def _percentiles(
    measurements: Sequence[Measurement], seconds: Callable[[Measurement], float | None]
) -> dict[str, float]:
    values = [value for one in measurements if (value := seconds(one)) is not None]
    if not values:
        return {}
    found = np.percentile(np.array(values) * 1000, PERCENTILES)
    return {f"p{percent}": round(float(value), 2) for percent, value in zip(PERCENTILES, found, strict=True)}


def _mean(measurements: Sequence[Measurement], tokens: Callable[[Measurement], int]) -> float:
    return round(sum(map(tokens, measurements)) / max(len(measurements), 1), 1)
