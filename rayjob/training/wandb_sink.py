"""Weights & Biases, when WANDB_API_KEY is set; an optional dependency: pip install wandb."""

from collections.abc import Sequence
from typing import Any

from rayjob.config import JobConfig
from rayjob.config_file import flatten_tree, to_tree
from rayjob.training.metrics import MetricsRow
from rayjob.training.tracking import metrics_of

_EXIT_CODES = {"FINISHED": 0, "KILLED": 255, "FAILED": 1}


class WandbSink:
    """Implements `Sink`; one run named by its run_name across restarts."""

    name = "wandb"

    def __init__(self, config: JobConfig) -> None:
        self._config = config
        self._run: Any = None

    def open(self) -> int:
        import wandb

        self._run = wandb.init(
            project=self._config.tracking.experiment,
            name=self._config.run_name,
            id=self._config.run_name,
            resume="allow",
            config=flatten_tree(to_tree(self._config)),
            dir=str(self._config.run_folder),
        )
        return int(self._run.step)

    def send(self, rows: Sequence[MetricsRow]) -> None:
        for row in rows:
            self._run.log(metrics_of(row), step=row.step)

    def close(self, status: str) -> None:
        self._run.finish(exit_code=_EXIT_CODES[status])
