"""`status`: what a run folder says about its run, without Ray."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

from model.checkpoint import step_of
from rayjob.atomic import read_object, write_atomically
from rayjob.config import JobConfig
from rayjob.store.checkpoints import find_checkpoints
from rayjob.store.runs import fetch_run_files
from rayjob.training.attempt import count_starts
from rayjob.training.metrics import MetricsRow, read_metrics
from rayjob.training.mlflow_sink import read_run_id

_STAGE_FILE = "stage.json"
_RATE_STEPS = 50  # the rate is the median of the last steps


def set_stage(config: JobConfig, stage: str, max_steps: int | None = None) -> None:
    """Records where the job is: prepare, train, evaluate, done, stopped, budget or failed."""
    known = _read_stage(config.run_folder)
    steps = max_steps or known.get("max_steps")
    write_atomically(config.run_folder / _STAGE_FILE, json.dumps({"stage": stage, "max_steps": steps}).encode())


def read_status(config: JobConfig) -> dict[str, Any]:
    """Returns the status object: every key, null where it is not known yet."""
    folder = config.run_folder
    fetch_run_files(folder)
    best, latest = find_checkpoints(folder)
    stage = _read_stage(folder)
    rows = list(read_metrics(folder))
    last = rows[-1] if rows else None
    val_losses = [_finite(row.val_loss) for row in rows if row.val_loss is not None]
    max_steps = stage.get("max_steps") or config.train.max_steps
    rate = statistics.median(row.tokens_per_s for row in rows[-_RATE_STEPS:]) if rows else None
    return {
        "stage": stage.get("stage", "new"),
        "step": _step(last, latest),
        "max_steps": max_steps,
        "epoch": last.epoch if last else 0,
        "tokens": last.tokens if last else 0,
        "train_loss": _finite(last.loss) if last else None,
        "val_loss": val_losses[-1] if val_losses else None,
        "best_val_loss": min((loss for loss in val_losses if loss is not None), default=None),
        "best_checkpoint": best,
        "latest_checkpoint": latest,
        "mlflow_run_id": read_run_id(folder),
        "tokens_per_s": rate,
        "mfu_pct": last.mfu_pct if last else None,
        "elapsed_s": last.elapsed_s if last else 0.0,
        "eta_s": _eta_s(last, max_steps, rate),
        "cost_usd": last.cost_usd if last else 0.0,
        "restarts": max(0, count_starts(folder) - 1),
    }


def _step(last: MetricsRow | None, latest: str | None) -> int:
    """Returns the steps done: a checkpoint whose validation was interrupted is a step ahead of the rows."""
    return max(last.step if last else 0, step_of(Path(latest)) if latest else 0)


def _read_stage(folder: Path) -> dict[str, Any]:
    return read_object(folder / _STAGE_FILE)


def _finite(value: float) -> float | None:
    """Returns None for NaN and infinities: JSON has none."""
    return value if math.isfinite(value) else None


def _eta_s(last: MetricsRow | None, max_steps: int | None, rate: float | None) -> float | None:
    if last is None or max_steps is None or not rate or not last.step:  # 0 in a damaged row
        return None
    return max(0, max_steps - last.step) * (last.tokens / last.step) / rate
