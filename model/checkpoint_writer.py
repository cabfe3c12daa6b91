"""Writes a checkpoint: by one process, or by the ranks of a run that share its folder, each its part.

1. Every rank writes its part under the draft's temporary name, such as `step_00001200.5f0c.tmp`, and syncs it.
2. When all parts are on disk, one rank commits: COMPLETE last, then the rename.

An interrupted save leaves a folder with a temporary name, which no function takes for a checkpoint. The name holds
the writer's id, so that a writer thought dead never writes into the draft of another.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.checkpoint import (
    CONFIG,
    GENERATION_CONFIG,
    TRAINER_STATE,
    WEIGHTS,
    checkpoint_name,
    trainer_tensors_name,
    verify_checkpoint,
)
from model.complete import CheckpointError, Files, sync, write_complete, write_file
from model.config import ModelConfig
from model.llama import Llama
from model.tensor_file import write_tensors
from model.tokenizer import BOS_ID, EOS_ID

logger = logging.getLogger(__name__)

_TEMPORARY_NAME = re.compile(r"step_\d{8,}(\.\w+)?\.tmp")


def save_checkpoint(
    run_folder: Path,
    step: int,
    *,
    model: Mapping[str, Tensor],
    config: ModelConfig,
    tokenizer_folder: Path,
    trainer_tensors: Mapping[str, Tensor],
    trainer_state: Mapping[str, Any],
) -> Path:
    """Writes the whole checkpoint of a step and returns its folder, durable when this returns.

    Args:
        run_folder: the folder of the run; created if missing.
        step: optimizer steps done.
        model: as `Draft.write_model` takes it.
        config: the model's.
        tokenizer_folder: all its files are copied.
        trainer_tensors: optimizer and RNG tensors, by any names.
        trainer_state: as `Draft.write_model` takes it.

    Raises:
        ValueError: the state dict is not that of the config's model.
    """
    check_state_dict(model, config)
    draft = Draft(run_folder, step, "save")
    remove_leftovers(run_folder)
    files = draft.write_model(model, config, tokenizer_folder, trainer_state)
    return draft.commit(files | draft.write_trainer_tensors(trainer_tensors, 0, 1))


def check_state_dict(model: Mapping[str, Tensor], config: ModelConfig) -> None:
    """Refuses, before hours of training are saved under them, names and shapes that no load would accept."""
    with torch.device("meta"):
        wanted = {name: tensor.shape for name, tensor in Llama(config).state_dict().items()}
    found = {name: tensor.shape for name, tensor in model.items()}
    if found != wanted:
        differing = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        raise ValueError(
            f"the state dict differs from the config's model in {len(differing)} tensors, first "
            f"{differing[0]}: expected {wanted.get(differing[0])}, got {found.get(differing[0])}. "
            "Save the unwrapped module's state dict (no `module.` or `_orig_mod.` prefix)."
        )


def remove_leftovers(run_folder: Path) -> None:
    """Removes what interrupted saves and removals left behind, and makes sure that the run folder exists."""
    run_folder.mkdir(parents=True, exist_ok=True)
    for leftover in run_folder.iterdir():
        if _TEMPORARY_NAME.fullmatch(leftover.name):
            logger.warning("%s is what an interrupted save left, and was removed.", leftover)
            shutil.rmtree(leftover, ignore_errors=True)  # a writer that is not quite dead may still add to it


def remove_checkpoint(folder: Path) -> None:
    """Removes a checkpoint so that a kill in the middle leaves none that looks like one."""
    doomed = _doomed(folder)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def _doomed(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.removed.tmp")


def _put_in_place(draft: Path, final: Path) -> None:
    """Renames a draft, durably; what it takes the place of may be the run's only checkpoint, so it goes last."""
    doomed = _doomed(final)
    shutil.rmtree(doomed, ignore_errors=True)
    if final.exists():
        final.rename(doomed)
    try:
        draft.rename(final)
    except OSError:
        if doomed.exists():
            doomed.rename(final)
        raise
    sync(final.parent)
    shutil.rmtree(doomed, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Draft:
    """A checkpoint that is not committed yet; every rank makes an equal one.

    Args:
        run_folder: on storage that all ranks share.
        step: optimizer steps done.
        writer: letters and digits that name who writes it.
    """

    run_folder: Path
    step: int
    writer: str

    @property
    def folder(self) -> Path:
        return self.run_folder / f"{checkpoint_name(self.step)}.{self.writer}.tmp"

    def write_model(
        self,
        model: Mapping[str, Tensor],
        config: ModelConfig,
        tokenizer_folder: Path,
        trainer_state: Mapping[str, Any],
    ) -> Files:
        """Writes all but the trainer's tensors, and returns the files' entries for COMPLETE.

        Args:
            model: the state dict of a `Llama`, without the prefixes of compile and DistributedDataParallel.
            config: the model's.
            tokenizer_folder: all its files are copied.
            trainer_state: a JSON object; `step` is set, and `val_loss` is null unless it is a finite number.
        """
        self._make_folder()
        files = {
            path.name: write_file(self.folder / path.name, [path.read_bytes()])
            for path in tokenizer_folder.iterdir()
            if path.is_file()
        }
        weights = {name: tensor.detach().cpu().float() for name, tensor in model.items()}
        files[WEIGHTS] = write_tensors(self.folder / WEIGHTS, weights)
        token_ids = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID}
        documents = {
            CONFIG: config.to_hf() | token_ids,
            GENERATION_CONFIG: token_ids,
            TRAINER_STATE: _scored_state(self.step, trainer_state),
        }
        return files | {name: _write_json(self.folder / name, content) for name, content in documents.items()}

    def write_trainer_tensors(self, tensors: Mapping[str, Tensor], rank: int, n_ranks: int) -> Files:
        """Writes one rank's part of the trainer's tensors, and returns the file's entry for COMPLETE."""
        self._make_folder()
        name = trainer_tensors_name(rank, n_ranks)
        on_cpu = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        return {name: write_tensors(self.folder / name, on_cpu)}

    def commit(self, files: Files) -> Path:
        """Makes the draft the checkpoint of its step, durable when this returns, and returns its folder.

        A sound checkpoint of the same step is kept as it is: the same step of a run has the same weights, and so
        there is no moment without it. A damaged one is replaced, and one without a score, or that owes it, by one
        that has more.

        Args:
            files: the entries of all ranks' files.

        Raises:
            CheckpointError: a file is not there as it was written.
        """
        for name in files:
            if not (self.folder / name).exists():
                raise CheckpointError(
                    f"{self.folder / name} was written by a worker but is not seen by this one: "
                    "`storage` must be a file system that all nodes share."
                )
        write_complete(self.folder, files)
        final = self.run_folder / checkpoint_name(self.step)
        if _is_sound(final):
            if _completeness(final) >= _completeness(self.folder):
                logger.info("%s is complete already and was kept.", final)
                self.discard()
                return final
        elif final.exists():
            logger.warning("%s was damaged and is replaced.", final)
        _put_in_place(self.folder, final)
        return final

    def discard(self) -> None:
        """Removes what was written."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _make_folder(self) -> None:
        (self.folder / "trainer").mkdir(parents=True, exist_ok=True)


def _scored_state(step: int, trainer_state: Mapping[str, Any]) -> dict[str, Any]:
    val_loss = trainer_state.get("val_loss")
    score = float(val_loss) if val_loss is not None and math.isfinite(val_loss) else None
    return {**trainer_state, "step": step, "val_loss": score}


def _is_sound(folder: Path) -> bool:
    try:
        verify_checkpoint(folder)
    except CheckpointError:
        return False
    return True


def _completeness(folder: Path) -> int:
    """Ranks checkpoints of one step: above one that owes its evaluation stands one without, above that one scored."""
    state = json.loads((folder / TRAINER_STATE).read_bytes())
    return 2 if state["val_loss"] is not None else int(not state.get("owes_evaluation", False))


def _write_json(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    return write_file(path, [json.dumps(content, indent=2).encode() + b"\n"])
