"""Follows a run's metrics.csv as it grows, across worker restarts that cut it back."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

from rayjob.training.metrics import METRICS_FILE, MetricsRow, parse_line

_POLL_S = 0.5


class MetricsTail:
    """New rows of a run's metrics.csv, each step once.

    A step done again after a restart has the row that it had before, so rows up to the last one seen are passed over.

    Args:
        run_folder: the run's folder.
        step: the last step already seen.
    """

    def __init__(self, run_folder: Path, step: int) -> None:
        self._path = run_folder / METRICS_FILE
        self._step = step
        self._inode, self._offset = 0, 0

    def new_rows(self) -> list[MetricsRow]:
        """Returns the rows that came since the last call."""
        rows = [row for row in self._read() if row.step > self._step]
        if rows:
            self._step = rows[-1].step
        return rows

    def _read(self) -> list[MetricsRow]:
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return []
        with file:
            found = os.fstat(file.fileno())
            if found.st_ino != self._inode or found.st_size < self._offset:
                self._inode, self._offset = found.st_ino, 0  # replaced when a restart cut it back
            file.seek(self._offset)
            complete, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(complete) + len(newline)
        lines = complete.decode(errors="replace").splitlines()
        return [row for line in lines if (row := parse_line(line))]


def follow(tail: MetricsTail, ended: threading.Event) -> Iterator[list[MetricsRow]]:
    """Yields new rows until `ended` is set and the last ones are read."""
    while True:
        is_last_look = ended.wait(_POLL_S)
        if rows := tail.new_rows():
            yield rows
        if is_last_look:
            return
