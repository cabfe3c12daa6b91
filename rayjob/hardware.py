"""GPU types: the one place for peaks, memory and prices.

Peaks are dense bf16 with fp32 accumulation, from the vendors' data sheets; prices are typical spot prices per GPU.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str  # as part of torch.cuda.get_device_name()
    peak_tflops: float
    memory_gib: float
    usd_per_hour: float


GPUS = (
    Gpu("RTX 5090", 209.5, 32, 0.64),
    Gpu("RTX 4090", 165.2, 24, 0.35),
    Gpu("L40S", 362.0, 48, 0.80),
    Gpu("A100", 312.0, 80, 1.20),
    Gpu("H100", 989.4, 80, 2.00),
    Gpu("H200", 989.4, 141, 2.60),
    Gpu("B200", 2250.0, 180, 4.00),
)


def find_gpu(device_name: str) -> Gpu | None:
    """Returns the known GPU whose name is a part of `device_name`, or None: an unknown GPU has no MFU."""
    return next((gpu for gpu in GPUS if gpu.name in device_name), None)


def mfu_pct(flops_per_token: float, tokens_per_s: float, n_gpus: int, gpu: Gpu) -> float:
    """Returns model FLOPs utilisation in percent (PaLM, arXiv:2204.02311, appendix B)."""
    return 100 * flops_per_token * tokens_per_s / (n_gpus * gpu.peak_tflops * 1e12)
