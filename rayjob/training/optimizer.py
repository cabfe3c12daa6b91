"""AdamW or Muon, with weight decay on matrices only, and their state as named tensors.

AdamW is the reference. Muon (https://kellerjordan.github.io/posts/muon/) takes the matrices of the layers; embedding,
which is the head too, and norms stay with AdamW.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from model.complete import CheckpointError
from model.fused import fuse_parts, split_parts
from rayjob.config import OptimizerConfig

_ADAMW_MOMENTS = ("exp_avg", "exp_avg_sq")
_MUON_MOMENTS = ("momentum_buffer",)
_EMBEDDING = "embed_tokens.weight"


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Returns the optimizer of `model`; norms (vectors) are not decayed. The rate is set at every step."""
    if config.name == "muon":
        return MuonAndAdamW(model, config)
    return _fused_adamw(model.parameters(), config)


class MuonAndAdamW(torch.optim.Optimizer):
    """torch's Muon for the matrices of the layers and fused AdamW for the rest, with one state and one rate.

    Some parameters are several of the model's matrices, fused; to orthogonalise those as one would be another method.
    So Muon gets views: of the parts, of their gradients and of their momentum.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        super().__init__(_groups(model.parameters(), config), {"lr": config.lr})
        named = dict(model.named_parameters())
        self._model = model
        self._matrices = {name: p for name, p in named.items() if p.dim() >= 2 and not name.endswith(_EMBEDDING)}
        self._parts = {name: nn.Parameter(part) for name, part in self._split(lambda matrix: matrix.detach()).items()}
        self._muon = torch.optim.Muon(
            self._parts.values(),
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            adjust_lr_fn="match_rms_adamw",  # so that the rate and weight decay of AdamW suit it too
        )
        self._adamw = _fused_adamw((p for name, p in named.items() if name not in self._matrices), config)
        self._adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates all parameters at the rate of the groups."""
        assert closure is None
        for optimizer in (self._muon, self._adamw):
            set_learning_rate(optimizer, self.param_groups[0]["lr"])
        gradients, momenta = self._split(lambda matrix: matrix.grad), self._split(self._momentum)
        for name, part in self._parts.items():
            part.grad = gradients[name]
            self._muon.state[part] = {"momentum_buffer": momenta[name]}
        self._muon.step()  # type: ignore[no-untyped-call]
        self._adamw.step()

    def has_momentum(self, name: str) -> bool:
        """Returns whether the parameter of this name is Muon's."""
        return name in self._matrices

    def _momentum(self, matrix: Tensor) -> Tensor:
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        momentum: Tensor = state["momentum_buffer"]
        return momentum

    def _split(self, of: Callable[[Tensor], Any]) -> dict[str, Tensor]:
        return split_parts(self._model, {name: of(matrix) for name, matrix in self._matrices.items()})


def _fused_adamw(parameters: Iterable[Tensor], config: OptimizerConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(_groups(parameters, config), lr=config.lr, betas=config.betas, fused=True)


def _groups(parameters: Iterable[Tensor], config: OptimizerConfig) -> list[dict[str, Any]]:
    given = list(parameters)
    return [
        {"params": [p for p in given if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in given if p.dim() < 2], "weight_decay": 0.0},
    ]


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Returns the moments as {"exp_avg.<Hugging Face name>": tensor}; empty before the first update."""
    tensors: dict[str, Tensor] = {}
    for moment in (*_ADAMW_MOMENTS, *_MUON_MOMENTS):
        of_parameters = {
            name: optimizer.state[parameter][moment]
            for name, parameter in model.named_parameters()
            if moment in optimizer.state.get(parameter, ())
        }
        tensors |= {f"{moment}.{name}": tensor for name, tensor in split_parts(model, of_parameters).items()}
    return tensors


def weights_of_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Returns, by the names of `optimizer_tensors`, the weight that each moment belongs to and has the shape of."""
    weights: dict[str, Tensor] = {}
    for moment in (*_ADAMW_MOMENTS, *_MUON_MOMENTS):
        of_parameters = {name: p for name, p in model.named_parameters() if moment in _moments_of(optimizer, name)}
        weights |= {f"{moment}.{name}": part for name, part in split_parts(model, of_parameters).items()}
    return weights


def load_optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], step: int
) -> None:
    """Puts saved moments back, exactly as they were after `step` updates.

    Raises:
        CheckpointError: they are those of another optimizer.
    """
    by_moment = {moment: _of_moment(model, tensors, moment) for moment in (*_ADAMW_MOMENTS, *_MUON_MOMENTS)}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        for moment in _moments_of(optimizer, name):
            if name not in by_moment[moment]:
                raise CheckpointError(
                    f"the checkpoint has no {moment} of {name}, so another optimizer trained it: "
                    "restore optimizer.name of the run, or choose another run_name."
                )
            state[moment] = by_moment[moment][name].to(parameter.device, copy=True)
            state["step"] = torch.tensor(float(step), device=parameter.device)


def _moments_of(optimizer: torch.optim.Optimizer, name: str) -> tuple[str, ...]:
    """Returns the moments that the optimizer keeps of the parameter of this name."""
    is_muon = isinstance(optimizer, MuonAndAdamW) and optimizer.has_momentum(name)
    return _MUON_MOMENTS if is_muon else _ADAMW_MOMENTS


def _of_moment(model: nn.Module, tensors: Mapping[str, Tensor], moment: str) -> dict[str, Tensor]:
    prefix = f"{moment}."
    saved = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    return fuse_parts(model, saved)
