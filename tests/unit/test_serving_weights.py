"""Weights as the engine reads them: joined, rounded, and in which dtype."""

import pytest
import torch

from model.config import ModelConfig
from model.llama import Llama
from serving.engine.weights import Int8Matrix, decoding_dtype, pack, product, quantize, read_weights

CONFIG = ModelConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=48, max_seq_len=16)


@pytest.fixture(scope="module")
def model() -> Llama:
    model = Llama(CONFIG)
    model.init_weights(1)
    return model.eval()


def test_auto_is_fp32_for_small_models_and_bf16_for_the_reference_model(model: Llama) -> None:
    with torch.device("meta"):
        reference = Llama(ModelConfig(vocab_size=50_304))
    assert decoding_dtype("auto", model) == torch.float32
    assert decoding_dtype("auto", reference) == torch.bfloat16
    assert [decoding_dtype(name, model) for name in ("float32", "int8")] == [torch.float32, torch.int8]


def test_projections_of_one_input_are_joined_in_their_order(model: Llama) -> None:
    tensors = model.state_dict()
    layer = read_weights(model, torch.float32).layers[1]
    for joined, names in (
        (layer.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        (layer.gate_up, ("mlp.gate_proj", "mlp.up_proj")),
    ):
        assert isinstance(joined, torch.Tensor)
        assert torch.equal(joined, torch.cat([tensors[f"model.layers.1.{name}.weight"] for name in names]))


def test_rounding_to_8_bits_is_off_by_half_a_step_at_most(model: Llama) -> None:
    weights = read_weights(model, torch.bfloat16)
    rounded = quantize(weights)
    for matrix, wanted in [(rounded.head, weights.embedding), (rounded.layers[0].down, weights.layers[0].down)]:
        assert isinstance(matrix, Int8Matrix)
        assert isinstance(wanted, torch.Tensor)
        step = matrix.step_size.float()[:, None]
        error = (matrix.steps.float() * step - wanted.float()).abs()
        # The largest weight of a row may lie beyond 127 steps: bf16 may have rounded the step down by 1/256.
        assert (error <= step * (0.5 + 127 / 256)).all()
        assert (error <= step * 0.501).float().mean() > 0.95


def test_a_row_of_zeros_stays_zero_in_8_bits(model: Llama) -> None:
    weights = read_weights(model, torch.bfloat16)
    head = quantize(weights._replace(head=torch.zeros_like(weights.embedding))).head
    assert torch.equal(product(torch.ones(4, 32, dtype=torch.bfloat16), head), torch.zeros(4, 64, dtype=torch.bfloat16))


def test_packing_changes_no_product_beyond_rounding(model: Llama) -> None:
    weights = read_weights(model, torch.bfloat16)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    found, wanted = product(x, pack(weights).head).float(), product(x, weights.head).float()
    # Both sum in fp32 and round once to bf16, by 1/256 at most.
    torch.testing.assert_close(found, wanted, rtol=2 / 256, atol=1e-3)


def test_fp32_is_not_packed(model: Llama) -> None:
    weights = read_weights(model, torch.float32)
    assert pack(weights) is weights
