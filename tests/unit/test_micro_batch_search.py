"""Which sizes are tried, on devices that are one line of arithmetic each."""

import logging
from collections.abc import Callable

import pytest

from rayjob.training.failure import StartRefusedError
from rayjob.training.micro_batch_search import Measured, doubling, largest_that_fits, search

SIZES = [1, 2, 4, 8, 16, 32, 96]


class Device:
    """A forward and backward of n windows takes `seconds(n)`; more than `room` windows are out of memory."""

    def __init__(self, seconds: Callable[[int], float], room: int = 1_000, trial_s: float = 1.0) -> None:
        self._seconds, self._room, self._trial_s = seconds, room, trial_s
        self.tried: list[int] = []

    def measure(self, size: int) -> Measured:
        self.tried.append(size)
        elapsed_s = self._trial_s * len(self.tried)
        return Measured(size, None if size > self._room else self._seconds(size), elapsed_s)

    def search(self, first: int, budget_s: float = 45.0) -> dict[int, float | None]:
        found = search(SIZES, first, self.measure, lambda size, seconds: 96 / size * seconds, budget_s)
        return {at.size: at.micro_step_s for at in found}


def test_sizes_at_least_double_from_the_smallest() -> None:
    assert doubling([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96]) == SIZES
    assert doubling([1, 3, 5, 15]) == [1, 3, 15]
    assert doubling([1]) == [1]


def test_device_that_gains_by_larger_ones_is_given_larger_ones_until_its_memory_ends() -> None:
    device = Device(lambda n: 0.1 + 0.01 * n, room=40)
    assert list(device.search(first=8)) == [8, 16, 32, 96]
    assert device.search(first=8)[96] is None


def test_search_goes_on_up_while_a_step_takes_no_longer() -> None:
    device = Device(lambda n: 0.01 * n)
    device.search(first=8)
    assert device.tried == [8, 16, 32, 96]


def test_device_that_loses_by_larger_ones_is_asked_for_smaller_ones_until_those_lose_too() -> None:
    best_at_4 = {1: 0.5, 2: 0.6, 4: 1.0, 8: 2.5, 16: 6.0, 32: 15.0, 96: 60.0}
    device = Device(lambda n: best_at_4[n])
    device.search(first=8)
    assert device.tried == [8, 16, 4, 2]


def test_out_of_memory_halves_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    device = Device(lambda n: 0.1 + 0.01 * n, room=10)
    with caplog.at_level(logging.WARNING):
        assert largest_that_fits([1, 2, 4, 6, 12, 24, 48], 48, device.measure).size == 6
    assert device.tried == [48, 24, 12, 6]
    assert "a micro-batch of 48 windows is out of memory: halved to 24" in caplog.text
    assert "12 windows is out of memory: halved to 6" in caplog.text


def test_larger_ones_are_not_tried_again_after_out_of_memory() -> None:
    device = Device(lambda n: 0.1 + 0.01 * n, room=4)
    device.search(first=8)
    assert device.tried == [8, 4, 2]


def test_model_of_which_no_window_fits_is_refused_with_what_to_do() -> None:
    with pytest.raises(StartRefusedError, match=r"1 windows is out of memory.*lower model\.max_seq_len"):
        Device(lambda n: 0.1, room=0).search(first=8)


@pytest.mark.parametrize(
    ("trial_s", "tried"),
    [
        (0.1, [8, 16, 32, 96]),
        (20.0, [8, 16]),  # compiling takes as long for any size
        (25.0, [8]),  # 25 + 25 > 45
    ],
)
def test_no_size_is_tried_that_would_probably_end_after_the_budget(trial_s: float, tried: list[int]) -> None:
    device = Device(lambda n: 0.1 + 0.001 * n, trial_s=trial_s)
    device.search(first=8, budget_s=45.0)
    assert device.tried == tried


def test_passes_grow_with_the_size_and_are_reckoned_with() -> None:
    # Two windows take 3.5 s; a trial of four would take the 14 s of the last one and four times 3.5 s more.
    slow = Device(lambda n: 1.5 + n, trial_s=14.0)
    slow.search(first=2, budget_s=41.9)
    assert slow.tried == [2, 1], "the smaller one takes no longer than the last"
    slow.tried.clear()
    slow.search(first=2, budget_s=42.1)
    assert slow.tried == [2, 4]
