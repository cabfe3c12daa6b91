"""The checkpoint format: a Hugging Face Llama folder that is either complete or as good as absent.

    step_00001200/
      model.safetensors  config.json  generation_config.json     what LlamaForCausalLM loads, fp32
      tokenizer.model  tokenizer_config.json  normalizer.json …  the tokenizer folder's files
      trainer/tensors-00001-of-00004.safetensors …               optimizer and RNG, a file from each rank;
                                                                 of one rank, trainer/tensors.safetensors
      trainer/state.json                                         what else a resumed training needs
      COMPLETE                                                   every file's size and sha256

`model/checkpoint_writer.py` writes it. A loader compares each file with COMPLETE before it reads it, and reads
nothing but safetensors and JSON: nothing is unpickled.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from model.complete import COMPLETE, CheckpointError, read_complete, verify_files, verify_size
from model.config import ModelConfig
from model.llama import Llama

logger = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TRAINER_STATE = "trainer/state.json"

_NAME = re.compile(r"step_(\d{8,})")
_SHARD_NAME = re.compile(r"trainer/tensors-\d{5}-of-(\d{5})\.safetensors")


def checkpoint_name(step: int) -> str:
    """Returns the folder name of a step's checkpoint, such as step_00001200."""
    return f"step_{step:08d}"


def step_of(folder: Path) -> int:
    """Returns the step that a checkpoint's folder is named after."""
    return int(folder.name.removeprefix("step_"))


def trainer_tensors_name(rank: int, n_ranks: int) -> str:
    """Returns the name of the file that one of `n_ranks` ranks writes its trainer tensors to."""
    if n_ranks == 1:
        return "trainer/tensors.safetensors"
    return f"trainer/tensors-{rank + 1:05d}-of-{n_ranks:05d}.safetensors"


def verify_checkpoint(folder: Path) -> None:
    """Compares every file with its size and sha256 in COMPLETE.

    Raises:
        CheckpointError: a file is missing or differs, COMPLETE included.
    """
    files = read_complete(folder)
    verify_files(folder, _required(files) | files.keys())


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
    """Returns the trainer's tensors and its state; raises as the two functions below do."""
    return load_trainer_tensors(folder), read_trainer_state(folder)


def read_trainer_state(folder: Path) -> dict[str, Any]:
    """Returns the trainer's state as it was saved.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    verify_files(folder, [TRAINER_STATE])
    state: dict[str, Any] = json.loads((folder / TRAINER_STATE).read_bytes())
    return state


def load_trainer_tensors(folder: Path) -> dict[str, Tensor]:
    """Returns the trainer's tensors, on the CPU, as they were saved by however many ranks.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    tensors: dict[str, Tensor] = {}
    for name in sorted(_trainer_tensors_names(read_complete(folder))):
        tensors |= _read_tensors(folder, name)
    return tensors


def _val_loss(folder: Path) -> float | None:
    try:
        val_loss = read_trainer_state(folder)["val_loss"]  # compared with its hash: a flipped bit makes another score
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s cannot be read and so has no score: %s", folder / TRAINER_STATE, error)
        return None
    return val_loss if isinstance(val_loss, float) and math.isfinite(val_loss) else None


def _require_complete(folder: Path) -> None:
    """Raises the CheckpointError of a missing file or a wrong size; contents are not read."""
    files = read_complete(folder)
    for name in _required(files) | files.keys():
        verify_size(folder, name, files)


def _required(files: Iterable[str]) -> set[str]:
    """Returns the names that a COMPLETE with these names must have."""
    return {WEIGHTS, CONFIG, GENERATION_CONFIG, TRAINER_STATE} | _trainer_tensors_names(files)


def _trainer_tensors_names(files: Iterable[str]) -> set[str]:
    """Returns the names of the trainer's tensor files, of which COMPLETE may lack some."""
    n_ranks = max((int(match[1]) for name in files if (match := _SHARD_NAME.fullmatch(name))), default=1)
    return {trainer_tensors_name(rank, n_ranks) for rank in range(n_ranks)}


def _read_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    verify_files(folder, [name])
    try:
        return load_file(folder / name)
    except SafetensorError as error:
        raise CheckpointError(f"{folder / name} is not a safetensors file: {error}") from error
