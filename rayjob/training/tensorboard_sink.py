"""TensorBoard: event files in the run folder, derived from metrics.csv."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from rayjob.training.metrics import MetricsRow
from rayjob.training.sample import SAMPLES_FOLDER
from rayjob.training.tracking import metrics_of


class TensorboardSink:
    """Implements `Sink`. Made anew at each start, so no step stands in it twice."""

    name = "tensorboard"

    def __init__(self, run_folder: Path) -> None:
        self._run_folder = run_folder

    def open(self) -> int:
        folder = self._run_folder / "tensorboard"
        shutil.rmtree(folder, ignore_errors=True)
        self._writer = SummaryWriter(str(folder))
        return 0

    def send(self, rows: Sequence[MetricsRow]) -> None:
        for row in rows:
            for key, value in metrics_of(row).items():
                self._writer.add_scalar(key, value, row.step, walltime=row.wall_time)
            sample = self._run_folder / SAMPLES_FOLDER / f"step_{row.step:08d}.txt"
            if sample.exists():
                self._writer.add_text("sample", sample.read_text(encoding="utf-8"), row.step)
        self._writer.flush()

    def close(self, status: str) -> None:
        self._writer.close()
