"""From logits to one token: penalties, temperature, filters and a draw that (seed, choice, position) decide.

In this order:

1. fp32, and refuse NaN and +inf; -inf is a token that is ruled out.
2. Repetition penalty on each distinct token of prompt and output; frequency and presence on the output's.
3. Temperature 0: the argmax, the lowest token id on a tie. Otherwise divide by the temperature.
4. top-k: exactly k tokens stay, the lowest ids on a tie.
5. top-p: from the most probable down, a token stays while the mass before it is < p; the first always does.
6. min-p: a token stays if it has at least min_p times the probability of the most probable one.
7. Draw by inverse CDF over the tokens that stayed, in order of token id, with one uniform number.

It runs in numpy on the CPU, a row of 50,000 logits in well under a millisecond.

V vocab_size, C tokens that stay
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

FloatArray = NDArray[np.float32]

GREEDY_BELOW = 1e-5
"""Temperatures below it take the argmax as 0 does: only exact ties would be left to draw from."""


class NonFiniteLogits(ValueError):
    """The logits hold NaN or +inf, or rule every token out: the model, not the request, is at fault."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose a token; each field's "off" value leaves the distribution as it is."""

    temperature: float = 0.8  # 0 = greedy
    top_k: int = 50  # 0 or -1 = off
    top_p: float = 0.95  # 1 = off
    min_p: float = 0.0  # 0 = off
    repetition_penalty: float = 1.0  # 1 = off
    frequency_penalty: float = 0.0  # 0 = off
    presence_penalty: float = 0.0  # 0 = off

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is taken without a draw."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the scores."""
        return self.repetition_penalty != 1.0 or bool(self.frequency_penalty or self.presence_penalty)

    def problems(self) -> list[str]:
        """Returns a sentence for each field out of its range, which begins with the field's name."""
        problems = []
        for name, (wanted, low, high) in _RANGES.items():
            value = getattr(self, name)
            if not (_is_number(value) and low <= value <= high):
                problems.append(f"{name} must be {wanted}, got {value!r}")
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < -1:
            problems.append(f"top_k must be an integer of at least 1, or 0 or -1 for off, got {self.top_k!r}")
        return problems


_TINY = math.ulp(0.0)  # the least number above 0, for ranges that exclude it
_HIGHEST_SCORE = np.float32(1e38)  # far enough below the fp32 limit for differences to be finite
_RANGES = {
    "temperature": ("in [0, 2]", 0, 2),
    "top_p": ("in (0, 1]", _TINY, 1),
    "min_p": ("in [0, 1]", 0, 1),
    "repetition_penalty": ("in (0, 10]", _TINY, 10),
    "frequency_penalty": ("in [-2, 2]", -2, 2),
    "presence_penalty": ("in [-2, 2]", -2, 2),
}


def uniform(seed: int, choice: int, position: int) -> float:
    """Returns a number in [0, 1) that depends on the arguments alone.

    A hash of a counter instead of a generator's state: the same request draws the same numbers alone, among
    others, and after a restart.

    Args:
        seed: the request's seed, in [0, 2^63).
        choice: index of the continuation among the n of one request.
        position: index of the token in the output, from 0.
    """
    digest = hashlib.blake2b(struct.pack("<QQQ", seed, choice, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def choose_token(
    logits: Tensor,
    params: SamplingParams,
    prompt_tokens: Sequence[int],
    output_tokens: Sequence[int],
    uniform: float,
) -> int:
    """Returns the next token as the module's seven steps describe.

    Args:
        logits: (V,) of any dtype and device.
        params: within their ranges; see `SamplingParams.problems`.
        prompt_tokens: the prompt, for the repetition penalty.
        output_tokens: what was generated so far, for all penalties.
        uniform: in [0, 1), see `uniform`.

    Raises:
        NonFiniteLogits: the logits hold NaN or +inf, or nothing but -inf.
    """
    scores = _checked_scores(logits)
    scores = penalize(scores, params, prompt_tokens, output_tokens)
    if params.is_greedy:
        return int(scores.argmax())
    kept, weights = keep(scores, params)
    return int(kept[draw(weights, uniform)])


def _checked_scores(logits: Tensor) -> FloatArray:
    """Returns the logits as an fp32 array of its own (V,), or raises NonFiniteLogits."""
    scores: FloatArray = logits.detach().float().cpu().numpy()
    check_top_score(float(scores.max()))  # NaN if any entry is
    return scores


def check_top_score(top: float) -> None:
    """Raises NonFiniteLogits unless the greatest of the logits, which is NaN if any of them is, is finite."""
    if not math.isfinite(top):
        what = "no finite value" if top == -math.inf else "NaN or +inf"
        raise NonFiniteLogits(f"the logits hold {what}, expected finite numbers: the checkpoint is unsound.")


def penalize(
    scores: FloatArray,
    params: SamplingParams,
    prompt_tokens: Sequence[int],
    output_tokens: Sequence[int],
) -> FloatArray:
    """Returns the scores (V,) after the three penalties; the given ones are not touched."""
    if params.repetition_penalty != 1.0 and (prompt_tokens or output_tokens):
        scores = scores.copy()
        seen = np.unique(np.asarray([*prompt_tokens, *output_tokens], dtype=np.int64))
        penalty, before = np.float64(params.repetition_penalty), scores[seen]
        after = np.where(before > 0, before / penalty, before * penalty)
        # A penalty near 0 is beyond fp32: such a score is as high as one can be, and stays finite. -inf stays -inf.
        scores[seen] = np.minimum(after, _HIGHEST_SCORE)
    if (params.frequency_penalty or params.presence_penalty) and output_tokens:
        scores = scores.copy()
        seen, counts = np.unique(np.asarray(output_tokens, dtype=np.int64), return_counts=True)
        frequency, presence = np.float32(params.frequency_penalty), np.float32(params.presence_penalty)
        scores[seen] -= frequency * counts.astype(np.float32) + presence
    return scores


def keep(
    scores: FloatArray, params: SamplingParams, total: float | None = None
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Returns the indices (C,), ascending, of the scores that the filters keep, and their weights (C,).

    Args:
        scores: of all tokens, or of the most probable ones as far as the filters reach, in order of token id.
        params: with a temperature above 0.
        total: the sum of `weigh` over all tokens, where `scores` are not all of them and top-k is off.
    """
    kept = largest(scores, params.top_k) if params.top_k > 0 else np.arange(len(scores))
    weights = weigh(scores[kept], float(scores.max()), params.temperature)
    if params.top_p < 1.0:
        probable = largest(weights, _count_top_p(weights, params.top_p, total))
        kept, weights = kept[probable], weights[probable]
    if params.min_p > 0.0:
        probable = (weights >= params.min_p).nonzero()[0]  # the most probable token has the weight 1
        kept, weights = kept[probable], weights[probable]
    return kept, weights


def weigh(scores: FloatArray, top: float, temperature: float) -> NDArray[np.float64]:
    """Returns what the scores weigh beside the greatest of all, which weighs 1.

    In fp64 and from the largest score down: at a low temperature nothing overflows, the rest becomes 0.
    """
    return np.exp((scores.astype(np.float64) - top) / temperature)


def draw(weights: NDArray[np.float64], uniform: float) -> int:
    """Returns the index that inverse CDF over weights of any sum takes for a number in [0, 1)."""
    return draw_cumulative(weights.cumsum(), uniform)


def draw_cumulative(cumulative: NDArray[np.float64], uniform: float) -> int:
    """Returns what `draw` does, from the running sums of the weights."""
    index = int(cumulative.searchsorted(uniform * cumulative[-1], side="right"))
    # uniform * total may round up to the total, which no entry exceeds: then the last one with a weight.
    return min(index, int(cumulative.searchsorted(cumulative[-1], side="left")))


def largest(values: NDArray[Any], n: int) -> NDArray[np.int64]:
    """Returns the indices, ascending, of the n largest values, the lowest indices on a tie.

    By partition and comparison: a stable sort of a whole vocabulary would take a hundred times as long.
    """
    if n == 0:
        return np.empty(0, dtype=np.int64)
    if n >= len(values):
        return np.arange(len(values))
    smallest = np.partition(values, len(values) - n)[len(values) - n]
    above = (values > smallest).nonzero()[0]
    ties = (values == smallest).nonzero()[0][: n - len(above)]
    return np.sort(np.concatenate((above, ties)))


def _count_top_p(weights: NDArray[np.float64], top_p: float, total: float | None) -> int:
    """Returns how many tokens, from the most probable down, have less than top_p of the mass before them."""
    descending = np.sort(weights)[::-1]
    mass_after = descending.cumsum()
    mass_before = mass_after - descending
    return max(1, int((mass_before < top_p * (total or mass_after[-1])).sum()))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
