"""The processes of one gloo group, for tests of what ranks do together; without Ray."""

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from model.config import ModelConfig
from model.llama import Llama
from rayjob.config import JobConfig, OptimizerConfig
from rayjob.training.ddp import wrap
from rayjob.training.feed import StepFeed
from rayjob.training.host_copy import rng_tensors
from rayjob.training.lone_worker import random_windows
from rayjob.training.optimizer import build_optimizer, optimizer_tensors
from rayjob.training.schedule import WindowOrder
from rayjob.training.start import settle_buckets
from rayjob.training.step import Wishes, train_step

CPU = torch.device("cpu")
TINY = ModelConfig(vocab_size=300, d_model=16, n_layers=2, n_heads=2, n_kv_heads=1, d_ff=16, max_seq_len=8)


class TinyWorker:
    """A rank's model and optimizer, whose steps are the product's; in a process group."""

    def __init__(self, config: JobConfig) -> None:
        self.config = config
        self.model = Llama(TINY)
        self.model.init_weights(0)
        self.ddp = wrap(self.model, config.train, CPU)
        self.optimizer = build_optimizer(self.model, OptimizerConfig())

    def open_feed(self, micro_batch_size: int) -> StepFeed:
        windows = random_windows(self.config, 64)
        order = WindowOrder(len(windows), self.config.train.global_batch_size, seed=1)
        feed = StepFeed(windows, order, micro_batch_size, dist.get_rank(), dist.get_world_size(), CPU)
        settle_buckets(self.ddp, feed, torch.float32)
        return feed

    def step(self, feed: StepFeed, index: int) -> None:
        settings: Any = {"lr": 1e-2, "grad_clip": 1.0, "precision": torch.float32, "wishes": Wishes}
        train_step(self.ddp, self.optimizer, feed.step_batch(index), **settings)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies of all that a step could change: weights, moments, random number generators."""
        found = self.model.state_dict() | optimizer_tensors(self.model, self.optimizer) | rng_tensors(CPU)
        return {name: tensor.detach().clone() for name, tensor in found.items()}


def run_ranks(function: Callable[..., Any], n_ranks: int, *arguments: Any) -> list[Any]:
    """Returns what `function(rank, meeting, *arguments)` returns in a process for each rank.

    `meeting` is for `init_process_group`: a file, for a free port may be taken by another process before it is used.
    """
    with tempfile.TemporaryDirectory() as folder, mp.get_context("spawn").Pool(n_ranks) as pool:
        meeting = f"file://{folder}/meeting"
        return pool.starmap(function, [(rank, meeting, *arguments) for rank in range(n_ranks)], chunksize=1)
