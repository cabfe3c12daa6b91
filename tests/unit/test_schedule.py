"""Which windows, epoch and learning rate belong to a step."""

import math
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayjob.config import OptimizerConfig
from rayjob.training.schedule import WindowOrder, deal, learning_rate


@given(n_windows=st.integers(1, 300), batch=st.integers(1, 40), epoch=st.integers(0, 3))
def test_every_window_comes_once_an_epoch(n_windows: int, batch: int, epoch: int) -> None:
    order = WindowOrder(n_windows, batch, seed=7)
    first = epoch * order.steps_per_epoch
    ids = np.concatenate([order.window_ids(first + i) for i in range(order.steps_per_epoch)])
    assert sorted(ids) == list(range(n_windows))


def test_epochs_have_different_orders_and_the_same_seed_the_same_one() -> None:
    order, again, other = WindowOrder(100, 10, 7), WindowOrder(100, 10, 7), WindowOrder(100, 10, 8)
    epochs = [np.concatenate([order.window_ids(10 * epoch + i) for i in range(10)]).tolist() for epoch in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert order.window_ids(13).tolist() == again.window_ids(13).tolist()
    assert order.window_ids(13).tolist() != other.window_ids(13).tolist()


def test_order_is_pinned_so_that_old_runs_can_be_resumed_by_new_code() -> None:
    assert WindowOrder(10, 10, seed=7).window_ids(0).tolist() == [6, 3, 4, 9, 0, 2, 8, 7, 5, 1]


def test_last_step_of_an_epoch_holds_what_is_left() -> None:
    order = WindowOrder(33, 16, seed=0)
    assert [len(order.window_ids(i)) for i in range(6)] == [16, 16, 1, 16, 16, 1]
    assert [order.windows_seen(step) for step in range(7)] == [0, 16, 32, 33, 49, 65, 66]
    assert [order.epoch(i) for i in range(6)] == [0, 0, 0, 1, 1, 1]


@given(
    n_ids=st.integers(1, 70),
    n_workers=st.integers(1, 8),
    micro_batch_size=st.integers(1, 9),
)
def test_dealing_gives_each_window_to_one_worker(n_ids: int, n_workers: int, micro_batch_size: int) -> None:
    ids = np.arange(n_ids)
    hands = [deal(ids, rank, n_workers, micro_batch_size) for rank in range(n_workers)]
    assert len({len(hand) for hand in hands}) == 1, "every worker must take part in every micro-step"
    assert sorted(np.concatenate([np.concatenate(hand) for hand in hands])) == list(ids)


def test_micro_batches_do_not_depend_on_the_number_of_workers() -> None:
    ids = np.arange(16)
    alone = [tuple(micro) for micro in deal(ids, 0, 1, 2)]
    by_four = {tuple(micro) for rank in range(4) for micro in deal(ids, rank, 4, 2)}
    assert set(alone) == by_four


def test_learning_rate_equals_the_documented_formula() -> None:
    config = OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=5)
    rates = [learning_rate(config, index, 40) for index in range(40)]
    assert rates[:5] == [0.2, 0.4, 0.6, 0.8, 1.0]
    for index in range(5, 40):
        cosine = math.cos(math.pi * (index + 1 - 5) / (40 - 5))
        assert rates[index] == pytest.approx(0.1 + 0.45 * (1 + cosine), rel=1e-12)
    assert rates[39] == pytest.approx(0.1, rel=1e-12)


def test_wsd_rises_stays_and_falls_in_a_straight_line() -> None:
    config = OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=5, schedule="wsd", decay_fraction=0.25)
    rates = [learning_rate(config, index, 40) for index in range(40)]
    assert rates[:5] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert rates[5:30] == [1.0] * 25
    assert rates[30:] == pytest.approx([1.0 - 0.09 * n for n in range(1, 11)])


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
@pytest.mark.parametrize(("warmup", "steps"), [(0, 10), (10, 10), (20, 10), (0, 1)])
def test_learning_rate_has_no_division_by_zero(warmup: int, steps: int, schedule: Literal["cosine", "wsd"]) -> None:
    config = OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=warmup, schedule=schedule)
    rates = [learning_rate(config, index, steps) for index in range(steps)]
    assert all(0 < rate <= 1.0 for rate in rates)
