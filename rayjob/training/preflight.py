"""Checks before paid work, in every worker group and in seconds: a table of figures and verdicts, or a refusal.

1. The link: an all-reduce in a given time, and the bandwidth that it has.
2. A real forward, backward and all-reduce of the next step's first micro-batch, compiled if the run is; no update.
3. The storage: what a checkpoint weighs is written, synced and read back.
4. Space for all checkpoints that will be kept at once.

Nothing that the run computes depends on it. Rank 0 looks at the storage and tells the others, so that all go on or
none; whatever may hang has a time of its own.
"""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rayjob.config import JobConfig
from rayjob.hardware import find_gpu
from rayjob.step_time import checkpoint_bytes
from rayjob.training.ddp import Parallel
from rayjob.training.failure import StartRefusedError
from rayjob.training.feed import StepFeed
from rayjob.training.link import REMEDY, Link, measure_link, within
from rayjob.training.start import from_rank_0
from rayjob.training.step import autocast
from rayjob.training.storage_probe import StorageSpeed, free_bytes, measure_storage, missing_bytes

logger = logging.getLogger(__name__)

OK, SLOW, FAILED = "ok", "slow", "FAILED"
LINK_SHARE = 0.9  # of train.step_timeout_s: after Ray has named a worker that is frozen, before the group gives up
_STORAGE_SHARE = 0.8  # of the same, while the other workers wait for rank 0
_SLOW_LINK = 0.5  # of the bandwidth that is usual between such GPUs
_SLOW_SAVE_S = 60.0  # saves are in the background, but a preemption's deadline is not
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Check:
    """A line of the table."""

    name: str
    figure: str
    verdict: str
    remedy: str = ""  # where the verdict is not OK


def run_preflight(config: JobConfig, ddp: Parallel, feed: StepFeed, step: int, first_s: float) -> list[Check]:
    """Returns the checks after logging them; all ranks must call it together, with DDP's buckets settled.

    Args:
        step: that training goes on from.
        first_s: what the first forward and backward took, compilation included.

    Raises:
        StartRefusedError: a check failed.
        HangError: the workers' all-reduce or the storage does not answer in time.
    """
    device = ddp.device
    gradient_bytes = config.train.gradient_bytes * config.model.n_params
    link = measure_link(gradient_bytes, device, LINK_SHARE * config.train.step_timeout_s)
    checks = [_judge_link(link, device)] if link else []
    checks.append(_check_step(config, ddp, feed, step, first_s))
    checks += from_rank_0(_check_storage(config) if dist.get_rank() == 0 else [], device)
    if dist.get_rank() == 0:
        logger.info("preflight\n%s", render_checks(checks))
        for check in checks:
            if check.verdict == SLOW:
                logger.warning("preflight: %s is slow (%s): %s", check.name, check.figure, check.remedy)
    if failed := [f"{check.name}: {check.figure}; {check.remedy}" for check in checks if check.verdict == FAILED]:
        raise StartRefusedError(f"preflight failed, nothing was trained. {'. '.join(failed)}")
    return checks


def render_checks(checks: Sequence[Check]) -> str:
    """Returns the table."""
    width = max(len(check.figure) for check in checks)
    return "\n".join(f"  {check.name:<12} {check.figure:<{width}}  {check.verdict}" for check in checks)


def _judge_link(link: Link, device: torch.device) -> Check:
    gpu = find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    usual = f" (usual: {gpu.link_gb_per_s:.0f})" if gpu else ""
    figure = f"{link.bus_gb_per_s:.2f} GB/s{usual}, all gradients in {link.gradients_s:.4f} s"
    is_slow = gpu is not None and link.bus_gb_per_s < _SLOW_LINK * gpu.link_gb_per_s
    return Check("all-reduce", figure, SLOW if is_slow else OK, REMEDY)


def _check_step(config: JobConfig, ddp: Parallel, feed: StepFeed, step: int, first_s: float) -> Check:
    """Runs a micro-batch of the step to come as the step will, but for the update."""
    inputs, targets = feed.step_batch(step).micro_batches[0]
    _wait(ddp.device)
    started_at_s = time.perf_counter()
    with autocast(ddp.device, torch.bfloat16 if config.train.precision == "bf16" else torch.float32):
        sums = ddp(inputs, targets)
    sums.nats.backward()
    _wait(ddp.device)
    seconds = time.perf_counter() - started_at_s
    ddp.zero_grad(set_to_none=True)
    loss = sums.nats.item() / max(1, int(sums.tokens))
    compiled = "compiled" if config.train.is_compiled else "not compiled"
    figure = (
        f"{seconds:.3f} s for {inputs.shape[0]} windows, {inputs.numel() / seconds:,.0f} tokens/s a worker, "
        f"loss {loss:.3f} (first: {first_s:.1f} s, {compiled})"
    )
    if ddp.device.type == "cuda":
        figure += f", {torch.cuda.max_memory_allocated(ddp.device) / _GIB:.1f} GiB"
    # Not a failure: a single bad batch is skipped, and too many in a row end the run with their windows named.
    return Check("step", figure, OK if math.isfinite(loss) else "not finite")


def _check_storage(config: JobConfig) -> list[Check]:
    """Never raises but for a storage that hangs: the other ranks wait for the result."""
    folder, n_bytes = config.run_folder, checkpoint_bytes(config.model)
    limit_s = _STORAGE_SHARE * config.train.step_timeout_s
    late = f"{folder} took no {n_bytes / _GIB:.2f} GiB in {limit_s:.0f} s: its storage hangs, mount it again."
    try:
        space = _check_space(config, n_bytes)
        if space.verdict == FAILED:
            return [space]  # a write would only fill it up
        return [_judge_storage(within(limit_s, lambda: measure_storage(folder, n_bytes), late), n_bytes), space]
    except OSError as error:
        return [Check("storage", str(error), FAILED, "make `storage` writable, or choose another one")]


def _judge_storage(speed: StorageSpeed, n_bytes: int) -> Check:
    save_s = n_bytes / speed.write_bytes_per_s
    figure = (
        f"write {speed.write_bytes_per_s / 1e6:,.1f} MB/s, read {speed.read_bytes_per_s / 1e6:,.1f} MB/s, "
        f"a checkpoint of {n_bytes / _GIB:.2f} GiB in {save_s:.1f} s"
    )
    remedy = "a notice of some seconds is too short for a save: raise checkpoint.interval_s or take a faster storage"
    return Check("storage", figure, SLOW if save_s > _SLOW_SAVE_S else OK, remedy)


def _check_space(config: JobConfig, n_bytes: int) -> Check:
    free, needed = free_bytes(config.run_folder), missing_bytes(config.run_folder, n_bytes, config.checkpoint.keep)
    if free is None:
        return Check("free space", "the file system does not tell", OK)
    figure = f"{free / _GIB:,.2f} GiB, the checkpoints to come take {needed / _GIB:,.2f} GiB"
    remedy = "free space there, lower checkpoint.keep, or choose another `storage`"
    return Check("free space", figure, OK if free >= needed else FAILED, remedy)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
