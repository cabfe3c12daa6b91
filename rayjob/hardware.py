"""GPU types: the one place for peaks, memory, links and prices.

Peaks are dense bf16 with fp32 accumulation. Data sheets that give only the figure with sparsity are halved. A GPU is
known by the exact name that its driver gives, because a type's variants differ: an H100 PCIe has three quarters of an
H100 SXM's peak. An unknown name has no MFU; a guess would be worse than none.
"""

from dataclasses import dataclass

_BLACKWELL = "NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix A"
_ADA = "NVIDIA Ada GPU Architecture whitepaper, appendix A"


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    device_names: tuple[str, ...]  # as torch.cuda.get_device_name() gives them
    peak_tflops: float
    source: str  # of the peak
    memory_gib: float
    memory_gb_per_s: float
    link_gb_per_s: float  # bus bandwidth that NCCL's all-reduce typically reaches between the GPUs of one machine
    usd_per_hour: float  # typical spot price


GPUS = (
    # No peer-to-peer on the consumer cards: NCCL goes through the host's memory.
    Gpu("RTX 5090", ("NVIDIA GeForce RTX 5090",), 209.5, _BLACKWELL, 32, 1792, 15, 0.64),
    Gpu("RTX 4090", ("NVIDIA GeForce RTX 4090",), 165.2, _ADA, 24, 1008, 10, 0.35),
    Gpu("L40S", ("NVIDIA L40S",), 362.05, "NVIDIA L40S data sheet", 48, 864, 15, 0.80),
    Gpu(
        "A100",
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe", "NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
        312.0,
        "NVIDIA A100 data sheet",
        80,
        2039,
        230,
        1.20,
    ),
    Gpu("H100", ("NVIDIA H100 80GB HBM3",), 989.4, "NVIDIA H100 data sheet, SXM", 80, 3350, 360, 2.00),
    Gpu("H100 PCIe", ("NVIDIA H100 PCIe",), 756.5, "NVIDIA H100 data sheet, PCIe", 80, 2039, 25, 1.80),
    Gpu("H200", ("NVIDIA H200",), 989.4, "NVIDIA H200 data sheet, SXM", 141, 4800, 360, 2.60),
    Gpu("B200", ("NVIDIA B200",), 2250.0, "NVIDIA HGX B200 data sheet", 180, 8000, 700, 4.00),
)


def find_gpu(device_name: str) -> Gpu | None:
    """Returns the GPU of exactly this name, or None: an unknown GPU has no MFU."""
    return next((gpu for gpu in GPUS if device_name in gpu.device_names), None)


def mfu_pct(flops_per_token: float, tokens_per_s: float, n_devices: int, peak_tflops: float) -> float:
    """Returns model FLOPs utilisation in percent (PaLM, arXiv:2204.02311, appendix B)."""
    return 100 * flops_per_token * tokens_per_s / (n_devices * peak_tflops * 1e12)
