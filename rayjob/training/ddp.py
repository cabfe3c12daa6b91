"""The model as the workers train it together: compiled where that pays, and wrapped in DistributedDataParallel.

`static_graph` stays off: it saves the search for unused parameters and helps activation checkpointing, and we have
neither.
"""

import torch
from torch.nn.parallel import DistributedDataParallel

from model.llama import Llama
from rayjob.config import TrainConfig


def wrap(model: Llama, train: TrainConfig, device: torch.device) -> DistributedDataParallel:
    """Returns the model under DDP; its own parameters and their names stay as they are."""
    if train.is_compiled:
        model.compile_layers()
    return DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        forward_sync_buffers=False,
    )
