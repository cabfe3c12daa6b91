"""Validation loss, perplexity, next-token accuracy and bits per byte, over all windows of a token stream."""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from model.llama import Llama
from rayjob.training.feed import Windows
from rayjob.training.schedule import deal
from rayjob.training.step import Wishes, autocast


@dataclass(frozen=True, slots=True)
class Evaluation:
    val_loss: float  # nats per token
    accuracy: float  # share of next tokens that are the model's first choice
    bits_per_byte: float  # of the text the counted tokens stand for
    tokens: int
    bytes: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.val_loss, 700.0))  # e^709 is the greatest float

    def to_json(self) -> dict[str, float | int]:
        return asdict(self) | {"perplexity": self.perplexity}


class EvaluationAbandoned(Exception):
    """A worker wished to end training in the middle of an evaluation; raised in all workers alike."""

    def __init__(self, wishes: Wishes) -> None:
        super().__init__(f"the evaluation was abandoned: {wishes}")
        self.wishes = wishes


@torch.no_grad()
def evaluate(
    model: Llama,
    windows: Windows,
    byte_lengths: npt.NDArray[np.int64],
    *,
    batch_size: int,
    precision: torch.dtype,
    wishes: Callable[[], Wishes] = Wishes,
) -> Evaluation:
    """Returns the evaluation over every token but the first; all workers share the work and get the same answer.

    Args:
        model: the unwrapped model, (B, T) -> sums.
        byte_lengths: (V,) bytes of text per token.
        batch_size: windows per forward.
        wishes: this worker's, asked for before every batch.

    Raises:
        EvaluationAbandoned: a worker wishes to end training.
    """
    device = next(model.parameters()).device
    lengths = torch.from_numpy(byte_lengths.astype(np.int64))
    sums = torch.zeros(4, dtype=torch.float64)  # nats, correct, tokens, bytes; float64 adds exactly enough
    is_training = model.training
    model.eval()
    try:
        for batch in _batches(windows, batch_size):
            everyones = wishes().of_all(device)
            if everyones.ends_training:
                raise EvaluationAbandoned(everyones)
            if batch:
                sums += _sums_of(model, *batch, lengths, device, precision)
    finally:
        model.train(is_training)
    return _summarise(_all_reduce(sums, device))


def _batches(windows: Windows, batch_size: int) -> Iterator[tuple[Tensor, Tensor] | None]:
    """Yields this worker's batches: equally many on all workers, None where there is nothing left for this one."""
    rank, n_workers = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    dealt = deal(np.arange(len(windows)), rank, n_workers, batch_size)
    yield from (windows.batch(ids, len(ids)) if len(ids) else None for ids in dealt)
    yield windows.tail() if rank == 0 else None


def _sums_of(
    model: Llama, inputs: Tensor, targets: Tensor, lengths: Tensor, device: torch.device, precision: torch.dtype
) -> Tensor:
    """Returns nats, correct, tokens and bytes of a batch."""
    with autocast(device, precision):
        nats, correct, tokens = model(inputs.to(device), targets.to(device))
    n_bytes = lengths[targets[targets >= 0]].sum()
    return torch.tensor([nats.item(), correct.item(), tokens.item(), n_bytes.item()], dtype=torch.float64)


def _all_reduce(sums: Tensor, device: torch.device) -> Tensor:
    if dist.is_initialized():
        sums = sums.to(device)
        dist.all_reduce(sums)
    return sums.cpu()


def _summarise(sums: Tensor) -> Evaluation:
    nats, correct, tokens, n_bytes = sums.tolist()
    return Evaluation(
        val_loss=nats / tokens,
        accuracy=correct / tokens,
        bits_per_byte=nats / math.log(2) / n_bytes,
        tokens=int(tokens),
        bytes=int(n_bytes),
    )
