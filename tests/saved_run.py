"""A tiny model that takes real optimizer steps and is saved as a worker saves it; needs a process group."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from model.config import ModelConfig
from model.llama import Llama
from rayjob.config import CheckpointConfig, JobConfig, OptimizerConfig
from rayjob.training.attempt import Attempt, begin_attempt
from rayjob.training.evaluation import Evaluation
from rayjob.training.optimizer import build_optimizer, optimizer_tensors
from rayjob.training.saver import Saver, SaverHooks
from rayjob.training.saving import RunIdentity, RunState, state_document

CHECKPOINT_FILES = [
    "COMPLETE",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "normalizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "trainer/state.json",
    "trainer/tensors.safetensors",
]
CONFIG = ModelConfig(vocab_size=290, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=16, max_seq_len=8)
IDENTITY = RunIdentity("corpus", "tokenizer", seed=7, global_batch_size=16)


class SavedRun:
    """One worker of a run.

    Args:
        folder: the run's; a new attempt begins in it unless one is given.
        tokenizer_folder: of any tokenizer.
        keep: newest checkpoints that stay.
        resumed: the state that is gone on from; weights and moments begin anew.
        attempt: of the other workers, which have begun it.
        flush: called before a commit.
        committed: called after it.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer_folder: Path,
        keep: int = 2,
        resumed: RunState | None = None,
        attempt: Attempt | None = None,
        flush: Callable[[], None] = lambda: None,
        committed: Callable[[Path], None] = lambda folder: None,
    ) -> None:
        self.folder = folder
        start = resumed or RunState(IDENTITY)
        self.attempt = attempt or begin_attempt(folder, start.step, start.run_id)
        config = JobConfig(storage=str(folder.parent.parent), run_name=folder.name, checkpoint=CheckpointConfig())
        self.reported: list[tuple[Path | None, RunState]] = []
        hooks = SaverHooks(
            describe=lambda state: state_document(config, self.attempt, state),
            flush=flush,
            committed=committed,
            report=lambda saved, state: self.reported.append((saved, state)),
        )
        self.model = Llama(CONFIG)
        self.model.init_weights(0)
        self.optimizer = build_optimizer(self.model, OptimizerConfig())
        self.state = dataclasses.replace(start, run_id=self.attempt.run_id)
        self.saver = Saver(folder, tokenizer_folder, keep, self.model, self.optimizer, self.attempt, hooks)

    def step(self) -> float:
        """Takes an optimizer step and returns its loss."""
        tokens = (torch.arange(8)[None] + self.state.step) % (CONFIG.vocab_size - 1)
        sums = self.model(tokens, tokens + 1)
        sums.nats.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state = self.state.after_step(8)
        return float(sums.nats.detach())

    def validate(self, val_loss: float) -> None:
        self.state = self.state.evaluated(Evaluation(val_loss, accuracy=0.5, bits_per_byte=1.0, tokens=8, bytes=8))

    def save(self) -> Path:
        """Saves the state and waits until it is on disk."""
        self.saver.finish(self.state)
        saved = self.reported[-1][0]
        assert saved is not None
        return saved

    def train(self, val_losses: list[float | None]) -> None:
        """Takes a step for each validation loss, and saves; None stands for no validation."""
        for val_loss in val_losses:
            self.step()
            if val_loss is not None:
                self.validate(val_loss)
            self.save()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns copies of weights and moments, under the names that a checkpoint has."""
        tensors = self.model.state_dict() | optimizer_tensors(self.model, self.optimizer)
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}
