"""Fused projections under the names of their parts, bit for bit."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from model.config import ModelConfig
from model.fused import FusedLinear, fuse_parts, name_parts_in_state_dicts, split_parts
from model.llama import Llama

CONFIG = ModelConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=48, max_seq_len=16)
PARTS = {"q_proj": 32, "k_proj": 16, "v_proj": 16}


@pytest.fixture
def model() -> Llama:
    model = Llama(CONFIG)
    model.init_weights(0)
    return model


def test_parts_are_rows_of_the_fused_weight_in_order(model: Llama) -> None:
    state = model.state_dict()
    prefix = "model.layers.1.self_attn."
    fused = model.model.layers[1].self_attn.qkv_proj.weight
    assert torch.equal(torch.cat([state[f"{prefix}{part}.weight"] for part in PARTS]), fused)
    assert {part: len(state[f"{prefix}{part}.weight"]) for part in PARTS} == PARTS
    assert not [name for name in state if "qkv_proj" in name or "gate_up_proj" in name]


def test_state_dict_goes_through_a_file_into_another_model_bit_for_bit(model: Llama, tmp_path: Path) -> None:
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    other = Llama(CONFIG)
    other.load_state_dict(load_file(tmp_path / "weights.safetensors"), strict=True)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_split_and_fuse_undo_each_other(model: Llama) -> None:
    named = dict(model.named_parameters())
    back = fuse_parts(model, split_parts(model, named))
    assert back.keys() == named.keys()
    for name, tensor in back.items():
        assert torch.equal(tensor, named[name])


def test_split_parts_are_views(model: Llama) -> None:
    with torch.no_grad():
        dict(model.parts())["model.layers.0.self_attn.k_proj.weight"].fill_(7.0)
    fused = model.model.layers[0].self_attn.qkv_proj.weight
    assert (fused[32:48] == 7.0).all()
    assert not (fused[48:] == 7.0).any()


@pytest.mark.parametrize("damage", ["missing", "more_rows", "rows_of_another_part"])
def test_parts_that_do_not_fit_are_refused_by_name(model: Llama, damage: str) -> None:
    state = model.state_dict()
    q, k = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
    if damage == "missing":
        del state[q]
    elif damage == "more_rows":
        state[q] = torch.zeros(33, 32)
    else:  # the sum is right
        state[q], state[k] = torch.zeros(16, 32), torch.zeros(32, 32)
    with pytest.raises(RuntimeError, match=r"layers\.0\.self_attn\.(qkv|k)_proj"):
        Llama(CONFIG).load_state_dict(state, strict=True)


def test_names_below_a_prefix_are_those_of_the_parts() -> None:
    outer = nn.Module()
    outer.inner = nn.Module()
    outer.inner.ab_proj = FusedLinear(4, {"a_proj": 2, "b_proj": 3})
    nn.init.normal_(outer.inner.ab_proj.weight)
    name_parts_in_state_dicts(outer.inner)
    outer.other = nn.Linear(2, 2, bias=False)
    state = {name: tensor.clone() for name, tensor in outer.state_dict().items()}
    assert set(state) == {"inner.a_proj.weight", "inner.b_proj.weight", "other.weight"}
    before = outer.inner.ab_proj.weight.detach().clone()
    nn.init.zeros_(outer.inner.ab_proj.weight)
    outer.load_state_dict(state, strict=True)
    assert torch.equal(outer.inner.ab_proj.weight, before)
