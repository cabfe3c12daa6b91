"""A small file that says what a supervisor is at, for whoever looks from outside and for its own successor."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from cluster.product import Run
from cluster.settings import Settings, replace_json


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """One look at a supervisor; `time` is in UTC, as ISO 8601 writes it."""

    pid: int
    attempt: int
    job_id: str | None
    stage: str  # start, run, wait or end
    time: str


def heartbeat_path(settings: Settings, run: Run) -> Path:
    return settings.state / f"heartbeat-{run.key}.json"


def write_heartbeat(path: Path, *, attempt: int, job_id: str | None, stage: str) -> None:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    replace_json(path, asdict(Heartbeat(os.getpid(), attempt, job_id, stage, now)))


def read_heartbeat(path: Path) -> Heartbeat | None:
    """Returns the newest heartbeat, of a dead supervisor too; None if there is no readable one."""
    try:
        heartbeat = Heartbeat(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return heartbeat if isinstance(heartbeat.attempt, int) else None
