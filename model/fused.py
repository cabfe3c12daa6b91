"""Linear layers of one input as one matrix product, under the names that Hugging Face gives to each of them.

Query, key and value read the same input, and so do gate and up: one wide product is faster than narrow ones, and its
gradient goes back in one piece. In memory such layers are one parameter; in every file, and wherever a tensor is
named, they are the parts. `split_parts` and `fuse_parts` go between the two without changing a bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping

import torch
from torch import Tensor, nn


class Linear(nn.Linear):
    """Linear layer without bias; its weight is unset until `init_weights` or a checkpoint sets it."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__(d_in, d_out, bias=False)

    def reset_parameters(self) -> None:
        """Does nothing: drawing 128 million values only to overwrite them costs a second at every start."""


class FusedLinear(Linear):
    """Several linear layers side by side.

    Args:
        d_in: width of the common input.
        parts: output width of each layer by its name in Hugging Face's files, in the order of the outputs.
    """

    def __init__(self, d_in: int, parts: Mapping[str, int]) -> None:
        super().__init__(d_in, sum(parts.values()))
        self.parts = dict(parts)


def split_parts(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns `tensors`, by parameter name, with every fused one as views of its parts, in the parts' order."""
    fused = dict(_fused_weights(model))
    split: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in fused:
            split |= zip(fused[name], torch.split(tensor, list(fused[name].values())), strict=True)
        else:
            split[name] = tensor
    return split


def fuse_parts(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns `tensors`, by the names of the parts, with the parts put together.

    Parts of which one is missing or has other rows stay as they are, for the caller to find them unexpected.
    """
    fused = dict(tensors)
    for name, parts in _fused_weights(model):
        if all(part in fused and fused[part].shape[:1] == (rows,) for part, rows in parts.items()):
            fused[name] = torch.cat([fused.pop(part) for part in parts])
    return fused


def name_parts_in_state_dicts(model: nn.Module) -> None:
    """Makes the state dicts of `model` name the parts, when they are read and when they are loaded."""

    def split(module: nn.Module, state: MutableMapping[str, Tensor], prefix: str, _metadata: object) -> None:
        _replace(state, prefix, split_parts(module, _below(state, prefix)))

    def fuse(module: nn.Module, state: MutableMapping[str, Tensor], prefix: str, *_rest: object) -> None:
        _replace(state, prefix, fuse_parts(module, _below(state, prefix)))

    model.register_state_dict_post_hook(split)  # type: ignore[no-untyped-call]
    model.register_load_state_dict_pre_hook(fuse)  # type: ignore[no-untyped-call]


def _fused_weights(model: nn.Module) -> Iterator[tuple[str, dict[str, int]]]:
    """Yields the name of every fused weight, and its parts' rows by their names."""
    for name, module in model.named_modules():
        if isinstance(module, FusedLinear):
            parent = name.removesuffix(name.rpartition(".")[2])
            yield f"{name}.weight", {f"{parent}{part}.weight": rows for part, rows in module.parts.items()}


def _below(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def _replace(state: MutableMapping[str, Tensor], prefix: str, tensors: Mapping[str, Tensor]) -> None:
    for name in [name for name in state if name.startswith(prefix)]:
        del state[name]
    state.update({prefix + name: tensor for name, tensor in tensors.items()})
