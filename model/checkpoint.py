"""The checkpoint format: a Hugging Face Llama folder that is either complete or as good as absent.

    step_00001200/
      model.safetensors  config.json  generation_config.json     what LlamaForCausalLM loads, fp32
      tokenizer.model  tokenizer_config.json  normalizer.json …  the tokenizer folder's files
      trainer/tensors.safetensors  trainer/state.json            what only a resumed training needs
      COMPLETE                                                   every file's size and sha256

A save writes all of it under `step_00001200.tmp`, COMPLETE last, syncs it to disk and renames it: an
interrupted save leaves a `.tmp` folder, which no function here takes for a checkpoint and the next save of
the run removes. A loader compares each file with COMPLETE before it reads it, and reads nothing but
safetensors and JSON: nothing is unpickled.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.complete import (
    COMPLETE,
    CheckpointError,
    read_complete,
    sync,
    verify_files,
    verify_size,
    write_complete,
)
from model.config import ModelConfig
from model.llama import Llama
from model.tokenizer import BOS_ID, EOS_ID

logger = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TRAINER_TENSORS = "trainer/tensors.safetensors"
TRAINER_STATE = "trainer/state.json"

_REQUIRED = {WEIGHTS, CONFIG, GENERATION_CONFIG, TRAINER_TENSORS, TRAINER_STATE}
_NAME = re.compile(r"step_(\d{8,})")
_TEMPORARY_NAME = re.compile(r"step_\d{8,}\.tmp")


def checkpoint_name(step: int) -> str:
    """Returns the folder name of a step's checkpoint, such as step_00001200."""
    return f"step_{step:08d}"


def step_of(folder: Path) -> int:
    """Returns the step that a checkpoint's folder is named after."""
    return int(folder.name.removeprefix("step_"))


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
    """Writes the checkpoint of a step and returns its folder, durable when this returns.

    A sound checkpoint of the same step is kept as it is: the same step of a run has the same weights, and so
    there is no moment without it. A damaged one is replaced, and one without a score by one that has it.

    Args:
        run_folder: the folder of the run; created if missing.
        step: optimizer steps done.
        model: the state dict of a `Llama`, without the prefixes of compile and DistributedDataParallel.
        config: the model's.
        tokenizer_folder: all its files are copied.
        trainer_tensors: optimizer and RNG tensors, by any names.
        trainer_state: a JSON object; `step` is set, and `val_loss` is null unless it is a finite number.

    Raises:
        ValueError: the state dict is not that of the config's model.
    """
    _check_state_dict(model, config)
    folder = run_folder / checkpoint_name(step)
    _remove_leftovers(run_folder)
    is_sound = _is_sound(folder)
    adds_score = _scored_state(step, trainer_state)["val_loss"] is not None and is_sound and _val_loss(folder) is None
    if is_sound and not adds_score:
        logger.info("%s is complete already and was kept.", folder)
        return folder
    temporary = folder.with_name(folder.name + ".tmp")
    (temporary / "trainer").mkdir(parents=True)
    for source in (path for path in tokenizer_folder.iterdir() if path.is_file()):
        shutil.copyfile(source, temporary / source.name)
    _write_tensors(temporary / WEIGHTS, {name: tensor.float() for name, tensor in model.items()})
    _write_json(temporary / CONFIG, config.to_hf() | {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID})
    _write_json(temporary / GENERATION_CONFIG, {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID})
    _write_tensors(temporary / TRAINER_TENSORS, trainer_tensors)
    _write_json(temporary / TRAINER_STATE, _scored_state(step, trainer_state))
    write_complete(temporary)
    if folder.exists():
        if not adds_score:
            logger.warning("%s was damaged and is replaced.", folder)
        shutil.rmtree(folder)
    temporary.rename(folder)
    sync(run_folder)
    return folder


def verify_checkpoint(folder: Path) -> None:
    """Compares every file with its size and sha256 in COMPLETE.

    Raises:
        CheckpointError: a file is missing or differs, COMPLETE included.
    """
    verify_files(folder, _REQUIRED | read_complete(folder).keys())


def is_complete(folder: Path) -> bool:
    """Returns whether COMPLETE can be read and every file has its size; cheap: contents are not read."""
    try:
        _require_complete(folder)
    except CheckpointError:
        return False
    return True


def checkpoint_folders(run_folder: Path) -> list[Path]:
    """Returns what bears a checkpoint's name, complete or not, by step; empty if there is no such folder."""
    if not run_folder.is_dir():
        return []
    return sorted((path for path in run_folder.iterdir() if _NAME.fullmatch(path.name)), key=step_of)


def list_checkpoints(run_folder: Path) -> list[Path]:
    """Returns the complete checkpoints of a run, by step; empty if there is no such folder."""
    return [folder for folder in checkpoint_folders(run_folder) if is_complete(folder)]


def latest_checkpoint(run_folder: Path) -> Path | None:
    """Returns the complete checkpoint of the highest step, or None."""
    return max(list_checkpoints(run_folder), default=None, key=step_of)


def best_checkpoint(run_folder: Path) -> Path | None:
    """Returns the complete checkpoint of the lowest val_loss, the earliest on a tie, or None."""
    scored = [(loss, folder) for folder in list_checkpoints(run_folder) if (loss := _val_loss(folder)) is not None]
    return min(scored, default=(None, None), key=lambda pair: pair[0])[1]


def resolve_checkpoint(path: Path) -> Path:
    """Returns the checkpoint that `path` means: itself, or of a run folder the best, or else the latest.

    Raises:
        CheckpointError: there is none, with the reason.
    """
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {what}, expected a checkpoint or a run folder.")
    if (path / COMPLETE).exists() or _NAME.fullmatch(path.resolve().name):
        _require_complete(path)
        return path
    checkpoint = best_checkpoint(path) or latest_checkpoint(path)
    if checkpoint is None:
        torn = sorted(entry.name for entry in path.iterdir() if entry.name.startswith("step_"))
        found = f"only incomplete ones ({', '.join(torn)})" if torn else "none"
        raise CheckpointError(f"{path} should hold at least one complete checkpoint (step_XXXXXXXX), but has {found}.")
    return checkpoint


def load_config(folder: Path) -> ModelConfig:
    """Returns the config of a checkpoint's model.

    Raises:
        CheckpointError: a file is missing or damaged, or describes another kind of model.
    """
    verify_files(folder, [CONFIG])
    try:
        return ModelConfig.from_hf(json.loads((folder / CONFIG).read_bytes()))
    except ValueError as error:
        raise CheckpointError(f"{folder / CONFIG}: {error}") from error


def load_model(folder: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Llama:
    """Returns the checkpoint's model in eval mode.

    Raises:
        CheckpointError: a file is missing or damaged, the weights are not those of the config's model, or
            one is not finite.
    """
    config = load_config(folder)
    weights = _read_tensors(folder, WEIGHTS)
    for name, tensor in weights.items():
        if not tensor.sum().isfinite():  # twenty times as fast as isfinite().all(), and as sure
            raise CheckpointError(f"{folder / WEIGHTS}: {name} holds NaN or infinity; use an earlier checkpoint.")
    with torch.device(device):
        model = Llama(config).to(dtype)
    try:
        model.load_state_dict(weights, strict=True)
    except RuntimeError as error:
        raise CheckpointError(f"{folder / WEIGHTS} does not fit {folder / CONFIG}: {error}") from error
    return model.eval()


def load_trainer_state(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the trainer's tensors, on the CPU, and its state as they were saved.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    verify_files(folder, [TRAINER_STATE])
    state: dict[str, Any] = json.loads((folder / TRAINER_STATE).read_bytes())
    return _read_tensors(folder, TRAINER_TENSORS), state


def _check_state_dict(model: Mapping[str, Tensor], config: ModelConfig) -> None:
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


def _remove_leftovers(run_folder: Path) -> None:
    """Removes what interrupted saves left behind, and makes sure that the run folder exists."""
    run_folder.mkdir(parents=True, exist_ok=True)
    for leftover in run_folder.iterdir():
        if _TEMPORARY_NAME.fullmatch(leftover.name):
            logger.warning("%s is what an interrupted save left, and was removed.", leftover)
            shutil.rmtree(leftover)


def _scored_state(step: int, trainer_state: Mapping[str, Any]) -> dict[str, Any]:
    val_loss = trainer_state.get("val_loss")
    score = float(val_loss) if val_loss is not None and math.isfinite(val_loss) else None
    return {**trainer_state, "step": step, "val_loss": score}


def _val_loss(folder: Path) -> float | None:
    try:
        val_loss = json.loads((folder / TRAINER_STATE).read_bytes())["val_loss"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s cannot be read and so has no score: %s", folder / TRAINER_STATE, error)
        return None
    return val_loss if isinstance(val_loss, float) and math.isfinite(val_loss) else None


def _is_sound(folder: Path) -> bool:
    try:
        verify_checkpoint(folder)
    except CheckpointError:
        return False
    return True


def _require_complete(folder: Path) -> None:
    """Raises the CheckpointError of a missing file or a wrong size; contents are not read."""
    files = read_complete(folder)
    for name in _REQUIRED | files.keys():
        verify_size(folder, name, files)


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(on_cpu, path, metadata={"format": "pt"})  # transformers asks for the format


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _read_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    verify_files(folder, [name])
    try:
        return load_file(folder / name)
    except SafetensorError as error:
        raise CheckpointError(f"{folder / name} is not a safetensors file: {error}") from error
