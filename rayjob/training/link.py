"""The workers' link: whether a collective comes through at all, and how fast the all-reduce of the gradients is."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

_LEAST_BYTES, _MOST_BYTES = 1 << 20, 1 << 28  # of a timed all-reduce: below is latency, above only takes longer
_MOST_BYTES_ON_CPU = 1 << 25
_N_TIMED = 3

REMEDY = (
    "set NCCL_P2P_DISABLE=1 (GPUs whose peer-to-peer does not work), then NCCL_IB_DISABLE=1 (no InfiniBand) or "
    "NCCL_SOCKET_IFNAME (GLOO_SOCKET_IFNAME on CPUs) to the network's interface, in the environment of every node's "
    "`ray start`; NCCL_DEBUG=INFO shows where it hangs"
)


class HangError(RuntimeError):
    """Something did not end in its time; a new group of workers may have better luck, or names it again."""


@dataclass(frozen=True, slots=True)
class Link:
    """An all-reduce of the slowest worker."""

    bus_gb_per_s: float  # NCCL's measure: bytes that each worker sends and receives
    gradients_s: float  # all of the model's, in fp32, at this bandwidth


def within(limit_s: float, work: Callable[[], T], late: str) -> T:
    """Returns what `work` returns; it runs in a thread, which is left behind if it hangs.

    Raises:
        HangError: with the message `late`, when the time is up.
    """
    found: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="preflight", daemon=True)
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors[0]
    if not found:
        raise HangError(late)
    return found[0]


def require_link(device: torch.device, limit_s: float) -> None:
    """Has all workers add up one number; the first collective of a group, so it also opens the connections.

    Raises:
        HangError: it takes longer than the limit, on every rank that waits.
    """
    if dist.get_world_size() == 1:
        return
    late = (
        f"rank {dist.get_rank()} of {dist.get_world_size()} waited {limit_s:.0f} s for an all-reduce of one number: "
        f"a worker hangs, or they cannot reach one another: {REMEDY}."
    )
    within(limit_s, lambda: _all_reduce_s(torch.ones(1, device=device)), late)


def measure_link(gradient_bytes: int, device: torch.device, limit_s: float) -> Link | None:
    """Returns the speed of the all-reduce between the workers, the same on all of them; None for a lone one.

    Args:
        gradient_bytes: of all gradients, once a step.

    Raises:
        HangError: it takes longer than the limit.
    """
    n_workers = dist.get_world_size()
    if n_workers == 1:
        return None
    n_bytes = min(max(gradient_bytes, _LEAST_BYTES), _MOST_BYTES if device.type == "cuda" else _MOST_BYTES_ON_CPU)

    def measure() -> float:
        numbers = torch.zeros(n_bytes // 4, device=device)
        _all_reduce_s(numbers)  # also waits for workers that come later
        seconds = torch.tensor([min(_all_reduce_s(numbers) for _ in range(_N_TIMED))], device=device)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return seconds.item()

    late = f"rank {dist.get_rank()} waited {limit_s:.0f} s for all-reduces of {n_bytes >> 20} MiB: {REMEDY}."
    bytes_per_s = n_bytes / within(limit_s, measure, late)
    return Link(2 * (n_workers - 1) / n_workers * bytes_per_s / 1e9, gradient_bytes / bytes_per_s)


def _all_reduce_s(numbers: torch.Tensor) -> float:
    if numbers.is_cuda:
        torch.cuda.synchronize(numbers.device)
    started_at_s = time.perf_counter()
    dist.all_reduce(numbers)
    if numbers.is_cuda:
        torch.cuda.synchronize(numbers.device)
    return time.perf_counter() - started_at_s
