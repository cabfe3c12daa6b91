"""The peak that a worker's MFU is a share of: a GPU's from its data sheet, a CPU's as measured."""

import logging
import time
from dataclasses import dataclass

import torch

from rayjob.hardware import find_gpu

logger = logging.getLogger(__name__)

# A square product that is large enough for the peak, and small enough to take milliseconds.
_SIZE = 1024
_REPEATS = 10


@dataclass(frozen=True, slots=True)
class Peak:
    name: str
    tflops: float
    basis: str


def peak_of(device: torch.device, precision: torch.dtype) -> Peak | None:
    """Returns the peak of one worker's device at the precision it computes in.

    None for an unknown GPU, and for fp32 on a GPU: the table's peaks are those of bf16. A CPU has no data sheet to go
    by, so the fastest product of two square matrices with this process's threads stands for its peak.
    """
    if device.type != "cuda":
        return _cpu_peak(precision)
    name = torch.cuda.get_device_name(device)
    gpu = find_gpu(name)
    if gpu is None:
        logger.warning("No peak is known for %s: mfu_pct stays empty.", name)
    return Peak(gpu.name, gpu.peak_tflops, gpu.source) if gpu and precision == torch.bfloat16 else None


def _cpu_peak(precision: torch.dtype) -> Peak:
    """Measures for a fraction of a second."""
    threads, dtype = torch.get_num_threads(), str(precision).removeprefix("torch.")
    a = torch.ones(_SIZE, _SIZE, dtype=precision)
    seconds = []
    for _ in range(_REPEATS):
        started_at_s = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - started_at_s)
    return Peak(f"CPU, {threads} threads", 2 * _SIZE**3 / min(seconds) / 1e12, f"measured: {dtype} matrix product")
