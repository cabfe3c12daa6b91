"""Weights & Biases, when WANDB_API_KEY is set; an optional dependency: pip install wandb."""

import uuid
from collections.abc import Sequence
from typing import Any

from rayjob.atomic import write_atomically
from rayjob.config import JobConfig
from rayjob.config_file import flatten_tree, to_tree
from rayjob.training.metrics import MetricsRow
from rayjob.training.tracking import metrics_of

_RUN_ID_FILE = "wandb_run_id"
_EXIT_CODES = {"FINISHED": 0, "KILLED": 255, "FAILED": 1}


class WandbSink:
    """Implements `Sink`; one run across restarts, whose id stands in the run folder."""

    name = "wandb"

    def __init__(self, config: JobConfig) -> None:
        self._config = config
        self._run: Any = None

    def open(self) -> int:
        import wandb

        self._run = wandb.init(
            project=self._config.tracking.experiment,
            name=self._config.run_name,
            id=self._run_id(),
            resume="allow",
            config=flatten_tree(to_tree(self._config)),
            dir=str(self._config.run_folder),
        )
        return max(0, int(self._run.step) - 1)  # theirs is the step that comes next

    def _run_id(self) -> str:
        """Returns an id that no other storage's run of the same name has, the same at every start."""
        path = self._config.run_folder / _RUN_ID_FILE
        if not path.exists():
            write_atomically(path, uuid.uuid4().hex.encode())
        return path.read_text()

    def send(self, rows: Sequence[MetricsRow]) -> None:
        for row in rows:
            self._run.log(metrics_of(row), step=row.step)

    def close(self, status: str) -> None:
        self._run.finish(exit_code=_EXIT_CODES[status])
