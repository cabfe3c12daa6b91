"""Settings of the service: the `user_config` of its deployment."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
MAX_ONGOING_REQUESTS = 1024
"""Requests that Ray Serve lets into a replica: above slots + queue, so that our 429 comes before its 503."""
FOLLOW_INTERVAL_S = 10.0
DTYPES = ("auto", "float32", "bfloat16", "int8")


@dataclass(frozen=True, slots=True)
class Settings:
    """What can be changed while the service runs.

    Attributes:
        checkpoint: A checkpoint or a run folder; a relative path starts at the repository.
        model_name: Name in answers; by default that of the run folder.
        num_slots: Sequences decoded at the same time.
        max_waiting: Sequences that may wait for a slot; beyond it requests are answered 429.
        dtype: Of weights and cache while decoding; see `serving.engine.weights.decoding_dtype` for "auto".
        num_threads: CPUs that compute; by default all that the process may use.
        follow_interval_s: How often a run folder is looked at for a new best checkpoint.
    """

    checkpoint: Path
    model_name: str | None = None
    num_slots: int = 64
    max_waiting: int = 256
    dtype: str = "auto"
    num_threads: int | None = None
    follow_interval_s: float = FOLLOW_INTERVAL_S


def parse_settings(user_config: Mapping[str, Any]) -> Settings:
    """Returns checked settings.

    Raises:
        ValueError: Every problem, in one message.
    """
    known = [field.name for field in fields(Settings)]
    problems = [_unknown(key, known) for key in user_config if key not in known]
    values = {key: value for key, value in user_config.items() if key in known}
    problems += _problems(values)
    if problems:
        raise ValueError(" ".join(problems))
    return Settings(**{**values, "checkpoint": _absolute(values["checkpoint"])})


def _problems(values: Mapping[str, Any]) -> list[str]:
    problems = []
    checkpoint, name = values.get("checkpoint"), values.get("model_name")
    if not isinstance(checkpoint, str) or not checkpoint or "://" in checkpoint:
        problems.append(
            f"user_config.checkpoint must be a local checkpoint or run folder, got {checkpoint!r}. Where the run was "
            "trained `python -m rayjob status` names its folder; elsewhere copy one first (aws s3 sync)."
        )
    if name is not None and (not isinstance(name, str) or not name):
        problems.append(f"user_config.model_name must be a non-empty string, got {name!r}.")
    for key, low in (("num_slots", 1), ("max_waiting", 0)):
        value = values.get(key, low)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= MAX_ONGOING_REQUESTS // 4:
            limit = MAX_ONGOING_REQUESTS // 4
            problems.append(f"user_config.{key} must be an integer in {low}..{limit}, got {value!r}.")
    interval_s = values.get("follow_interval_s", FOLLOW_INTERVAL_S)
    if not isinstance(interval_s, int | float) or isinstance(interval_s, bool) or not 0 < interval_s <= 86_400:
        problems.append(f"user_config.follow_interval_s must be a number in (0, 86400], got {interval_s!r}.")
    if (dtype := values.get("dtype", "auto")) not in DTYPES:
        problems.append(f"user_config.dtype must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    threads = values.get("num_threads")
    if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool) or threads < 1):
        problems.append(f"user_config.num_threads must be an integer of at least 1, got {threads!r}.")
    return problems


def _unknown(key: object, known: list[str]) -> str:
    nearest = difflib.get_close_matches(str(key)[:64], known, n=1, cutoff=0.0)[0]
    return f"user_config.{key} is unknown: the nearest known key is {nearest}."


def _absolute(checkpoint: str) -> Path:
    """A relative path starts at the repository: a replica does not run where `serve deploy` was called."""
    return REPOSITORY / Path(checkpoint).expanduser()
