"""AdamW with weight decay on matrices only, and its state as named tensors."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rayjob.config import OptimizerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Returns fused AdamW over `model`; norms (vectors) are not decayed. The rate is set at every step."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Returns the moments as {"exp_avg.<parameter name>": tensor}; empty before the first update."""
    return {
        f"{moment}.{name}": optimizer.state[parameter][moment]
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
        for moment in MOMENTS
    }


def load_optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], step: int
) -> None:
    """Puts saved moments back, exactly as they were after `step` updates."""
    for name, parameter in model.named_parameters():
        state: dict[str, Tensor] = {"step": torch.tensor(float(step), device=parameter.device)}
        for moment in MOMENTS:
            state[moment] = tensors[f"{moment}.{name}"].to(parameter.device, copy=True)
        optimizer.state[parameter] = state
