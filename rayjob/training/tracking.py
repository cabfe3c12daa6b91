"""Sends a run's metrics, samples and artifacts to MLflow, TensorBoard and Weights & Biases, from the driver.

The workers only write files in the run folder; every tracker follows these files in a thread of its own. So a tracker
that is slow, away or broken delays no step: its rows wait in metrics.csv and are sent when it is back, or by the next
start. A note in the run folder says that there is something left to send.
"""

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rayjob.training.follow import MetricsTail, follow
from rayjob.training.metrics import MetricsRow

logger = logging.getLogger(__name__)

ROWS_PER_SEND = 64
_RETRY_S = 5.0
_FINISH_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 3.0  # a pod that is taken back has five seconds in all, and the next start sends the rest
_UNSENT_FILE = "unsent"

# Metric keys are `area/name_unit`, legal for every tracker.
METRIC_KEYS = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "epoch": "train/epoch",
    "tokens": "train/tokens",
    "tokens_per_s": "speed/tokens_per_s",
    "mfu_pct": "speed/mfu_pct",
    "data_wait_pct": "speed/data_wait_pct",
    "micro_batch_size": "speed/micro_batch_size",
    "data_s": "time/data_s",
    "forward_s": "time/forward_s",
    "backward_s": "time/backward_s",
    "all_reduce_s": "time/all_reduce_s",
    "optimizer_s": "time/optimizer_s",
    "logging_s": "time/logging_s",
    "val_loss": "val/loss",
    "val_accuracy": "val/accuracy",
    "val_bits_per_byte": "val/bits_per_byte",
    "cost_usd": "cost/usd",
}


def is_behind(run_folder: Path) -> bool:
    """Whether a tracker has not got all of a run, so that another start has something to send."""
    return (run_folder / _UNSENT_FILE).exists()


def metrics_of(row: MetricsRow) -> dict[str, float]:
    """Returns {metric key: value} of what a row has."""
    return {key: value for name, key in METRIC_KEYS.items() if (value := getattr(row, name)) is not None}


class Sink(Protocol):
    """One tracker. Every method may raise: then all begins again with `open`."""

    name: str

    def open(self) -> int:
        """Connects, and returns the last step that the tracker already has."""

    def send(self, rows: Sequence[MetricsRow]) -> None:
        """Sends rows and what belongs to their steps; at most ROWS_PER_SEND rows."""

    def close(self, status: str) -> None:
        """Ends the attempt; `status` is MLflow's: FINISHED, KILLED or FAILED."""


class Tracking:
    """Runs every sink in a thread of its own, from start to `finish`."""

    def __init__(self, run_folder: Path, sinks: Sequence[Sink]) -> None:
        self._ended, self._abandoned = threading.Event(), threading.Event()
        self._status = "FINISHED"
        self._unsent = run_folder / _UNSENT_FILE
        self._unsent.touch()
        self._threads = [
            threading.Thread(target=self._run, args=(run_folder, sink), name=sink.name, daemon=True) for sink in sinks
        ]
        for thread in self._threads:
            thread.start()

    def finish(self, status: str) -> None:
        """Sends what is left and closes the sinks; gives up on a tracker that stays away."""
        self._status = status
        self._ended.set()
        deadline_s = time.monotonic() + (_FINISH_TIMEOUT_S if status == "FINISHED" else _STOP_TIMEOUT_S)
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        self._abandoned.set()
        late = [thread.name for thread in self._threads if thread.is_alive()]
        if not late:
            self._unsent.unlink(missing_ok=True)
            return
        names = " and ".join(late)
        logger.warning("%s did not take everything: the same command sends the rest, once it is back.", names)

    def _run(self, run_folder: Path, sink: Sink) -> None:
        is_away = False
        while not self._abandoned.is_set():
            try:
                tail = MetricsTail(run_folder, sink.open())
                for rows in follow(tail, self._ended):
                    for begin in range(0, len(rows), ROWS_PER_SEND):
                        sink.send(rows[begin : begin + ROWS_PER_SEND])
                    if is_away:
                        logger.warning("%s is back, and has every step up to %d.", sink.name, rows[-1].step)
                        is_away = False
                sink.close(self._status)
            except Exception as error:  # a tracker's fault of any kind must not reach the run
                if not is_away:
                    logger.warning("%s: %s Training goes on; it is tried again.", sink.name, _in_brief(error))
                is_away = True
                self._abandoned.wait(_RETRY_S)
            else:
                return


def _in_brief(error: Exception) -> str:
    """Returns an error in one line: those of HTTP clients carry whole stacks of others."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else text[:300] + " …"
