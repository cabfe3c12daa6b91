"""Where a run goes on from: the newest sound checkpoint in its folder.

The folder is the truth. Ray Train's snapshot of it is written at another moment and in place, so it can be torn or
name folders that are gone, and then fit() fails; it is removed before every start and made anew by the next report.
"""

import dataclasses
import logging
from pathlib import Path

from torch import Tensor

from model.checkpoint import checkpoint_folders, load_config, load_trainer_state, verify_checkpoint
from model.complete import CheckpointError
from model.config import ModelConfig
from rayjob.training.saving import RunIdentity, RunState

logger = logging.getLogger(__name__)

_RAY_SNAPSHOT = "checkpoint_manager_snapshot.json"


def forget_ray_snapshot(run_folder: Path) -> None:
    (run_folder / _RAY_SNAPSHOT).unlink(missing_ok=True)


def find_sound_checkpoint(run_folder: Path) -> Path | None:
    """Returns the newest checkpoint whose every file is as saved, warning about newer ones that are not."""
    for folder in reversed(checkpoint_folders(run_folder)):
        try:
            verify_checkpoint(folder)
        except CheckpointError as error:
            logger.warning("%s It is left out; trying the one before.", error)
        else:
            return folder
    return None


def load_run(folder: Path, model: ModelConfig, identity: RunIdentity) -> tuple[dict[str, Tensor], RunState]:
    """Returns the optimizer's tensors and the state saved in a sound checkpoint.

    Raises:
        CheckpointError: if it is of another run or shape; both values are named.
    """
    tensors, saved = load_trainer_state(folder)
    state = RunState.from_json(saved)
    mine = dataclasses.asdict(identity) | {"model": model}
    theirs = dataclasses.asdict(state.identity) | {"model": load_config(folder)}
    for name in mine:
        if mine[name] != theirs[name]:
            raise CheckpointError(
                f"{folder} was trained with {name} {theirs[name]}, but the configuration gives {name} {mine[name]}: "
                "choose another run_name, or restore the configuration of the run."
            )
    return tensors, state
