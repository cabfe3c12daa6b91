"""Sends a run's metrics, samples and artifacts to MLflow, TensorBoard and Weights & Biases, from the driver.

The workers only write files in the run folder; every tracker follows these files in a thread of its own. So a tracker
that is slow, away or broken delays no step: its rows wait in metrics.csv and are sent when it is back.
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
_STOP_TIMEOUT_S = 10.0  # who asked for a stop kills what takes long

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
    "val_loss": "val/loss",
    "val_accuracy": "val/accuracy",
    "val_bits_per_byte": "val/bits_per_byte",
    "cost_usd": "cost/usd",
}


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
            if thread.is_alive():
                logger.warning("%s did not take everything; the rest is sent by the next start.", thread.name)
        self._abandoned.set()

    def _run(self, run_folder: Path, sink: Sink) -> None:
        was_away = False
        while not self._abandoned.is_set():
            try:
                tail = MetricsTail(run_folder, sink.open())
                for rows in follow(tail, self._ended):
                    for begin in range(0, len(rows), ROWS_PER_SEND):
                        sink.send(rows[begin : begin + ROWS_PER_SEND])
                sink.close(self._status)
            except Exception as error:  # a tracker's fault of any kind must not reach the run
                if not was_away:
                    logger.warning("%s: %s Training goes on; it is tried again.", sink.name, error)
                was_away = True
                self._abandoned.wait(_RETRY_S)
            else:
                return
