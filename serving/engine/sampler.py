"""One token for each row of a batch: the same choice as `model.sampling`, without sorting whole vocabularies.

1. One log-softmax over all rows: the logprobs of the answer, and NaN throughout a row that is not finite.
2. Penalties, on the rows that have them.
3. The argmax of greedy rows at once, and the most probable `NUM_CANDIDATES` tokens of the filtered ones. Where a
   row's filters keep fewer, `model.sampling` decides among these as it would among all.
4. Rows without top-k: the sum of all weights, which top-p needs, or their running sums, which a draw from the whole
   distribution needs, in fp64.
5. A row whose filters reach beyond its candidates, or to a tie at their end, is decided over the whole vocabulary.

Whatever one row raises is its own result. A row's result does not depend on the other rows.

B rows, V vocab_size, C candidates, F rows without top-k
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.generate import GeneratedToken
from model.sampling import (
    FloatArray,
    SamplingParams,
    check_top_score,
    choose_token,
    draw,
    draw_cumulative,
    keep,
    largest,
    penalize,
)

NUM_CANDIDATES = 128
"""Above the usual top_k of 50; a larger top_k, or a top_p that reaches farther, takes the slow way."""


@dataclass(frozen=True, slots=True)
class Draw:
    """What decides the next token of one row besides its logits; `uniform` is in [0, 1)."""

    params: SamplingParams
    prompt: Sequence[int]
    output: Sequence[int]
    uniform: float
    n_top_logprobs: int = 0

    @property
    def takes_whole_sum(self) -> bool:
        """Whether the weights of all tokens matter, and not only those of the most probable ones."""
        return not self.params.is_greedy and self.params.top_k <= 0

    @property
    def is_unfiltered(self) -> bool:
        """Whether the token is drawn from all but those that min-p leaves out."""
        return self.takes_whole_sum and self.params.top_p == 1.0

    @property
    def takes_candidates(self) -> bool:
        """Whether the token is drawn from the most probable ones."""
        return not self.params.is_greedy and not self.is_unfiltered


@torch.inference_mode()
def sample(logits: Tensor, draws: Sequence[Draw]) -> list[GeneratedToken | Exception]:
    """Returns the next token of each row, or what went wrong in it.

    Args:
        logits: (B, V) of any dtype and device.
        draws: B of them.
    """
    raw = logits.float()
    logprobs = raw.log_softmax(1)
    batch = _Batch(_penalize_rows(raw, draws), draws)
    chosen = [_attempt(batch, row) for row in range(len(draws))]
    tokens = torch.tensor([0 if isinstance(token, Exception) else token for token in chosen], device=raw.device)
    own = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
    top = _top_of_rows(logprobs, [draw.n_top_logprobs for draw in draws])
    return [
        token if isinstance(token, Exception) else GeneratedToken(token, own[row], top[row])
        for row, token in enumerate(chosen)
    ]


def top_logprobs(logprobs: Tensor, n: int) -> list[list[tuple[int, float]]]:
    """Returns the n most probable tokens of each row of (B, V), best first, the lowest token id on a tie."""
    if n == 0 or not len(logprobs):
        return [[] for _ in range(len(logprobs))]
    values, tokens = logprobs.topk(min(n + 1, logprobs.shape[1]), dim=1)
    return [
        _sorted_top(row_values, row_tokens, logprobs[row], n)
        for row, (row_values, row_tokens) in enumerate(zip(values.tolist(), tokens.tolist(), strict=True))
    ]


def _sorted_top(values: list[float], tokens: list[int], logprobs: Tensor, n: int) -> list[tuple[int, float]]:
    if len(values) > n and values[n - 1] == values[n]:  # a tie across the end: topk takes any of the tied
        whole = logprobs.cpu().numpy()
        tokens = largest(whole, n).tolist()
        values = whole[tokens].tolist()
    pairs = list(zip(tokens, values, strict=True))[:n]
    return sorted(pairs, key=lambda pair: (-pair[1], pair[0]))


def _top_of_rows(logprobs: Tensor, counts: Sequence[int]) -> list[list[tuple[int, float]]]:
    """Returns each row's own number of most probable tokens."""
    top: list[list[tuple[int, float]]] = [[] for _ in counts]
    rows = [row for row, n in enumerate(counts) if n]
    if rows:
        of_rows = top_logprobs(logprobs[rows], max(counts))
        for row, pairs in zip(rows, of_rows, strict=True):
            top[row] = pairs[: counts[row]]
    return top


def _penalize_rows(raw: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Returns the scores (B, V) after penalties; the logits themselves where no row has any."""
    rows = [row for row, draw in enumerate(draws) if draw.params.has_penalties]
    if not rows:
        return raw
    scores = raw.clone()
    for row in rows:
        one = draws[row]
        penalized = penalize(raw[row].cpu().numpy(), one.params, one.prompt, one.output)
        scores[row] = torch.from_numpy(penalized)
    return scores


class _Batch:
    """The scores of all rows with what is found for many of them at once."""

    def __init__(self, scores: Tensor, draws: Sequence[Draw]) -> None:
        self._scores = scores  # (B, V)
        self._draws = draws
        self._top: list[float] = scores.amax(1).tolist()  # NaN if any score of the row is
        self._highest = _highest_of_rows(scores, [row for row, draw in enumerate(draws) if draw.params.is_greedy])
        self._candidates = self._find_candidates([row for row, draw in enumerate(draws) if draw.takes_candidates])
        self._cumulative = self._sum_weights([row for row, draw in enumerate(draws) if draw.takes_whole_sum])

    def choose(self, row: int) -> int:
        """Returns the next token of a row.

        Raises:
            NonFiniteLogits: the row holds NaN or +inf, or nothing but -inf.
        """
        one = self._draws[row]
        check_top_score(self._top[row])
        if one.params.is_greedy:
            return self._highest[row]
        if one.is_unfiltered:
            return draw_cumulative(self._cumulative[row], one.uniform)
        token = self._choose_candidate(row, one, *self._candidates[row])
        return self._choose_of_all(row, one) if token is None else token

    def _choose_candidate(self, row: int, one: Draw, values: FloatArray, candidates: NDArray[np.int64]) -> int | None:
        """Returns the token if the candidates, most probable first, are sure to hold all that the filters keep."""
        is_whole = len(values) == self._scores.shape[1]
        if one.params.top_k > 0 and not is_whole and values[min(one.params.top_k, len(values)) - 1] == values[-1]:
            return None
        in_order = candidates.argsort()
        tokens, scores = candidates[in_order], values[in_order]
        total = float(self._cumulative[row][-1]) if one.takes_whole_sum else None
        kept, weights = keep(scores, one.params, total)
        if one.takes_whole_sum and not is_whole and scores[kept].min() == values[-1]:
            return None
        return int(tokens[kept[draw(weights, one.uniform)]])

    def _find_candidates(self, rows: Sequence[int]) -> dict[int, tuple[FloatArray, NDArray[np.int64]]]:
        """Returns scores, descending, and ids of the most probable tokens (C,) of some rows."""
        if not rows:
            return {}
        scores = self._scores if len(rows) == len(self._scores) else self._scores[list(rows)]
        values, tokens = scores.topk(min(NUM_CANDIDATES, scores.shape[1]), dim=1)
        return dict(zip(rows, zip(values.cpu().numpy(), tokens.cpu().numpy(), strict=True), strict=True))

    def _choose_of_all(self, row: int, one: Draw) -> int:
        # Penalties are in the scores already: without them in the parameters they are not applied twice.
        params = SamplingParams(one.params.temperature, one.params.top_k, one.params.top_p, one.params.min_p)
        return choose_token(self._scores[row], params, (), (), one.uniform)

    def _sum_weights(self, rows: Sequence[int]) -> dict[int, NDArray[np.float64]]:
        """Returns the running sums (V,) of the weights that min-p keeps, in order of token id, of some rows."""
        if not rows:
            return {}
        scores = self._scores[list(rows)].double()  # (F, V)
        params = [self._draws[row].params for row in rows]
        temperatures = scores.new_tensor([one.temperature for one in params])[:, None]
        weights = scores.sub_(scores.amax(1, keepdim=True)).div_(temperatures).exp_()
        # With top-p, which comes first, the sum of all is wanted.
        least = scores.new_tensor([one.min_p if one.top_p == 1.0 else 0.0 for one in params])[:, None]
        weights.masked_fill_(weights < least, 0.0)
        return dict(zip(rows, weights.cumsum(1).cpu().numpy(), strict=True))


def _highest_of_rows(scores: Tensor, rows: Sequence[int]) -> dict[int, int]:
    """Returns the token with the highest score of some rows, the lowest id on a tie."""
    if not rows:
        return {}
    of_rows = scores if len(rows) == len(scores) else scores[list(rows)]
    # On a CPU numpy takes a tenth of torch's time.
    highest = of_rows.numpy().argmax(1) if of_rows.is_cpu else of_rows.argmax(1)
    return dict(zip(rows, highest.tolist(), strict=True))


def _attempt(batch: _Batch, row: int) -> int | Exception:
    try:
        return batch.choose(row)
    except torch.AcceleratorError:
        raise  # nobody gets a token from a device that has failed
    except Exception as error:
        # A row's fault is its own: the others of the batch get their tokens.
        return error
