"""Shares and host copies of the state."""

import pytest
import torch

from model.config import ModelConfig
from model.llama import Llama
from rayjob.config import OptimizerConfig
from rayjob.training.host_copy import HostCopy, Share, deal_shares
from rayjob.training.optimizer import build_optimizer, optimizer_tensors
from tests.saved_run import CONFIG

REFERENCE = ModelConfig(vocab_size=50304)  # the reference model, 128.3M parameters


def n_bytes(model: Llama, share: Share) -> int:
    sizes = {name: 4 * weight.numel() for name, weight in model.parts()}
    moments = sum(sizes[name.partition(".")[2]] for name in share.moments)
    return moments + (sum(sizes.values()) if share.has_weights else 0)


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4, 8])
def test_every_tensor_is_dealt_once_and_the_shares_are_balanced(n_ranks: int) -> None:
    with torch.device("meta"):
        model = Llama(REFERENCE)
    optimizer = torch.optim.AdamW(model.parameters())
    shares = deal_shares(model, optimizer, n_ranks)
    dealt = [name for share in shares for name in share.moments]
    assert sorted(dealt) == sorted(
        f"{moment}.{name}" for moment in ("exp_avg", "exp_avg_sq") for name, _ in model.parts()
    )
    assert [share.has_weights for share in shares] == [True] + [False] * (n_ranks - 1)
    sizes = [n_bytes(model, share) for share in shares]
    assert sum(sizes) == 12 * REFERENCE.n_params
    # The weights are one file and so a third of all at least; the rest is even but for the largest tensor.
    assert max(sizes[1:], default=0) <= max(sum(sizes) / n_ranks, 4 * 50304 * 768) * 1.05


def test_a_filled_copy_does_not_change_with_the_model() -> None:
    model = Llama(CONFIG)
    model.init_weights(0)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.arange(8)[None]
    copy = HostCopy(model, optimizer, deal_shares(model, optimizer, 1)[0])
    buffers = {name: tensor.data_ptr() for name, tensor in (copy.weights | copy.moments).items()}
    for _ in range(2):
        model(tokens, tokens).nats.backward()
        optimizer.step()
        copy.fill(model, optimizer)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        optimizer.step()
        assert all(copy.weights[name].equal(tensor) for name, tensor in before.items())
        assert not copy.moments["exp_avg.model.norm.weight"].equal(optimizer.state[model.model.norm.weight]["exp_avg"])
    assert {name: tensor.data_ptr() for name, tensor in (copy.weights | copy.moments).items()} == buffers


def test_before_the_first_update_the_moments_are_zeros_as_the_optimizer_would_begin_with() -> None:
    model = Llama(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters())
    copy = HostCopy(model, optimizer, deal_shares(model, optimizer, 1)[0])
    copy.fill(model, optimizer)
    assert len(copy.moments) == 2 * len(list(model.parts()))
    assert not any(moment.any() for moment in copy.moments.values())


def test_a_copy_has_the_moments_of_whatever_optimizer() -> None:
    model = Llama(CONFIG)
    model.init_weights(0)
    optimizer = build_optimizer(model, OptimizerConfig(name="muon"))
    model(torch.arange(8)[None], torch.arange(8)[None]).nats.backward()
    optimizer.step()
    copy = HostCopy(model, optimizer, deal_shares(model, optimizer, 1)[0])
    copy.fill(model, optimizer)
    assert copy.moments.keys() == optimizer_tensors(model, optimizer).keys()
    for name, tensor in optimizer_tensors(model, optimizer).items():
        assert torch.equal(copy.moments[name], tensor)
