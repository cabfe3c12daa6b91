"""An end that a retry would only repeat: rank 0 writes down why, the driver reads it and fails the run."""

import json
from collections.abc import Sequence
from pathlib import Path

from rayjob.atomic import write_atomically

_FILE = "failure.json"


class RunFailedError(RuntimeError):
    """The run cannot go on as it is configured; the message says why and what to do."""


def write_failure(run_folder: Path, reason: str, window_ids: Sequence[int]) -> None:
    """Writes down why the run cannot go on, with the windows of the step."""
    write_atomically(run_folder / _FILE, json.dumps({"reason": reason, "window_ids": list(window_ids)}).encode())


def forget_failure(run_folder: Path) -> None:
    """Removes what an earlier attempt wrote down."""
    (run_folder / _FILE).unlink(missing_ok=True)


def raise_failure(run_folder: Path) -> None:
    """Raises RunFailedError if the workers wrote down that the run cannot go on."""
    path = run_folder / _FILE
    if path.exists():
        failure = json.loads(path.read_text())
        ids = " ".join(map(str, failure["window_ids"]))
        raise RunFailedError(
            f"{failure['reason']}. Nothing was updated and the last checkpoint is sound. Lower optimizer.lr, or look "
            f"at the text of the step with `python -m rayjob show-window --config … {ids}`."
        )
