"""What each rank writes of a checkpoint, and its copy in host memory.

DDP ranks hold equal weights and moments, so nothing is gathered: the files are dealt to the ranks by size.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from model.llama import Llama
from rayjob.training.optimizer import optimizer_tensors, weights_of_moments


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank writes."""

    has_weights: bool
    moments: tuple[str, ...]  # names as in `optimizer_tensors`


def deal_shares(model: Llama, optimizer: torch.optim.Optimizer, n_shares: int) -> list[Share]:
    """Deals weights and moments into shares of about equally many bytes; the first has the weights' one file."""
    sizes = {name: weight.numel() for name, weight in weights_of_moments(model, optimizer).items()}
    loads = [sum(p.numel() for p in model.parameters())] + [0] * (n_shares - 1)
    moments: list[list[str]] = [[] for _ in range(n_shares)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):  # the largest first, each to the least loaded
        i = loads.index(min(loads))
        moments[i].append(name)
        loads[i] += sizes[name]
    return [Share(i == 0, tuple(names)) for i, names in enumerate(moments)]


class HostCopy:
    """A rank's share in host memory, allocated once and filled at every save: pinned if the model is on a GPU.

    Args:
        model: whose parameters have the share's shapes.
        optimizer: the model's.
        share: the rank's.
    """

    def __init__(self, model: Llama, optimizer: torch.optim.Optimizer, share: Share) -> None:
        self._device = next(model.parameters()).device
        weights = model.state_dict() if share.has_weights else {}
        like = weights_of_moments(model, optimizer)
        self.weights = {name: self._allocate(tensor) for name, tensor in weights.items()}
        self.moments = {name: self._allocate(like[name]) for name in share.moments}
        self.rng: dict[str, Tensor] = {}

    def fill(self, model: Llama, optimizer: torch.optim.Optimizer) -> None:
        """Copies the share and waits until it is copied: the next update may change the originals."""
        _copy(model.state_dict(), self.weights)
        _copy(optimizer_tensors(model, optimizer), self.moments)
        self.rng = rng_tensors(self._device)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _allocate(self, like: Tensor) -> Tensor:
        # Filled now, so that the first save does not pay for getting the pages from the system.
        pinned = self._device.type == "cuda"
        return torch.empty(like.shape, dtype=torch.float32, device="cpu", pin_memory=pinned).zero_()


def rng_tensors(device: torch.device) -> dict[str, Tensor]:
    """Returns the states of torch's generators as uint8 tensors; no step draws from them, the model has no dropout."""
    states = {"rng.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["rng.cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_rng(tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Puts saved generator states back, as far as they were saved and this device has the generator."""
    if "rng.cpu" in tensors:
        torch.set_rng_state(tensors["rng.cpu"])
    if "rng.cuda" in tensors and device.type == "cuda":
        torch.cuda.set_rng_state(tensors["rng.cuda"], device)


def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, tensor in target.items():
        if name in source:  # before the first update there are no moments: zeros, as the optimizer would begin with
            tensor.copy_(source[name].detach(), non_blocking=True)
