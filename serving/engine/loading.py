"""From a checkpoint or run folder to a model that may serve: verified, finite, with its own tokenizer."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from model.checkpoint import (
    TRAINER_STATE,
    WEIGHTS,
    load_model,
    resolve_checkpoint,
    verify_checkpoint,
)
from model.complete import CheckpointError
from model.llama import Llama
from model.tokenizer import Tokenizer
from serving.engine.own_thread import in_own_thread


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """A model with all that an answer says about it.

    Attributes:
        sha256: Hash of the weights file.
    """

    name: str
    folder: Path
    step: int
    sha256: str
    model: Llama
    tokenizer: Tokenizer

    @property
    def max_seq_len(self) -> int:
        return self.model.config.max_seq_len


def load_served_model(path: Path, *, name: str | None = None) -> ServedModel:
    """Returns the model of a checkpoint, or of a run folder's best one, on the GPU if there is one.

    Args:
        path: A checkpoint or a run folder.
        name: Name in answers; by default that of the run folder.

    Raises:
        CheckpointError: The folder is missing, torn, not finite, or its parts are not of one model.
    """
    return in_own_thread(lambda: _load(path, name))


def _load(path: Path, name: str | None) -> ServedModel:
    folder = resolve_checkpoint(path)
    verify_checkpoint(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(folder, device=device)
    tokenizer = _load_tokenizer(folder)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise CheckpointError(
            f"{folder} mixes two models: its tokenizer has {tokenizer.vocab_size} tokens, but its embedding "
            f"has {model.config.vocab_size} rows."
        )
    with (folder / WEIGHTS).open("rb") as weights:
        sha256 = hashlib.file_digest(weights, "sha256").hexdigest()
    step = int(json.loads((folder / TRAINER_STATE).read_bytes())["step"])
    name = name or folder.resolve().parent.name
    return ServedModel(name, folder, step, sha256, model, tokenizer)


def _load_tokenizer(folder: Path) -> Tokenizer:
    try:
        return Tokenizer.load(folder)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
