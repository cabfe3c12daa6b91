"""How a worker starts: its device, the model and optimizer as new or as saved, its attempt, and DDP's buckets."""

import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import ray.train.torch
import torch
import torch.distributed as dist
from torch import Tensor

from model.checkpoint import load_model
from model.checkpoint_writer import remove_leftovers
from model.llama import Llama
from rayjob.config import JobConfig
from rayjob.lease import Fence
from rayjob.training.attempt import Attempt, begin_attempt
from rayjob.training.ddp import Parallel
from rayjob.training.feed import StepFeed
from rayjob.training.optimizer import build_optimizer, load_optimizer_tensors
from rayjob.training.recovery import load_run, settle_checkpoints
from rayjob.training.saving import RunIdentity, RunState
from rayjob.training.step import autocast

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Start:
    """What training goes on from; without a folder it is step 0."""

    model: Llama
    optimizer: torch.optim.Optimizer
    state: RunState
    folder: Path | None = None
    rng: dict[str, Tensor] = field(default_factory=dict)  # the saved states of random number generators


def from_rank_0(mine: T, device: torch.device) -> T:
    """Returns what rank 0 has, on all ranks."""
    everyones = [mine]
    dist.broadcast_object_list(everyones, device=device)
    return everyones[0]


def set_up_device(n_workers: int) -> torch.device:
    """Returns this worker's device, its own GPU or its share of the cores."""
    device = ray.train.torch.get_device()
    if device.type == "cpu":
        # Workers of one machine share its cores; the sums of a step are reproducible for a fixed number of threads.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // n_workers))
    return device


def start_or_resume(config: JobConfig, identity: RunIdentity, device: torch.device) -> Start:
    """Makes the run's first weights, or loads its newest sound checkpoint.

    Raises:
        CheckpointError: the checkpoint is of another run or shape.
    """
    # Rank 0 looks and tells the others, so that all go on from the same folder.
    folder = from_rank_0(settle_checkpoints(config.run_folder) if dist.get_rank() == 0 else None, device)
    if folder is None:
        model = Llama(config.model)
        model.init_weights(config.seed)
        model.to(device)
        return Start(model, build_optimizer(model, config.optimizer), RunState(identity))
    tensors, state = load_run(folder, config.model, identity)
    model = load_model(folder, device=str(device)).train()
    optimizer = build_optimizer(model, config.optimizer)
    if state.updates:
        load_optimizer_tensors(model, optimizer, tensors, state.updates)
    if dist.get_rank() == 0:
        logger.warning("resuming from %s", folder)
    rng = {name: tensor for name, tensor in tensors.items() if name.startswith("rng.")}
    return Start(model, optimizer, state, folder, rng)


def begin_group_attempt(run_folder: Path, fence: Fence, state: RunState, device: torch.device) -> Attempt:
    """Makes this worker group the one that writes the run, and removes what an earlier one left unfinished."""
    begun = None
    if dist.get_rank() == 0:
        fence.check()
        begun = begin_attempt(run_folder, state.step, state.run_id)
        remove_leftovers(run_folder)
    attempt = from_rank_0(begun, device)
    assert attempt is not None
    return attempt


def settle_buckets(ddp: Parallel, feed: StepFeed, precision: torch.dtype) -> float:
    """Lets DDP group its gradients before the first step, and returns the seconds that this first pass took.

    DDP regroups them after its first backward, and the order of summation depends on the groups. Without this a
    resumed run's first step would add in another order than the undisturbed run's.
    """
    started_at_s = time.perf_counter()
    with autocast(ddp.device, precision):  # as in a step: no other memory, and nothing compiled that no step uses
        sums = ddp(*feed.padding())
    sums.nats.backward()
    if ddp.device.type == "cuda":
        torch.cuda.synchronize(ddp.device)
    ddp.zero_grad(set_to_none=True)
    return time.perf_counter() - started_at_s
