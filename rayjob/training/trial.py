"""A real forward and backward of a given micro-batch, which leaves weights, moments and generators as they were.

The model is called without DDP, so no gradient is reduced and no worker waits for another.
"""

import os
import time
from contextlib import suppress

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from model.llama import Llama
from rayjob.config import JobConfig
from rayjob.memory import activation_bytes
from rayjob.training.micro_batch_search import N_PASSES
from rayjob.training.step import autocast

_N_TIMED = N_PASSES - 1  # the fastest counts: whatever else the machine does only adds
_TIMED_S = 1.0  # after which no further one is timed
_MOST_OF_GPU = 0.9  # of its memory may be used: evaluation, samples and scattered free pieces need some too
_MOST_OF_HOST = 0.8  # of what is free


class MicroBatchTrial:
    """Tries sizes on this worker.

    Args:
        config: the job's.
        model: unwrapped, in training, without gradients.
        optimizer: the model's; before its first update, memory for its moments is held while a size is tried.
        device: of the model.
        precision: that forward computes in.
    """

    def __init__(
        self,
        config: JobConfig,
        model: Llama,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        precision: torch.dtype,
    ) -> None:
        self._config, self._model, self._optimizer = config, model, optimizer
        self._device, self._precision = device, precision

    def __call__(self, size: int) -> float | None:
        """Returns the seconds of a forward and backward, or None if there is not enough memory."""
        if self._device.type == "cpu" and not self._host_has_room(size):
            return None
        seconds = None
        with suppress(torch.OutOfMemoryError):
            seconds = self._time(size)
        if self._device.type == "cuda":
            seconds = seconds if self._gpu_has_room() else None
            torch.cuda.empty_cache()
        return seconds

    def _time(self, size: int) -> float:
        n_moments = 0 if self._optimizer.state else 2
        moments = torch.empty(n_moments * self._config.model.n_params, device=self._device)
        tokens = self._tokens(size)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        try:
            self._run(tokens)  # compiles, or fills the allocator
            seconds = [self._run(tokens)]
            while len(seconds) < _N_TIMED and sum(seconds) < _TIMED_S:
                seconds.append(self._run(tokens))
        finally:
            self._model.zero_grad(set_to_none=True)
        del moments
        return min(seconds)

    def _run(self, tokens: Tensor) -> float:
        self._wait()
        started_at_s = time.perf_counter()
        with autocast(self._device, self._precision):
            sums = self._model(tokens, tokens)
        sums.nats.backward()
        self._wait()
        return time.perf_counter() - started_at_s

    def _tokens(self, size: int) -> Tensor:
        """Returns (size, T) tokens that all count, drawn by no generator."""
        T = self._config.model.max_seq_len
        return (torch.arange(size * T, device=self._device) % self._config.model.vocab_size).view(size, T)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _host_has_room(self, size: int) -> bool:
        """Asked before: a host without memory ends the process."""
        n_workers = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))  # Ray Train sets it
        needed = n_workers * activation_bytes(self._config, size)
        return bool(needed <= _MOST_OF_HOST * psutil.virtual_memory().available)

    def _gpu_has_room(self) -> bool:
        """Whether the most that was used leaves some; a number that was asked for may use all."""
        total = torch.cuda.get_device_properties(self._device).total_memory
        used: int = torch.cuda.max_memory_allocated(self._device)
        return self._config.train.micro_batch_size != "auto" or used <= _MOST_OF_GPU * total
