"""An end that a retry would only repeat: a worker writes down why, the driver reads it and fails the run.

1. Too many bad steps in a row: the workers know by themselves.
2. The same exception at the same step twice, with a new group of workers or a new driver in between: so every worker
   writes down what ended it, and compares with what ended the groups before.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import ray.exceptions
import torch.distributed as dist

from rayjob.atomic import read_object, write_atomically
from rayjob.lease import LeaseLostError

_FILE = "failure.json"
_ERRORS_FOLDER = "errors"

# What a worker gets when it is another one that is gone: gloo raises RuntimeError without a type of its own.
_OF_ANOTHER_WORKER = re.compile(r"gloo|Connection (closed|reset)|Timed out waiting|Broken pipe|NCCL", re.IGNORECASE)


class RunFailedError(RuntimeError):
    """The run cannot go on as it is configured; the message says why and what to do."""


class StartRefusedError(RuntimeError):
    """Training must not begin on these machines; all ranks raise it alike, and the message says what to do."""


def write_failure(run_folder: Path, message: str) -> None:
    """Writes down why the run cannot go on, and what to do."""
    write_atomically(run_folder / _FILE, json.dumps({"message": message}).encode())


def write_bad_numbers(run_folder: Path, reason: str, window_ids: Sequence[int]) -> None:
    """Writes down that bad numbers end the run, and how to look at the text of their windows."""
    ids = " ".join(map(str, window_ids))
    write_failure(
        run_folder,
        f"{reason}. Nothing was updated and the last checkpoint is sound. Lower optimizer.lr, or look at the text with "
        f"`python -m rayjob show-window --config … {ids}`.",
    )


def forget_failure(run_folder: Path) -> None:
    """Removes what an earlier driver wrote down; the errors of its workers stay, to be compared with."""
    (run_folder / _FILE).unlink(missing_ok=True)


def has_failed(run_folder: Path) -> bool:
    return (run_folder / _FILE).exists()


def raise_failure(run_folder: Path) -> None:
    """Raises RunFailedError if the workers wrote down that the run cannot go on."""
    path = run_folder / _FILE
    if path.exists():
        raise RunFailedError(read_object(path).get("message", "the workers' reason was lost; their log has it."))


@contextmanager
def remembered_errors(run_folder: Path, group: str, rank: int, step: Callable[[], int]) -> Iterator[None]:
    """Writes down an exception that leaves the block, and fails the run if an earlier group ended by the same.

    Args:
        run_folder: the run's folder.
        group: names this group of workers; every start has another.
        rank: of this worker.
        step: returns the updates that are done.
    """
    try:
        yield
    except Exception as error:
        if not is_of_another_worker(error):
            _remember(run_folder, group, rank, step(), f"{type(error).__name__}: {error}")
        raise


def is_of_another_worker(error: Exception) -> bool:
    """Returns whether an exception only says that another process is gone, hangs or has the run."""
    if isinstance(error, (dist.DistError, ray.exceptions.RayError, LeaseLostError)):
        return True
    return type(error) is RuntimeError and bool(_OF_ANOTHER_WORKER.search(str(error)))


def forget_passed_errors(run_folder: Path, step: int) -> None:
    """Removes the errors of steps before `step`: whatever the reason was, it is gone."""
    for path in (run_folder / _ERRORS_FOLDER).glob("rank-*.json"):
        if read_object(path).get("step", -1) < step:
            path.unlink(missing_ok=True)


def _remember(run_folder: Path, group: str, rank: int, step: int, error: str) -> None:
    folder = run_folder / _ERRORS_FOLDER
    known = [record for path in folder.glob("rank-*.json") if (record := read_object(path))]
    if any((e["step"], _shape(e["error"])) == (step, _shape(error)) and e["group"] != group for e in known):
        write_failure(
            run_folder,
            f"{error} (rank {rank}, after step {step}), for the second time at this step: another try would only "
            "repeat it. The checkpoints are as they were; mend the cause and run the same command again.",
        )
    own = {"group": group, "rank": rank, "step": step, "error": error}
    write_atomically(folder / f"rank-{rank:05d}.json", json.dumps(own).encode())


def _shape(error: str) -> str:
    """Returns a message without its numbers: addresses and process ids differ from start to start."""
    return re.sub(r"0x[0-9a-f]+|\d+", "#", error)
