"""When to save, what a checkpoint of a run holds, and which are kept."""

import dataclasses
import logging
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from model.checkpoint import best_checkpoint, list_checkpoints, save_checkpoint, step_of
from model.llama import Llama
from rayjob.config import CheckpointConfig, JobConfig
from rayjob.store.runs import publish_run
from rayjob.training.evaluation import Evaluation
from rayjob.training.optimizer import optimizer_tensors

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """What, beside the model's shape, stays the same over a run: another one would be another run."""

    corpus: str  # hash of the manifest
    tokenizer: str
    seed: int
    global_batch_size: int  # with the seed it decides which windows belong to a step

    @classmethod
    def of(cls, config: JobConfig, corpus: str, tokenizer: str) -> "RunIdentity":
        return cls(corpus, tokenizer, config.seed, config.train.global_batch_size)


@dataclass(frozen=True, slots=True)
class RunState:
    """Everything a run is beside its tensors; with (seed, step) it determines what comes next."""

    identity: RunIdentity
    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0  # training time over all attempts, that of lost steps included
    cost_usd: float = 0.0  # likewise
    val_loss: float | None = None  # of this step's weights, where they were evaluated
    val_accuracy: float | None = None
    val_bits_per_byte: float | None = None

    def after_step(self, n_tokens: int) -> "RunState":
        """Returns the state one update later; an evaluation belongs to the weights before it."""
        return dataclasses.replace(
            self,
            step=self.step + 1,
            tokens=self.tokens + n_tokens,
            val_loss=None,
            val_accuracy=None,
            val_bits_per_byte=None,
        )

    def evaluated(self, evaluation: Evaluation) -> "RunState":
        return dataclasses.replace(
            self,
            val_loss=evaluation.val_loss,
            val_accuracy=evaluation.accuracy,
            val_bits_per_byte=evaluation.bits_per_byte,
        )

    def at_cost(self, elapsed_s: float, cost_usd: float) -> "RunState":
        return dataclasses.replace(self, elapsed_s=elapsed_s, cost_usd=cost_usd)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> "RunState":
        fields = {field.name: state[field.name] for field in dataclasses.fields(cls)}
        return cls(**fields | {"identity": RunIdentity(**fields["identity"])})


class SavePolicy:
    """Decides when a save is due by steps or by time; validation and the end of a run always save."""

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config
        self._last_time = time.monotonic()

    def is_due(self, step: int) -> bool:
        by_step = self._config.interval_steps is not None and step % self._config.interval_steps == 0
        elapsed_s = time.monotonic() - self._last_time
        return by_step or (self._config.interval_s is not None and elapsed_s >= self._config.interval_s)

    def saved(self) -> None:
        self._last_time = time.monotonic()


def save_run(
    run_folder: Path,
    model: Llama,
    optimizer: torch.optim.Optimizer,
    state: RunState,
    tokenizer_folder: Path,
    keep: int,
) -> Path:
    """Writes the checkpoint of `state.step`, removes the ones no longer kept, and returns its folder."""
    started = time.monotonic()
    folder = save_checkpoint(
        run_folder,
        state.step,
        model=model.state_dict(),
        config=model.config,
        tokenizer_folder=tokenizer_folder,
        trainer_tensors=optimizer_tensors(model, optimizer),
        trainer_state=state.to_json(),
    )
    prune(run_folder, state.step, keep)
    publish_run(run_folder)
    logger.info("saved %s in %.1f s", folder.name, time.monotonic() - started)
    return folder


def prune(run_folder: Path, step: int, keep: int) -> None:
    """Removes complete checkpoints up to `step` but the newest `keep` and the best by validation loss.

    One beyond `step` is damaged, or the run would have gone on from it: it takes no sound one's place.
    """
    reached = [folder for folder in list_checkpoints(run_folder) if step_of(folder) <= step]
    kept = {*reached[-keep:], best_checkpoint(run_folder)}
    for folder in reached:
        if folder not in kept:
            shutil.rmtree(folder)
