"""The micro-batch of a worker group, found before step 1: `train.micro_batch_size: auto`, or what fits of a number.

1. What was found before on this device by as many workers is taken again: the sums of a step depend on it, so a
   resumed run must not measure anew.
2. Of `auto`, sizes are tried (see `micro_batch_search.py`). A number is tried on a GPU only, to see whether it fits:
   too little memory of a host is no error but the end of a process.
3. All workers try a size at once, and no collective runs meanwhile: who is out of memory keeps nobody waiting. Then
   they agree on whether it fitted everywhere and on the slowest one's time, so all decide alike.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rayjob.atomic import read_object, write_atomically
from rayjob.config import JobConfig
from rayjob.lease import Fence
from rayjob.training.micro_batch_search import Measured, doubling, largest_that_fits, search
from rayjob.training.start import from_rank_0

logger = logging.getLogger(__name__)

MICRO_BATCH_FILE = "micro_batch.json"
BUDGET_S = 45.0  # no further size is tried that would end later; the first has to be compiled in any case
_EQUAL = 1.01  # up to 1 % longer a step is no slower: the largest is taken, its backward hides more of the all-reduce
_FIRST_TOKENS = {"cuda": 16_384, "cpu": 1_024}  # of a forward at the first size of `auto`

Trial = Callable[[int], float | None]
"""Returns the seconds of a forward and backward of a size on this worker; None: it is out of memory."""


def settle_micro_batch(config: JobConfig, trial: Trial, device: torch.device, fence: Fence) -> int:
    """Returns the windows per forward, the same on all ranks; all must call it together, before step 1.

    Raises:
        StartRefusedError: not even one window fits.
    """
    train, is_rank_0 = config.train, dist.get_rank() == 0
    path, key = config.run_folder / MICRO_BATCH_FILE, _key_of(config, device)
    known: int | None = from_rank_0(
        read_object(path).get(key, {}).get("micro_batch_size") if is_rank_0 else None, device
    )
    if known is not None and known in train.micro_batch_sizes:
        if is_rank_0:
            logger.info("micro-batch: %d windows, as found before on this device by as many workers", known)
        return known
    if train.micro_batch_size != "auto" and device.type != "cuda":
        return train.micro_batch_size
    tried = _try_sizes(config, _agreed(trial, device), device)
    if train.is_compiled and len(tried) > 1:
        torch.compiler.reset()  # dynamo refuses a function that was compiled for many shapes
    step_s = {at.size: _step_s(config, at.size, at.micro_step_s) for at in tried if at.micro_step_s is not None}
    chosen = max(size for size, seconds in step_s.items() if seconds <= _EQUAL * min(step_s.values()))
    if is_rank_0 and chosen != train.micro_batch_size:
        fence.check()
        _remember(path, key, {"micro_batch_size": chosen, "step_s": {str(size): s for size, s in step_s.items()}})
        logger.info(_describe(chosen, tried, step_s))
    return chosen


@contextmanager
def naming_smaller_size(config: JobConfig, size: int) -> Iterator[None]:
    """Has an error of the device's memory say which micro-batch to set: weights may have changed, so none is tried."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        smaller = max((allowed for allowed in config.train.micro_batch_sizes if allowed <= size // 2), default=None)
        remedy = f"set train.micro_batch_size={smaller}" if smaller else "lower model.max_seq_len"
        raise torch.OutOfMemoryError(f"micro-batches of {size} windows are out of memory: {remedy}. {error}") from error


def _try_sizes(config: JobConfig, measure: Callable[[int], Measured], device: torch.device) -> list[Measured]:
    sizes, given = config.train.micro_batch_sizes, config.train.micro_batch_size
    if given != "auto":
        return [largest_that_fits(sizes, given, measure)]
    ladder, T = doubling(sizes), config.model.max_seq_len
    first = max(size for size in ladder if size == 1 or size * T <= _FIRST_TOKENS[device.type])
    return search(ladder, first, measure, lambda size, seconds: _step_s(config, size, seconds), BUDGET_S)


def _agreed(trial: Trial, device: torch.device) -> Callable[[int], Measured]:
    """Returns the trial of a size as all ranks make it together."""
    began_at_s = time.monotonic()

    def measure(size: int) -> Measured:
        seconds = trial(size)
        told = [float(seconds is not None), -(seconds or 0.0), began_at_s - time.monotonic()]
        least = torch.tensor(told, dtype=torch.float64, device=device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        fits, slowest, elapsed = least.tolist()
        return Measured(size, -slowest if fits else None, -elapsed)

    return measure


def _step_s(config: JobConfig, size: int, micro_step_s: float) -> float:
    """Returns the forwards and backwards of a step: all workers do as many as the one with the most windows."""
    return math.ceil(config.train.global_batch_size / (size * dist.get_world_size())) * micro_step_s


def _key_of(config: JobConfig, device: torch.device) -> str:
    """Names all that the choice depends on, so that another device or number of workers makes its own."""
    train = config.train
    is_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_gpu else f"CPU, {torch.get_num_threads()} threads"
    compiled = "compiled" if train.is_compiled else "not compiled"
    batch = f"{train.micro_batch_size} of {train.global_batch_size} windows of {config.model.max_seq_len} tokens"
    model = f"{config.model.n_params} parameters in {config.model.n_layers} layers"
    return f"{dist.get_world_size()} x {name}, {train.precision}, {compiled}, {model}, {batch}"


def _remember(path: Path, key: str, found: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(read_object(path) | {key: found}, indent=2).encode() + b"\n")


def _describe(chosen: int, tried: list[Measured], step_s: dict[int, float]) -> str:
    of_sizes = (f"{at.size}: {step_s[at.size]:.3f} s" if at.size in step_s else f"{at.size}: no memory" for at in tried)
    return f"micro-batch: {chosen} windows, found in {tried[-1].elapsed_s:.1f} s ({', '.join(of_sizes)} a step)"
