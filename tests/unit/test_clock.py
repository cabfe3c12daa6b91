"""The clock of the machine is set back by an hour in the middle of a run: nothing that is counted goes backwards."""

import dataclasses
from pathlib import Path

import pytest

from rayjob.config import JobConfig
from rayjob.status import read_status, set_stage
from rayjob.training.metrics import MetricsRow, MetricsWriter, read_metrics
from rayjob.training.narration import progress_line

FIRST = MetricsRow(1, 0, 100, 3.0, 0.8, 1e-3, 50.0, None, 0.3, None, None, None, 0.01, 2.0, 1_000_000.0)


def test_no_eta_is_negative_and_no_time_is_lost_when_the_clock_is_set_back(tmp_path: Path) -> None:
    config = JobConfig(storage=str(tmp_path))
    set_stage(config, "train", 10)
    writer = MetricsWriter(config.run_folder, 0)
    for step in range(1, 7):
        jump_s = -3600 if step > 3 else 0
        row = dataclasses.replace(
            FIRST, step=step, tokens=100 * step, elapsed_s=2.0 * step, wall_time=1_000_000.0 + 2 * step + jump_s
        )
        writer.write(row)
        status = read_status(config)
        assert status["eta_s"] == (10 - step) * 100 / 50.0, "tokens left by tokens per second"
        assert status["elapsed_s"] == 2.0 * step
        assert f"eta {(10 - step) * 2}s" in progress_line(row, 10, 50.0)
    assert [row.step for row in read_metrics(config.run_folder)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("damage", [{"step": 0}, {"tokens_per_s": 0.0}])
def test_no_eta_is_made_of_a_damaged_row(tmp_path: Path, damage: dict[str, float]) -> None:
    config = JobConfig(storage=str(tmp_path))
    set_stage(config, "train", 10)
    MetricsWriter(config.run_folder, 0).write(dataclasses.replace(FIRST, **damage))
    assert read_status(config)["eta_s"] is None
