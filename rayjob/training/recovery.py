"""Where a run goes on from: the newest sound checkpoint in its folder.

The folder is the truth. Ray Train's snapshot of it is written at another moment and in place, so it can be torn or
name folders that are gone, and then fit() fails; it is removed before every start and made anew by the next report.
"""

import dataclasses
import logging
import shutil
from pathlib import Path

from torch import Tensor

from model.checkpoint import (
    best_checkpoint,
    checkpoint_folders,
    list_checkpoints,
    load_config,
    load_trainer_tensors,
    read_trainer_state,
    step_of,
    verify_checkpoint,
)
from model.complete import CheckpointError
from model.config import ModelConfig
from rayjob.training.attempt import run_ids
from rayjob.training.saving import RunIdentity, RunState

logger = logging.getLogger(__name__)

_RAY_SNAPSHOT = "checkpoint_manager_snapshot.json"
_REJECTED_SUFFIX = ".rejected"


class ForeignCheckpointError(CheckpointError):
    """A checkpoint is sound, but of another run."""


def forget_ray_snapshot(run_folder: Path) -> None:
    (run_folder / _RAY_SNAPSHOT).unlink(missing_ok=True)


def find_sound_checkpoint(run_folder: Path) -> Path | None:
    """Returns the run's newest checkpoint whose every file is as saved, warning about newer ones that are not."""
    found, rejected = _newest_sound(run_folder)
    for error in rejected.values():
        logger.warning("%s It is left out; trying the one before.", error)
    return found


def settle_checkpoints(run_folder: Path) -> Path | None:
    """Returns the same as `find_sound_checkpoint` and renames the newer ones, so that nobody takes them for sound.

    Also those of another run, old ones too: one of them could be taken for the best. For who holds the run's lock.
    """
    found, rejected = _newest_sound(run_folder)
    if found:
        rejected |= _older_of_another_run(run_folder, found)
    for folder, error in rejected.items():
        logger.warning("%s It is left out and %s; trying the one before.", error, _set_aside(folder))
    return found


def settle_best_checkpoint(run_folder: Path) -> Path | None:
    """Returns the run's best sound checkpoint, None if none has a score, and renames better ones that are damaged.

    For who holds the run's lock.

    Raises:
        CheckpointError: the best is damaged and cannot be renamed.
    """
    while best := best_checkpoint(run_folder):
        try:
            verify_checkpoint(best)
        except CheckpointError as error:
            logger.warning("%s It is left out and %s; trying the next best.", error, _set_aside(best))
            if best.exists():
                raise
        else:
            return best
    return None


def read_run(folder: Path, model: ModelConfig, identity: RunIdentity) -> RunState:
    """Returns the state saved in a sound checkpoint.

    Raises:
        CheckpointError: if it is of another run or shape; both values are named.
    """
    state = RunState.from_json(read_trainer_state(folder))
    mine = dataclasses.asdict(identity) | {"model": model}
    theirs = dataclasses.asdict(state.identity) | {"model": load_config(folder)}
    for name in mine:
        if mine[name] != theirs[name]:
            raise CheckpointError(
                f"{folder} was trained with {name} {theirs[name]}, but the configuration gives {name} {mine[name]}: "
                "choose another run_name, or restore the configuration of the run."
            )
    return state


def load_run(folder: Path, model: ModelConfig, identity: RunIdentity) -> tuple[dict[str, Tensor], RunState]:
    """Returns the trainer's tensors and the state saved in a sound checkpoint; raises as `read_run` does."""
    state = read_run(folder, model, identity)
    return load_trainer_tensors(folder), state


def _newest_sound(run_folder: Path) -> tuple[Path | None, dict[Path, CheckpointError]]:
    """Returns the run's newest sound checkpoint, and the newer ones with what is wrong with each."""
    rejected: dict[Path, CheckpointError] = {}
    known_ids = run_ids(run_folder)
    for folder in reversed(checkpoint_folders(run_folder)):
        try:
            verify_checkpoint(folder)
            _check_step(folder)
            _check_run_id(folder, known_ids)
        except CheckpointError as error:
            rejected[folder] = error
        else:
            return folder, rejected
    return None, rejected


def _older_of_another_run(run_folder: Path, newest: Path) -> dict[Path, CheckpointError]:
    known_ids, found = run_ids(run_folder), dict[Path, CheckpointError]()
    for folder in list_checkpoints(run_folder):
        if step_of(folder) < step_of(newest):
            try:
                _check_run_id(folder, known_ids)
            except ForeignCheckpointError as error:
                found[folder] = error
            except CheckpointError:  # damaged, which matters when it is to be used
                continue
    return found


def _check_step(folder: Path) -> None:
    step = read_trainer_state(folder).get("step", step_of(folder))
    if step != step_of(folder):
        raise CheckpointError(f"{folder} holds step {step}: it is a copy under another step's name.")


def _check_run_id(folder: Path, known_ids: set[str]) -> None:
    run_id = read_trainer_state(folder).get("run_id")
    if run_id and known_ids and run_id not in known_ids:
        raise ForeignCheckpointError(f"{folder} is a checkpoint of another run, put into this run's folder.")


def _set_aside(folder: Path) -> str:
    """Renames a folder so that it is no checkpoint any more, and returns what became of it."""
    aside = folder.with_name(folder.name + _REJECTED_SUFFIX)
    try:
        shutil.rmtree(aside, ignore_errors=True)  # of an earlier time
        folder.rename(aside)
    except OSError as error:
        return f"could not be renamed ({error})"
    return f"was renamed to {aside.name}"
