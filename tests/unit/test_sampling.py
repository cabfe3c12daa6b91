"""Sampling against a slow reference that takes the documented order word by word."""

import math
import random
from collections import Counter

import pytest
import torch
from torch import Tensor

from model.sampling import NonFiniteLogits, SamplingParams, choose_token, largest, uniform
from tests.sampling_reference import random_logits, random_params, slow_distribution

NO_FILTER = SamplingParams(temperature=1.0, top_k=0, top_p=1.0)
GREEDY = SamplingParams(temperature=0.0)


def slow_choice(distribution: dict[int, float], number: float) -> tuple[int, float]:
    """The token that inverse CDF draws, and how near `number` is to a border between two tokens."""
    mass, choice, nearest = 0.0, -1, 1.0
    for token, probability in distribution.items():
        mass += probability
        nearest = min(nearest, abs(mass - number))
        if choice < 0 and mass > number:
            choice = token
    return choice, nearest


def test_1000_random_rows_equal_the_slow_reference() -> None:
    rng = random.Random(0)
    compared = 0
    for row in range(1000):
        logits, params = random_logits(rng, row), random_params(rng)
        prompt = [rng.randrange(len(logits)) for _ in range(rng.randrange(4))]
        output = [rng.randrange(len(logits)) for _ in range(rng.randrange(4))]
        number = rng.random()
        wanted, nearest = slow_choice(slow_distribution(logits, params, prompt, output), number)
        # Only penalties differ in rounding (fp32 here, fp64 there): a border within 1e-6 may fall either way.
        if nearest > 1e-6 or params.temperature < 1e-5:
            compared += 1
            assert choose_token(logits, params, prompt, output, number) == wanted, (row, params)
    assert compared > 990


@pytest.mark.parametrize("logits", [torch.randn(500), torch.randn(500) * 50, torch.tensor([0.0, 9.0, 9.0, 1.0])])
@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=1e-8),
        SamplingParams(top_p=1e-6),
        SamplingParams(top_k=1),
        SamplingParams(temperature=0.0, top_p=0.5, top_k=3),
        SamplingParams(min_p=1.0, top_p=1e-6),
    ],
)
@pytest.mark.parametrize("number", [0.0, 0.5, math.nextafter(1.0, 0.0)])
def test_every_way_to_say_greedy_takes_the_argmax_and_the_lowest_id_on_a_tie(
    logits: Tensor, params: SamplingParams, number: float
) -> None:
    assert choose_token(logits, params, [], [], number) == int(logits.argmax())


def test_off_values_change_nothing() -> None:
    logits = torch.randn(300)
    alike = [
        NO_FILTER,
        SamplingParams(1.0, -1, 1.0),
        SamplingParams(1.0, 300, 1.0),
        SamplingParams(1.0, 10**12, 1.0),
    ]
    for i in range(200):
        choices = {choose_token(logits, params, [1, 2], [3], i / 200) for params in alike}
        assert len(choices) == 1


def test_draws_follow_the_probabilities() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    draws = Counter(choose_token(logits, NO_FILTER, [], [], (i + 0.5) / 1000) for i in range(1000))
    assert draws == {0: 100, 1: 200, 2: 300, 3: 400}


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.39, {0}), (0.4, {0}), (0.41, {0, 1}), (0.7, {0, 1}), (0.71, {0, 1, 2}), (1.0, {0, 1, 2, 3})],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: set[int]) -> None:
    # 0.4, 0.3, 0.2, 0.1, a hair above so that rounding does not decide at the borders.
    logits = torch.tensor([0.400001, 0.300001, 0.2, 0.1]).log()
    params = SamplingParams(temperature=1.0, top_k=0, top_p=top_p)
    assert {choose_token(logits, params, [], [], i / 1000) for i in range(1000)} == kept


def test_top_k_keeps_exactly_k_and_the_lowest_ids_on_a_tie() -> None:
    logits = torch.tensor([0.0, 5.0, 1.0, 1.0, 1.0, -3.0])
    params = SamplingParams(temperature=2.0, top_k=3, top_p=1.0)
    assert {choose_token(logits, params, [], [], i / 1000) for i in range(1000)} == {1, 2, 3}


def test_min_p_compares_with_the_most_probable() -> None:
    logits = torch.tensor([0.5, 0.26, 0.24]).log()
    params = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.5)
    assert {choose_token(logits, params, [], [], i / 1000) for i in range(1000)} == {0, 1}


def test_repetition_penalty_counts_each_token_of_prompt_and_output_once() -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    logits = torch.tensor([4.0, 1.9, 1.0])
    assert choose_token(logits, params, [0, 0, 0], [], 0.0) == 0  # 4 / 2 = 2.0, not 4 / 8
    assert choose_token(logits, params, [0], [0, 1], 0.0) == 0  # still 2.0
    assert choose_token(torch.tensor([-1.0, -1.5]), params, [0], [], 0.0) == 1  # negative ones are multiplied


def test_frequency_and_presence_penalties_ignore_the_prompt() -> None:
    logits = torch.tensor([2.0, 1.0])
    frequency = SamplingParams(temperature=0.0, frequency_penalty=0.6)
    presence = SamplingParams(temperature=0.0, presence_penalty=1.1)
    assert choose_token(logits, frequency, [0, 0, 0], [0], 0.0) == 0  # 2 - 0.6
    assert choose_token(logits, frequency, [], [0, 0], 0.0) == 1  # 2 - 1.2
    assert choose_token(logits, presence, [0, 0, 0], [], 0.0) == 0
    assert choose_token(logits, presence, [], [0], 0.0) == 1  # 2 - 1.1


def test_the_logits_are_not_changed() -> None:
    logits = torch.randn(50)
    before = logits.clone()
    choose_token(logits, SamplingParams(1.0, 5, 0.9, 0.1, 1.5, 0.5, 0.5), [1, 2], [3, 3], 0.5)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [GREEDY, NO_FILTER])
def test_non_finite_logits_are_refused(bad: float, params: SamplingParams) -> None:
    with pytest.raises(NonFiniteLogits, match="logits"):
        choose_token(torch.tensor([0.0, bad, 1.0]), params, [], [], 0.5)


def test_logits_that_rule_out_everything_are_refused() -> None:
    with pytest.raises(NonFiniteLogits, match="no finite"):
        choose_token(torch.full((4,), -math.inf), NO_FILTER, [], [], 0.5)


def test_a_token_that_is_ruled_out_is_never_drawn() -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf])
    drawn = {choose_token(logits, NO_FILTER, [], [], number) for number in (0.0, 0.4, 0.6, math.nextafter(1.0, 0.0))}
    assert drawn == {1, 3}


def test_largest_is_exact_on_ties() -> None:
    values = torch.tensor([3.0, 1.0, 3.0, 3.0, 2.0]).numpy()
    assert [largest(values, n).tolist() for n in range(6)] == [
        [],
        [0],
        [0, 2],
        [0, 2, 3],
        [0, 2, 3, 4],
        [0, 1, 2, 3, 4],
    ]


def test_uniform_depends_on_all_three_arguments_alone() -> None:
    counters = [(seed, choice, position) for seed in (0, 1, 2**63 - 1) for choice in range(3) for position in range(50)]
    numbers = [uniform(*counter) for counter in counters]
    assert numbers == [uniform(*counter) for counter in counters]
    assert len(set(numbers)) == len(numbers)
    assert all(0.0 <= number < 1.0 for number in numbers)


def test_uniform_is_pinned() -> None:
    """The numbers are part of what a seed promises: they may not change between versions."""
    assert [uniform(0, 0, 0), uniform(7, 1, 2)] == [0.156742553465558, 0.5563929650887443]


def test_uniform_fills_the_unit_interval_evenly() -> None:
    counts = Counter(int(uniform(1, 0, position) * 10) for position in range(10_000))
    # 5 standard deviations of a bin's count, sqrt(10,000 * 0.1 * 0.9) = 30.
    assert all(abs(counts[i] - 1000) < 150 for i in range(10))


@pytest.mark.parametrize(
    ("field", "bad", "good"),
    [
        ("temperature", [-0.1, 2.1, math.nan, math.inf, True, "1"], [0, 0.0, 1e-8, 2]),
        ("top_k", [-2, 0.01, 5.0, True, "5"], [-1, 0, 1, 10**12]),
        ("top_p", [0, 0.0, -1, 1.5, math.nan], [1e-6, 1, 1.0]),
        ("min_p", [-0.1, 1.1], [0, 1]),
        ("repetition_penalty", [0, -1, 10.5, math.inf], [0.01, 1, 10]),
        ("frequency_penalty", [-2.1, 2.1], [-2, 2]),
        ("presence_penalty", [-2.1, 2.1, None], [-2, 2]),
    ],
)
def test_problems_name_the_field_out_of_range(field: str, bad: list[object], good: list[float]) -> None:
    for value in bad:
        (problem,) = SamplingParams(**{field: value}).problems()  # type: ignore[arg-type]
        assert problem.startswith(f"{field} must be")
        assert repr(value) in problem
    for number in good:
        assert SamplingParams(**{field: number}).problems() == []  # type: ignore[arg-type]
