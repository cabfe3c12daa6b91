"""How fast decoding could be if nothing but reading memory took time.

A decode step reads all weights once and, for each running sequence, the keys and values of its tokens:

    tokens/s <= batch x bandwidth / (weight bytes + batch x context x bytes per cached token)
"""

import time
from dataclasses import dataclass

import torch

from model.config import ModelConfig

REFERENCE = ModelConfig(vocab_size=50_304)
BYTES_PER_VALUE = 2  # bf16
WEIGHT_BYTES = REFERENCE.n_params * BYTES_PER_VALUE
KV_BYTES_PER_TOKEN = 2 * REFERENCE.n_layers * REFERENCE.n_kv_heads * REFERENCE.head_dim * BYTES_PER_VALUE


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What the memory allows for one model."""

    bandwidth_gb_s: float
    weight_bytes: int = WEIGHT_BYTES
    kv_bytes_per_token: int = KV_BYTES_PER_TOKEN

    def tokens_per_s(self, batch: float, context: float) -> float:
        """Returns the ceiling for `batch` sequences of `context` tokens each."""
        step_bytes = self.weight_bytes + batch * context * self.kv_bytes_per_token
        return batch * self.bandwidth_gb_s * 1e9 / step_bytes


def measure_bandwidth_gb_s(size_bytes: int = 1 << 29, repeats: int = 7) -> float:
    """Returns how many GB/s this machine reads at best: the sum of an array much larger than the caches.

    On the GPU if there is one, otherwise with as many threads as torch uses.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    values = torch.ones(size_bytes // 4, device=device)
    best_s = float("inf")
    for _ in range(repeats):
        started_at_s = time.perf_counter()
        values.sum().item()  # waits for the device
        best_s = min(best_s, time.perf_counter() - started_at_s)
    return size_bytes / best_s / 1e9
