"""Killing parts of a run at chosen moments, and comparing what it ends as with the run that nothing happened to.

A moment is made sure of: the process is stopped first (SIGSTOP), then it is looked whether the moment is the one that
was meant, and only then it is killed. If the moment has passed, it goes on, and the next one is taken.
"""

import contextlib
import csv
import dataclasses
import itertools
import signal
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import psutil

from model.checkpoint import list_checkpoints, load_model, load_trainer_state
from rayjob.training.attempt import STARTS_FILE
from rayjob.training.metrics import METRICS_FILE, MetricsRow, parse_line, read_metrics
from rayjob.training.step_clock import StepSplit

# What two runs of the same numbers may differ in: when and how fast, and so for how much.
INCIDENTAL = {"wall_time", "elapsed_s", "tokens_per_s", "mfu_pct", "data_wait_pct", "cost_usd"} | {
    field.name for field in dataclasses.fields(StepSplit)
}
LIMIT_S = 240.0
POLL_S = 0.004


class Parts:
    """The processes of one run, found among those of its own cluster only.

    Args:
        members: returns the cluster's processes of this moment, whatever they are.
        run_folder: of the run.
    """

    def __init__(self, members: Callable[[], Sequence[psutil.Process]], run_folder: Path) -> None:
        self.members = members
        self.run_folder = run_folder

    def named(self, words: str) -> list[psutil.Process]:
        """Returns the processes with these words in their command line."""
        return [process for process in self.members() if words in _command(process)]

    def workers(self) -> list[psutil.Process]:
        return self.named("RayTrainWorker")

    def rank_0(self) -> list[psutil.Process]:
        """Returns rank 0 once it trains: it is the one that has metrics.csv open."""
        metrics = str(self.run_folder / METRICS_FILE)
        return [worker for worker in self.workers() if metrics in _open_files(worker)]

    def other_ranks(self) -> list[psutil.Process]:
        first = self.rank_0()
        return [worker for worker in self.workers() if first and worker not in first]

    def of_kind(self, kind: str) -> list[psutil.Process]:
        """Returns the victims of a kill: `worker`, `rank 0`, `all workers`, `controller`, `driver`, `raylet`, `gcs`."""
        return {
            "worker": self.other_ranks,
            "rank 0": self.rank_0,
            "all workers": self.workers,
            "controller": lambda: self.named("TrainController"),
            "driver": lambda: self.named(" -m rayjob run "),
            "raylet": lambda: self.named("raylet/raylet"),
            "gcs": lambda: self.named("gcs/gcs_server"),
        }[kind]()

    def kill(self, kind: str) -> None:
        """Kills the victims of a kind as soon as there are any."""
        for _ in ticks(f"a {kind} to kill"):
            if victims := self.of_kind(kind):
                kill(victims)
                return


def family(pid: int) -> list[psutil.Process]:
    """Returns a process and all that descend from it; nothing if it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [(parent := psutil.Process(pid)), *parent.children(recursive=True)]
    return []


def kill(victims: Sequence[psutil.Process]) -> None:
    """kill -9 of all, stopped first so that none sees another die; waits until they are gone."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.send_signal(number)
    psutil.wait_procs(victims, timeout=30)


def ticks(what: str) -> Iterator[None]:
    """Lets a loop look again and again, but not for ever."""
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s:
        yield
        time.sleep(POLL_S)
    raise AssertionError(f"waited {LIMIT_S:.0f} s for {what}")


def wait_until(is_true: Callable[[], bool], what: str) -> None:
    for _ in ticks(what):
        if is_true():
            return


def last_row(run_folder: Path) -> MetricsRow | None:
    """Returns the newest complete row, reading the end of the file alone: it is asked for between two steps."""
    with contextlib.suppress(FileNotFoundError), (run_folder / METRICS_FILE).open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - 2048))
        lines = file.read().decode().split("\n")
        return parse_line(lines[-2]) if len(lines) > 1 else None
    return None


def last_step(run_folder: Path) -> int:
    last = last_row(run_folder)
    return last.step if last else 0


def starts(run_folder: Path) -> int:
    """Returns how often a worker group has begun to train."""
    path = run_folder / STARTS_FILE
    return len(path.read_text().splitlines()) if path.exists() else 0


def unfinished(run_folder: Path) -> set[tuple[str, int]]:
    """Returns the checkpoints that still have a temporary name, with what tells one from an older one of that name."""
    found = set()
    for path in run_folder.glob("*step_*.tmp"):
        with contextlib.suppress(FileNotFoundError):
            found.add((path.name, path.stat().st_ino))
    return found


def stop_rank_0(parts: Parts, is_moment: Callable[[], bool], what: str) -> psutil.Process:
    """Stops rank 0 at a moment of which it has been made sure, and returns it.

    It is let run for a few milliseconds at a time, so that no moment that lasts longer is missed.
    """
    rank_0: list[psutil.Process] = []
    for _ in ticks(what):
        try:
            if not rank_0 or rank_0[0].status() == psutil.STATUS_ZOMBIE:
                rank_0 = parts.rank_0()
            for process in rank_0:
                process.send_signal(signal.SIGSTOP)
                if is_moment():
                    return process
                process.send_signal(signal.SIGCONT)
        except psutil.NoSuchProcess:
            rank_0 = []
    raise AssertionError


def at_steps(run_folder: Path, steps: Collection[int]) -> Callable[[], bool]:
    """The moments when the row of one of these steps is the last."""
    return lambda: last_step(run_folder) in steps


def from_step(run_folder: Path, step: int) -> Callable[[], bool]:
    """Any moment from the row of this step on."""
    return lambda: last_step(run_folder) >= step


def in_save(run_folder: Path) -> Callable[[], bool]:
    """The moments when a checkpoint is partly written: its folder still has its temporary name."""
    left = unfinished(run_folder)  # by an earlier kill
    return lambda: bool(unfinished(run_folder) - left)


def in_validation(run_folder: Path, steps: Collection[int]) -> Callable[[], bool]:
    """The moments when the row before one of these steps is older than any step takes, and the next is not there.

    The row of a step that is validated comes after its validation.
    """

    def is_moment() -> bool:
        last = last_row(run_folder)
        if last is None or last.step + 1 not in steps:
            return False
        rows = list(read_metrics(run_folder))[-10:]
        usual_s = statistics.median(b.wall_time - a.wall_time for a, b in itertools.pairwise(rows))
        return time.time() - last.wall_time > max(0.1, 5 * usual_s)

    return is_moment


def differences(reference: Path, other: Path) -> list[str]:
    """Returns in what two finished runs differ, in words; nothing if they are the same bit for bit."""
    return _row_differences(reference, other) + _tensor_differences(reference, other)


def _row_differences(reference: Path, other: Path) -> list[str]:
    ours, theirs = (_rows(folder) for folder in (reference, other))
    if [row["step"] for row in ours] != [row["step"] for row in theirs]:
        return [f"steps: {len(ours)} rows and {len(theirs)} rows"]
    return [
        f"step {mine['step']}: {name} {mine[name]} and {its[name]}"
        for mine, its in zip(ours, theirs, strict=True)
        for name in mine
        if name not in INCIDENTAL and mine[name] != its[name]  # as text, so bit for bit
    ]


def _rows(run_folder: Path) -> list[dict[str, str]]:
    with (run_folder / METRICS_FILE).open(newline="") as file:
        return list(csv.DictReader(file))


def _tensor_differences(reference: Path, other: Path) -> list[str]:
    folders = [list_checkpoints(folder)[-1] for folder in (reference, other)]
    if folders[0].name != folders[1].name:
        return [f"last checkpoints: {folders[0].name} and {folders[1].name}"]
    found = []
    models = [load_model(folder).state_dict() for folder in folders]
    trainers = [load_trainer_state(folder)[0] for folder in folders]
    for what, (mine, its) in {"weights": models, "optimizer": trainers}.items():
        found += [f"{what}: {name}" for name in mine.keys() | its.keys() if name not in mine or name not in its]
        found += [f"{what}: {name}" for name in mine.keys() & its.keys() if not mine[name].equal(its[name])]
    return found


def _command(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def _open_files(process: psutil.Process) -> set[str]:
    with contextlib.suppress(psutil.Error):
        return {file.path for file in process.open_files()}
    return set()
