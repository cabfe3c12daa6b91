"""config.yaml in a run's folder: the settings of its last start. It is a record, and nothing is decided by it."""

import contextlib
import logging
from pathlib import Path
from typing import Any

import yaml

from rayjob.atomic import write_atomically
from rayjob.config import JobConfig
from rayjob.config_file import flatten_tree, to_tree

logger = logging.getLogger(__name__)


def write_config(config: JobConfig) -> None:
    """Writes config.yaml of the run, telling what changed since the last start."""
    path = config.run_folder / "config.yaml"
    before, now = flatten_tree(_read(path)), flatten_tree(to_tree(config))
    for key in sorted(before.keys() & now.keys()):
        if before[key] != now[key]:
            logger.warning("%s changed since this run was started: %s -> %s", key, before[key], now[key])
    write_atomically(path, yaml.safe_dump(to_tree(config), sort_keys=False).encode())


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    with contextlib.suppress(OSError, UnicodeDecodeError, yaml.YAMLError):
        if isinstance(tree := yaml.safe_load(path.read_text()), dict):
            return tree
    logger.warning("%s was damaged: what has changed since the last start is not known.", path)
    return {}
