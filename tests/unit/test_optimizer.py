"""Muon against a slow written-out form; state of both optimizers through names and back."""

import math

import pytest
import torch
from torch import Tensor

from model.complete import CheckpointError
from model.config import ModelConfig
from model.fused import split_parts
from model.llama import Llama
from rayjob.config import OptimizerConfig
from rayjob.training.optimizer import build_optimizer, load_optimizer_tensors, optimizer_tensors, set_learning_rate

CONFIG = ModelConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=48, max_seq_len=16)
LR = 0.01
MUON = OptimizerConfig(name="muon", weight_decay=0.2)


def build(config: OptimizerConfig) -> tuple[Llama, torch.optim.Optimizer]:
    model = Llama(CONFIG)
    model.init_weights(0)
    optimizer = build_optimizer(model, config)
    set_learning_rate(optimizer, LR)
    return model, optimizer


def set_gradients(model: Llama, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def train(model: Llama, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        set_gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()


class SlowMuon:
    """One matrix in float64, as the method is written down: https://kellerjordan.github.io/posts/muon/.

    1. Momentum: an exponential mean of the gradients; look ahead by one more (Nesterov).
    2. Five Newton-Schulz steps push the singular values towards 1.
    3. Decay the weights, then step; the size follows AdamW's (arXiv:2502.16982).
    """

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix.double().clone()
        self.momentum = torch.zeros_like(self.matrix)

    def step(self, gradient: Tensor) -> None:
        gradient = gradient.double()
        self.momentum = MUON.momentum * self.momentum + (1 - MUON.momentum) * gradient
        update = MUON.momentum * self.momentum + (1 - MUON.momentum) * gradient
        u, singular_values, v = torch.linalg.svd(update / update.norm(), full_matrices=False)
        for _ in range(5):
            singular_values = 3.4445 * singular_values - 4.7750 * singular_values**3 + 2.0315 * singular_values**5
        size = 0.2 * math.sqrt(max(update.shape))
        self.matrix = (1 - LR * MUON.weight_decay) * self.matrix - LR * size * (u * singular_values) @ v


def test_muon_updates_each_matrix_as_written_down() -> None:
    model, optimizer = build(MUON)
    slow = {
        name: SlowMuon(weight) for name, weight in model.parts() if weight.dim() == 2 and "embed_tokens" not in name
    }
    assert len(slow) == 2 * 7
    before = {name: weight.clone() for name, weight in model.parts()}
    for step in range(3):
        set_gradients(model, step)
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        for name, gradient in split_parts(model, gradients).items():
            if name in slow:
                slow[name].step(gradient)
        optimizer.step()
    for name, weight in model.parts():
        if name in slow:
            moved, wanted = weight - before[name], slow[name].matrix - before[name].double()
            # 3 %: torch takes the five steps in bf16, which keeps 0.4 % in each of ~15 products.
            assert (moved - wanted).norm() < 0.03 * wanted.norm(), name


def test_embedding_and_norms_are_adamws_under_muon() -> None:
    (muon_model, muon), (adamw_model, adamw) = build(MUON), build(OptimizerConfig(weight_decay=0.2))
    train(muon_model, muon, range(3))
    train(adamw_model, adamw, range(3))
    for (name, mine), (_, theirs) in zip(muon_model.parts(), adamw_model.parts(), strict=True):
        assert torch.equal(mine, theirs) == ("norm" in name or "embed_tokens" in name), name


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_saved_and_loaded_optimizer_takes_the_same_steps_bit_for_bit(name: str) -> None:
    config = OptimizerConfig(name=name)  # type: ignore[arg-type]
    model, optimizer = build(config)
    train(model, optimizer, range(3))
    again, loaded = build(config)
    again.load_state_dict(model.state_dict())
    load_optimizer_tensors(again, loaded, optimizer_tensors(model, optimizer), 3)
    train(model, optimizer, range(3, 6))
    train(again, loaded, range(3, 6))
    for mine, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_state_is_named_by_hugging_faces_names() -> None:
    model, optimizer = build(OptimizerConfig())
    assert optimizer_tensors(model, optimizer) == {}
    train(model, optimizer, range(1))
    weights = model.state_dict()
    tensors = optimizer_tensors(model, optimizer)
    assert tensors.keys() == {f"{moment}.{name}" for moment in ("exp_avg", "exp_avg_sq") for name in weights}
    assert all(tensor.shape == weights[name.partition(".")[2]].shape for name, tensor in tensors.items())


@pytest.mark.parametrize(("saved", "configured"), [("adamw", "muon"), ("muon", "adamw")])
def test_state_of_another_optimizer_is_refused(saved: str, configured: str) -> None:
    model, optimizer = build(OptimizerConfig(name=saved))  # type: ignore[arg-type]
    train(model, optimizer, range(1))
    other, loading = build(OptimizerConfig(name=configured))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"restore optimizer\.name"):
        load_optimizer_tensors(other, loading, optimizer_tensors(model, optimizer), 1)


def test_zero_grad_of_muon_clears_every_parameter() -> None:
    model, optimizer = build(MUON)
    train(model, optimizer, range(1))
    assert all(parameter.grad is None for parameter in model.parameters())
