"""The model as the workers train it together: compiled where that pays, and wrapped in DistributedDataParallel.

`static_graph` stays off: it saves the search for unused parameters and helps activation checkpointing, and we have
neither. A worker that is alone has nobody to reduce gradients with, so it is spared DDP's buckets (the size of all
gradients) and the copying into them.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from model.llama import Llama
from rayjob.config import TrainConfig


class Alone(nn.Module):
    """In DDP's place where there is one worker: what a step asks of DDP, with nothing to reduce."""

    def __init__(self, module: Llama, device: torch.device) -> None:
        super().__init__()
        self.module = module
        self.device = device

    def forward(self, *args: Any) -> Any:
        return self.module(*args)

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()


Parallel = DistributedDataParallel | Alone
"""The model that a step runs."""


def wrap(model: Llama, train: TrainConfig, device: torch.device) -> Parallel:
    """Returns the model for the workers of the process group; its own parameters and their names stay as they are."""
    if train.is_compiled:
        model.compile_layers()
    if dist.get_world_size() == 1:
        return Alone(model, device)
    parallel = DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        forward_sync_buffers=False,
    )
    if train.allreduce_dtype == "bf16":
        parallel.register_comm_hook(dist.get_world_size(), _reduce_in_bf16)
    return parallel


def _reduce_in_bf16(n_workers: int, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """The mean of a bucket's fp32 gradients over the workers, sent and summed in bf16; torch's own hook wants NCCL."""
    gradients = bucket.buffer()
    work = dist.all_reduce(gradients.div(n_workers).bfloat16(), async_op=True)
    reduced: Future[Tensor] = work.get_future().then(lambda future: gradients.copy_(future.value()[0]))
    return reduced
