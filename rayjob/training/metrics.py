"""metrics.csv: one row per optimizer step, the record of the run that trackers and `status` read.

Rank 0 is the only writer. A row is written when its step ends; after a restart the rows beyond the checkpoint are cut
off, so no step stands in it twice. What they have cost is kept in spent.json.
"""

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

from rayjob.atomic import read_object, write_atomically

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.csv"
SPENT_FILE = "spent.json"


@dataclass(frozen=True, slots=True)
class MetricsRow:
    """Values after an update; None where a step has none."""

    step: int
    epoch: int
    tokens: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float
    mfu_pct: float | None
    data_wait_pct: float
    val_loss: float | None
    val_accuracy: float | None
    val_bits_per_byte: float | None
    cost_usd: float
    elapsed_s: float  # training time over all attempts
    wall_time: float  # seconds since 1970
    workers: int = 0
    windows: int = 0  # fingerprint of the windows of the step, the same however they are dealt to workers
    skipped: int = 0  # 1 where loss or gradient were not finite, so that nothing was updated
    grad_z: float | None = None  # deviations of grad_norm from the mean of the steps before
    micro_batch_size: int = 0  # windows per worker per forward
    data_s: float | None = None  # this and the next ones: how a step split up, in every tenth row, of the step before
    forward_s: float | None = None
    backward_s: float | None = None
    all_reduce_s: float | None = None
    optimizer_s: float | None = None
    logging_s: float | None = None

    def to_csv(self) -> str:
        # repr of a float is exact, so two runs can be compared bit for bit.
        values = (getattr(self, name) for name in COLUMNS)
        return ",".join("" if value is None else repr(value) for value in values) + "\n"


COLUMNS = tuple(field.name for field in fields(MetricsRow))
_INTEGERS = frozenset({"step", "epoch", "tokens", "workers", "windows", "skipped", "micro_batch_size"})


class MetricsWriter:
    """Appends rows to a run's metrics.csv; a row whose write failed can be written again.

    Args:
        run_folder: the run's folder.
        step: the step training resumes from; later rows are cut off.
    """

    def __init__(self, run_folder: Path, step: int) -> None:
        cut_metrics(run_folder, step)
        self._file = (run_folder / METRICS_FILE).open("r+b", buffering=0)
        self._size = os.fstat(self._file.fileno()).st_size

    def write(self, row: MetricsRow) -> None:
        rest = row.to_csv().encode()
        # At the known end, whatever a failed write left there: the file may have taken half a row before it was full.
        end = self._size
        while rest:
            written = os.pwrite(self._file.fileno(), rest, end)
            rest, end = rest[written:], end + written
        self._size = end

    def sync(self) -> None:
        """Makes the rows written so far survive a power loss."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def cut_metrics(run_folder: Path, step: int) -> None:
    """Leaves one row for each step up to `step`, and tells what is damaged or missing; makes the file if need be."""
    lines = list(_read_lines(run_folder))
    rows = [row for line in lines if (row := parse_line(line))]
    if n_damaged := sum(not line.startswith(COLUMNS[0]) for line in lines) - len(rows):
        logger.warning("%s had %d damaged rows; they were dropped.", run_folder / METRICS_FILE, n_damaged)
    kept = {row.step: row for row in reversed(rows) if 0 < row.step <= step}  # the first of a step
    if n_missing := step - len(kept):
        logger.warning(
            "%s lacks %d of its %d rows, the first of step %d. Weights and later rows do not depend on them.",
            *(run_folder / METRICS_FILE, n_missing, step, min(set(range(1, step + 1)) - kept.keys())),
        )
    if len(kept) < len(rows):  # before the cut: who cuts may be killed before there is a row that has paid for them
        write_atomically(run_folder / SPENT_FILE, json.dumps(read_spent(run_folder)._asdict()).encode())
    table = "".join(kept[step].to_csv() for step in sorted(kept))
    write_atomically(run_folder / METRICS_FILE, (",".join(COLUMNS) + "\n" + table).encode())


class Spent(NamedTuple):
    """What a run has taken so far; a lost step was paid for too."""

    elapsed_s: float
    cost_usd: float


def read_spent(run_folder: Path) -> Spent:
    """Returns what the run had taken at its newest row, rows that were cut off since included."""
    known = [Spent(row.elapsed_s, row.cost_usd) for row in read_metrics(run_folder)][-1:]
    return max([*known, _spent_on_cut_rows(run_folder)])


def _spent_on_cut_rows(run_folder: Path) -> Spent:
    spent = read_object(run_folder / SPENT_FILE)  # a damaged file only hides what lost steps have cost
    return Spent(spent.get("elapsed_s", 0.0), spent.get("cost_usd", 0.0))


def read_metrics(run_folder: Path) -> Iterator[MetricsRow]:
    """Yields the complete rows of a run's metrics.csv; none if there is no file."""
    yield from (row for line in _read_lines(run_folder) if (row := parse_line(line)))


def _read_lines(run_folder: Path) -> Iterator[str]:
    path = run_folder / METRICS_FILE
    if path.exists():
        with path.open(errors="replace") as file:
            yield from (line for line in file if line.endswith("\n"))


def parse_line(line: str) -> MetricsRow | None:
    """Returns the row of a line; None for the header and for one that is damaged.

    A system that went down may leave zeros where rows were, and they must not keep the run from starting.
    """
    cells = line.rstrip("\n").split(",")
    try:
        values = {
            name: None if cell == "" else (int if name in _INTEGERS else float)(cell)
            for name, cell in zip(COLUMNS, cells, strict=False)  # a run begun by an earlier version has fewer columns
        }
        return MetricsRow(**values)  # type: ignore[arg-type]
    except (ValueError, TypeError):
        return None
