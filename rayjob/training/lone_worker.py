"""One worker without Ray and without others: the step of a run, for profiles, benchmarks and the golden curve."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist

from model.llama import Llama
from rayjob.config import ConfigError, JobConfig
from rayjob.training.ddp import wrap
from rayjob.training.feed import StepBatch, StepFeed, Windows
from rayjob.training.optimizer import build_optimizer
from rayjob.training.schedule import WindowOrder, learning_rate
from rayjob.training.step import StepResult, Wishes, train_step


@contextmanager
def lone_process_group(use_gpu: bool) -> Iterator[torch.device]:
    """Opens a process group of this process alone, and yields the device that it trains on.

    Raises:
        ConfigError: use_gpu without a GPU.
    """
    if use_gpu and not torch.cuda.is_available():
        raise ConfigError(["train.use_gpu=true, but this machine has no GPU: set train.use_gpu=false."])
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "nccl" if use_gpu else "gloo", init_method=f"file://{folder}/store", world_size=1, rank=0
        )
        try:
            yield torch.device("cuda" if use_gpu else "cpu")
        finally:
            dist.destroy_process_group()


class LoneWorker:
    """Takes a worker's share of each step.

    Args:
        config: the job's.
        windows: what it trains on.
        device: of an open process group.
        n_steps: of the whole run, which the learning rate depends on.
        n_workers: among whom a step's windows are dealt.
        rank: of this one.
    """

    def __init__(
        self, config: JobConfig, windows: Windows, device: torch.device, n_steps: int, n_workers: int, rank: int = 0
    ) -> None:
        self._config, self._n_steps = config, n_steps
        self.precision = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
        self.model = Llama(config.model)
        self.model.init_weights(config.seed)
        self._ddp = wrap(self.model.to(device), config.train, device)
        self._optimizer = build_optimizer(self.model, config.optimizer)
        order = WindowOrder(len(windows), config.train.global_batch_size, config.seed)
        self._feed = StepFeed(windows, order, config.train.assumed_micro_batch_size, rank, n_workers, device)

    def batch(self, index: int) -> StepBatch:
        """Returns this worker's hand of step `index`."""
        return self._feed.step_batch(index)

    def step(self, index: int, batch: StepBatch) -> StepResult:
        """Takes the update of `index` on `batch`."""
        return train_step(
            self._ddp,
            self._optimizer,
            batch,
            lr=learning_rate(self._config.optimizer, index, self._n_steps),
            grad_clip=self._config.train.grad_clip,
            precision=self.precision,
            wishes=Wishes,
        )


def random_windows(config: JobConfig, n_windows: int) -> Windows:
    """Returns windows of random tokens, low ones more often, so that there is something to learn."""
    n_tokens = n_windows * config.model.max_seq_len + 1
    uniform = np.random.default_rng(config.seed).random(n_tokens)
    tokens = (uniform**3 * config.model.vocab_size).astype(np.uint16)
    return Windows(tokens, config.model.max_seq_len)
