"""The first 50 steps of the shipped small configuration against committed numbers: real corpus, real Ray."""

from pathlib import Path

import pytest

from rayjob.corpus import demo
from rayjob.corpus.errors import CorpusError
from tests.golden.curve import make_curve, read_curve

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("local_ray")]

# Machines round the bf16 products differently, and Adam carries that on.
LOSS_TOLERANCE = 0.02


def test_first_steps_of_the_small_run_meet_the_golden_curve(tmp_path: Path) -> None:
    try:
        demo.fetch(tmp_path)
    except CorpusError as error:
        pytest.skip(str(error))
    golden = read_curve()
    curve = make_curve(tmp_path)
    assert [point.step for point in curve] == [point.step for point in golden] == list(range(1, 51))
    for point, wanted in zip(curve, golden, strict=True):
        assert point.loss == pytest.approx(wanted.loss, abs=LOSS_TOLERANCE), point
        assert point.grad_norm == pytest.approx(wanted.grad_norm, rel=0.2), point
    assert curve[-1].loss < curve[0].loss - 1.5, "it learns"
