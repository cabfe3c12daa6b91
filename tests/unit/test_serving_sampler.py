"""The batched sampler against `model.sampling` row by row, and against a written-out distribution."""

import math
import random
from collections import Counter

import pytest
import torch
from torch import Tensor

from model.generate import describe_token
from model.sampling import NonFiniteLogits, SamplingParams, choose_token, uniform
from serving.engine import sampler
from serving.engine.sampler import Draw, sample, top_logprobs
from tests.sampling_reference import random_params, slow_distribution

VOCAB_SIZE = 1000
NO_FILTER = SamplingParams(temperature=1.0, top_k=0, top_p=1.0)


def random_rows(rng: random.Random, n_rows: int) -> Tensor:
    """Logits (B, V) with ties, ruled-out tokens, flat and peaked rows."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    logits = torch.randn(n_rows, VOCAB_SIZE, generator=generator)
    for row in range(n_rows):
        logits[row] *= rng.choice([0.01, 1.0, 3.0, 20.0])
        if rng.random() < 0.3:
            logits[row] = logits[row].round()
        if rng.random() < 0.2:
            logits[row, torch.rand(VOCAB_SIZE, generator=generator) < rng.choice([0.3, 0.95])] = -math.inf
            logits[row, rng.randrange(VOCAB_SIZE)] = 1.0
    return logits


def random_draw(rng: random.Random) -> Draw:
    history = [rng.randrange(VOCAB_SIZE) for _ in range(12)]
    cut = rng.randrange(12)
    return Draw(random_params(rng), history[:cut], history[cut:], rng.random(), rng.choice([0, 0, 1, 20]))


def test_1000_rows_of_random_batches_equal_the_choice_of_one_row() -> None:
    rng = random.Random(0)
    for n_rows in [1, 2, 7, 64] * 14:
        logits = random_rows(rng, n_rows)
        draws = [random_draw(rng) for _ in range(n_rows)]
        for row, (one, picked) in enumerate(zip(draws, sample(logits, draws), strict=True)):
            token = choose_token(logits[row], one.params, one.prompt, one.output, one.uniform)
            assert picked == describe_token(logits[row], token, one.n_top_logprobs), (row, one)


@pytest.mark.parametrize("n_candidates", [3, 40])
def test_few_candidates_change_nothing_but_the_time(monkeypatch: pytest.MonkeyPatch, n_candidates: int) -> None:
    rng = random.Random(1)
    logits, draws = random_rows(rng, 300), [random_draw(rng) for _ in range(300)]
    wanted = sample(logits, draws)
    monkeypatch.setattr(sampler, "NUM_CANDIDATES", n_candidates)
    assert sample(logits, draws) == wanted


def test_a_row_that_is_not_finite_fails_alone() -> None:
    rng = random.Random(2)
    logits, draws = random_rows(rng, 8), [random_draw(rng) for _ in range(8)]
    wanted = sample(logits, draws)
    logits[1, 5], logits[3, 0], logits[6] = math.nan, math.inf, -math.inf
    for row, picked in enumerate(sample(logits, draws)):
        if row in (1, 3, 6):
            assert isinstance(picked, NonFiniteLogits)
        else:
            assert picked == wanted[row]


def test_what_one_row_raises_is_its_own_result() -> None:
    rng = random.Random(3)
    logits, draws = random_rows(rng, 4), [random_draw(rng) for _ in range(4)]
    wanted = sample(logits, draws)
    draws[2] = Draw(SamplingParams(top_p="most"), (), (), 0.5)  # type: ignore[arg-type]
    picked = sample(logits, draws)
    assert isinstance(picked[2], Exception)
    assert [picked[row] for row in (0, 1, 3)] == [wanted[row] for row in (0, 1, 3)]


def test_rows_are_their_own_whatever_stands_beside_them() -> None:
    rng = random.Random(4)
    logits, draws = random_rows(rng, 64), [random_draw(rng) for _ in range(64)]
    together = sample(logits, draws)
    for rows in ([0], [63], [5, 3], list(range(10, 40))):
        assert sample(logits[rows], [draws[row] for row in rows]) == [together[row] for row in rows]


def test_logits_are_not_changed() -> None:
    rng = random.Random(5)
    logits, draws = random_rows(rng, 30), [random_draw(rng) for _ in range(30)]
    before = logits.clone()
    sample(logits, draws)
    assert torch.equal(logits, before)


def test_top_logprobs_take_the_lowest_id_on_a_tie() -> None:
    rows = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0], [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]])
    assert top_logprobs(rows, 3) == [[(1, 2.0), (3, 2.0), (2, 1.0)], [(0, 5.0), (1, 4.0), (2, 3.0)]]
    assert top_logprobs(rows, 0) == [[], []]


FILTERS = {
    "none": NO_FILTER,
    "temperature": SamplingParams(temperature=0.6, top_k=0, top_p=1.0),
    "top_k": SamplingParams(temperature=1.0, top_k=20, top_p=1.0),
    "top_p": SamplingParams(temperature=1.0, top_k=0, top_p=0.8),
    "min_p": SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.05),
    "repetition": SamplingParams(temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.5),
    "frequency": SamplingParams(temperature=1.0, top_k=0, top_p=1.0, frequency_penalty=0.7),
    "presence": SamplingParams(temperature=1.0, top_k=0, top_p=1.0, presence_penalty=0.7),
    "all": SamplingParams(1.3, 60, 0.9, 0.02, 1.2, 0.3, 0.2),
}


@pytest.mark.parametrize("name", FILTERS)
def test_20000_draws_follow_the_written_out_distribution(name: str) -> None:
    params = FILTERS[name]
    logits = torch.randn(300, generator=torch.Generator().manual_seed(7)) * 2
    prompt, output = [int(logits.argmax()), 5, 6], [int(logits.topk(2).indices[1]), 7, 7]
    rows = logits.expand(100, -1)
    counts: Counter[int] = Counter()
    for seed in range(200):
        draws = [Draw(params, prompt, output, uniform(seed, 0, position)) for position in range(100)]
        counts.update(picked.token for picked in sample(rows, draws))  # type: ignore[union-attr]
    wanted = slow_distribution(logits, params, prompt, output)
    assert set(counts) <= set(wanted)
    statistic, degrees = chi_square(counts, wanted, 20_000)
    # The value that chance exceeds once in 10^6, by Wilson and Hilferty; the seeds are fixed, so it never does.
    limit = degrees * (1 - 2 / (9 * degrees) + 4.75 * math.sqrt(2 / (9 * degrees))) ** 3
    assert statistic < limit
    assert degrees >= 8


def chi_square(counts: Counter[int], wanted: dict[int, float], n_draws: int) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; bins of fewer than 5 expected draws are put together."""
    bins = [(counts[token], probability * n_draws) for token, probability in wanted.items()]
    large = [pair for pair in bins if pair[1] >= 5]
    small = [pair for pair in bins if pair[1] < 5]
    rest = [(sum(found for found, _ in small), math.fsum(expected for _, expected in small))]
    used = large + [pair for pair in rest if pair[1] >= 5]
    return math.fsum((found - expected) ** 2 / expected for found, expected in used), len(used) - 1
