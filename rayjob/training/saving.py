"""When to save, what a checkpoint of a run holds, and which are kept."""

import dataclasses
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.checkpoint import best_checkpoint, list_checkpoints, step_of
from model.checkpoint_writer import remove_checkpoint
from rayjob.config import CheckpointConfig, JobConfig
from rayjob.config_file import to_tree
from rayjob.training.attempt import Attempt
from rayjob.training.evaluation import Evaluation
from rayjob.training.mlflow_sink import read_run_id

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """What, beside the model's shape, stays the same over a run: another one would be another run."""

    corpus: str  # hash of the manifest
    tokenizer: str
    seed: int
    global_batch_size: int  # with the seed it decides which windows belong to a step
    optimizer: str = "adamw"  # its moments are another's no use; checkpoints of early versions do not tell

    @classmethod
    def of(cls, config: JobConfig, corpus: str, tokenizer: str) -> "RunIdentity":
        return cls(corpus, tokenizer, config.seed, config.train.global_batch_size, config.optimizer.name)


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
    best_val_loss: float | None = None  # of the run so far
    best_step: int | None = None
    run_id: str | None = None  # of the run folder; checkpoints of early versions have none
    bad_in_row: int = 0  # steps whose gradient was not finite, up to and with `step`
    skipped_steps: int = 0  # of `step`, those whose gradient was not finite: the optimizer has counted fewer
    owes_evaluation: bool = False  # the one of this step was abandoned, and its row is not in metrics.csv yet
    owed_row: str = ""  # that row without the evaluation, as rank 0 has it

    @property
    def updates(self) -> int:
        """Updates of the weights."""
        return self.step - self.skipped_steps

    @property
    def recorded_step(self) -> int:
        """The last step that is done with all that belongs to it."""
        return self.step - self.owes_evaluation

    def after_step(self, n_tokens: int, is_skipped: bool = False) -> "RunState":
        """Returns the state one step later; an evaluation belongs to the weights before it."""
        return dataclasses.replace(
            self,
            step=self.step + 1,
            tokens=self.tokens + n_tokens,
            bad_in_row=self.bad_in_row + 1 if is_skipped else 0,
            skipped_steps=self.skipped_steps + is_skipped,
            val_loss=None,
            val_accuracy=None,
            val_bits_per_byte=None,
        )

    def evaluated(self, evaluation: Evaluation) -> "RunState":
        val_loss = evaluation.val_loss
        is_best = math.isfinite(val_loss) and (self.best_val_loss is None or val_loss < self.best_val_loss)
        return dataclasses.replace(
            self,
            val_loss=val_loss,
            val_accuracy=evaluation.accuracy,
            val_bits_per_byte=evaluation.bits_per_byte,
            best_val_loss=val_loss if is_best else self.best_val_loss,
            best_step=self.step if is_best else self.best_step,
            owes_evaluation=False,
        )

    def owing_evaluation(self) -> "RunState":
        return dataclasses.replace(self, owes_evaluation=True)

    def with_owed_row(self, row: str) -> "RunState":
        return dataclasses.replace(self, owed_row=row)

    def at_cost(self, elapsed_s: float, cost_usd: float) -> "RunState":
        return dataclasses.replace(self, elapsed_s=elapsed_s, cost_usd=cost_usd)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> "RunState":
        """Returns the state of a checkpoint; what it does not tell has its default."""
        fields = {field.name: state[field.name] for field in dataclasses.fields(cls) if field.name in state}
        return cls(**fields | {"identity": RunIdentity(**fields["identity"])})


class SavePolicy:
    """Decides when a save is due by steps or by time; validation and the end of a run always save.

    What fell due stays due until a save begins: one that fell due while another was being written comes after it.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config
        self._last_time = time.monotonic()
        self._was_due = False

    def is_due(self, step: int) -> bool:
        by_step = self._config.interval_steps is not None and step % self._config.interval_steps == 0
        elapsed_s = time.monotonic() - self._last_time
        by_time = self._config.interval_s is not None and elapsed_s >= self._config.interval_s
        self._was_due = self._was_due or by_step or by_time
        return self._was_due

    def save_begun(self) -> None:
        self._last_time = time.monotonic()
        self._was_due = False


def state_document(config: JobConfig, attempt: Attempt, state: RunState) -> dict[str, Any]:
    """Returns the content of a checkpoint's trainer/state.json: the state and all that tells where it came from."""
    return state.to_json() | {
        "attempt": attempt.id,
        "config": to_tree(config),
        "mlflow_run_id": read_run_id(config.run_folder),
    }


def prune(run_folder: Path, step: int, keep: int) -> None:
    """Removes complete checkpoints up to `step` but the newest `keep` and the best by validation loss.

    One beyond `step` is damaged, or the run would have gone on from it: it takes no sound one's place.
    """
    reached = [folder for folder in list_checkpoints(run_folder) if step_of(folder) <= step]
    kept = {*reached[-keep:], best_checkpoint(run_folder)}
    for folder in reached:
        if folder not in kept:
            try:
                remove_checkpoint(folder)
            except OSError as error:
                logger.warning("%s is no longer needed, but could not be removed: %s", folder, error)
