"""A model of the time of one optimizer step on N GPUs of a type, for `plan`: compute, all-reduce, update.

    compute    = tokens x FLOPs a token / (N x peak x efficiency)
    all-reduce = 2 (N - 1) / N x 4 bytes x parameters / link       (a ring, once a step; 2 bytes if reduced in bf16)
    exposed    = embedding's share of it + what of the rest is longer than the last backward
    update     = 28 bytes x parameters / memory bandwidth          (AdamW reads 16 bytes a parameter and writes 12)
    step       = compute + exposed + update

The backward of the last micro-step, two thirds of its compute, hides the all-reduce of the layers. It cannot hide that
of the embedding: being the head too, its gradient is complete only at the very end.

The global batch stays the same as workers are added, and so do the learning rate and the curve: a worker's micro-batch
shrinks once there are more workers than micro-batches.
"""

import math
from dataclasses import dataclass

from model.config import ModelConfig
from rayjob.config import JobConfig
from rayjob.hardware import Gpu

_UPDATE_BYTES = 28


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step; `step_s` is their sum, for what is hidden is not in `exposed_s`."""

    compute_s: float
    all_reduce_s: float
    exposed_s: float  # part of the all-reduce that nothing hides
    update_s: float

    @property
    def step_s(self) -> float:
        return self.compute_s + self.exposed_s + self.update_s


def step_time(config: JobConfig, gpu: Gpu, n_gpus: int, efficiency: float) -> StepTime:
    """Returns the parts of a step.

    Args:
        efficiency: share of the peak that forward and backward reach, in (0, 1].
    """
    model = config.model
    flops = config.tokens_per_step * model.flops_per_token
    compute_s = flops / (n_gpus * gpu.peak_tflops * 1e12 * efficiency)
    seconds_per_parameter = 2 * (n_gpus - 1) / n_gpus * config.train.gradient_bytes / (gpu.link_gb_per_s * 1e9)
    all_reduce_s = seconds_per_parameter * model.n_params
    embedding_s = seconds_per_parameter * model.vocab_size * model.d_model
    last_backward_s = compute_s / micro_steps(config, n_gpus) * 2 / 3
    return StepTime(
        compute_s=compute_s,
        all_reduce_s=all_reduce_s,
        exposed_s=embedding_s + max(0.0, all_reduce_s - embedding_s - last_backward_s),
        update_s=_UPDATE_BYTES * model.n_params / (gpu.memory_gb_per_s * 1e9),
    )


def micro_steps(config: JobConfig, n_gpus: int) -> int:
    """Returns a worker's micro-steps at the configured micro-batch, or 1 where its share is smaller than that."""
    return max(1, math.ceil(config.train.global_batch_size / (config.train.assumed_micro_batch_size * n_gpus)))


def micro_batch_size(config: JobConfig, n_gpus: int) -> int:
    """Returns the windows of a worker's forward: the configured ones, or its whole share of the batch if smaller."""
    return min(config.train.assumed_micro_batch_size, max(1, config.train.global_batch_size // n_gpus))


def checkpoint_bytes(model: ModelConfig) -> int:
    """Returns the size of a checkpoint: weights and two moments in fp32."""
    return 3 * 4 * model.n_params


def fit_efficiency(config: JobConfig, gpu: Gpu, n_gpus: int, step_s: float) -> float:
    """Returns the efficiency at which the model's step takes `step_s`; 1 where no efficiency is enough."""
    low, high = 1e-4, 1.0
    for _ in range(50):  # a step gets shorter with efficiency, so halving finds it
        middle = (low + high) / 2
        if step_time(config, gpu, n_gpus, middle).step_s > step_s:
            low = middle
        else:
            high = middle
    return high
