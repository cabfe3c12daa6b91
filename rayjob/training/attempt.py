"""Which run a worker group trains, and which of the run's attempts it is: starts.jsonl, a line per start.

The run's id tells its checkpoints from those of another run. The attempt's id goes into the names of unfinished
checkpoints, and its being the newest is asked before one is committed: a worker that was thought dead commits nothing.
"""

import hashlib
import json
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayjob.atomic import write_atomically

STARTS_FILE = "starts.jsonl"


@dataclass(frozen=True, slots=True)
class Attempt:
    run_id: str
    id: str  # of one worker group


def begin_attempt(run_folder: Path, step: int, run_id: str | None) -> Attempt:
    """Records a start and returns the new attempt.

    Args:
        run_folder: the run's folder.
        step: that training goes on from.
        run_id: of the checkpoint that training goes on from; only counts where the folder knows none.
    """
    known = [start["run_id"] for start in _read_starts(run_folder) if "run_id" in start]
    attempt = Attempt(run_id=known[-1] if known else run_id or uuid.uuid4().hex, id=uuid.uuid4().hex[:12])
    line: dict[str, Any] = {"step": step, "wall_time": time.time(), "run_id": attempt.run_id, "attempt": attempt.id}
    before = _read_text(run_folder)
    if before and not before.endswith("\n"):
        before += "\n"
    line["digest"] = _digest(line)
    write_atomically(run_folder / STARTS_FILE, f"{before}{json.dumps(line)}\n".encode())
    return attempt


def run_ids(run_folder: Path) -> set[str]:
    """Returns the ids that the folder's run has had: one, or none before the first start."""
    return {start["run_id"] for start in _read_starts(run_folder) if "run_id" in start}


def count_starts(run_folder: Path) -> int:
    """Returns how often the run was started, as far as the file can be read."""
    return len(_read_starts(run_folder))


def is_newest(run_folder: Path, attempt: Attempt) -> bool:
    """Returns whether no later attempt has started."""
    starts = _read_starts(run_folder)
    return bool(starts) and starts[-1].get("attempt") == attempt.id


def _read_starts(run_folder: Path) -> list[dict[str, Any]]:
    """Returns the lines that can be read; a damaged one must not keep the run from starting."""
    starts = []
    for line in _read_text(run_folder).splitlines():
        try:
            start = json.loads(line)
        except ValueError:
            continue
        if isinstance(start, dict) and start.get("digest", _digest(start)) == _digest(start):
            starts.append(start)
    return starts


def _digest(start: dict[str, Any]) -> str:
    """Of all else in a line: one damaged digit of a run's id would make every sound checkpoint a stranger's."""
    fields = {name: value for name, value in start.items() if name != "digest"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def _read_text(run_folder: Path) -> str:
    path = run_folder / STARTS_FILE
    return path.read_text(errors="replace") if path.exists() else ""
