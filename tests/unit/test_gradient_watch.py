"""Outliers of the gradient norm."""

import math
import random

from rayjob.training.gradient_watch import OUTLIER_Z, WINDOW, GradientWatch


def norms(n: int, seed: int = 0) -> list[float]:
    return [random.Random(seed + i).gauss(1.0, 0.1) for i in range(n)]


def test_a_norm_far_above_the_last_ones_is_an_outlier_and_a_usual_one_is_not() -> None:
    watch = GradientWatch(norms(WINDOW))
    usual, far = watch.score(1.1), watch.score(2.0)
    assert usual is not None
    assert far is not None
    assert usual < OUTLIER_Z < far


def test_too_few_or_equal_norms_score_nothing() -> None:
    assert GradientWatch(norms(5)).score(100.0) is None
    assert GradientWatch([1.0] * WINDOW).score(100.0) is None


def test_norm_that_is_not_finite_is_not_scored_and_not_remembered() -> None:
    watch = GradientWatch(norms(WINDOW))
    before = GradientWatch(norms(WINDOW)).score(1.0)
    assert watch.score(math.nan) is None
    assert watch.score(math.inf) is None
    assert watch.score(1.0) == before


def test_resumed_watch_scores_as_the_undisturbed_one() -> None:
    all_norms = norms(3 * WINDOW)
    undisturbed = GradientWatch([])
    scores = [undisturbed.score(norm) for norm in all_norms]
    resumed = GradientWatch(all_norms[:150])
    assert [resumed.score(norm) for norm in all_norms[150:]] == scores[150:]
