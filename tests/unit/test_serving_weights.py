"""Weights as the engine reads them: joined, rounded, and in which dtype."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from model.config import ModelConfig
from model.llama import Llama
from serving.engine import weights as weights_module
from serving.engine.weights import decoding_dtype, pack, product, quantize_matrix, read_weights

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


def test_int8_on_a_gpu_is_refused(model: Llama) -> None:
    on_gpu = SimpleNamespace(model=SimpleNamespace(embed_tokens=SimpleNamespace(weight=SimpleNamespace(is_cuda=True))))
    with pytest.raises(ValueError, match="use bfloat16"):
        decoding_dtype("int8", cast(Llama, on_gpu))


def test_projections_of_one_input_are_joined_in_their_order(model: Llama) -> None:
    tensors = model.state_dict()
    layer = read_weights(model, torch.float32).layers[1]
    for joined, names in (
        (layer.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        (layer.gate_up, ("mlp.gate_proj", "mlp.up_proj")),
    ):
        assert isinstance(joined, torch.Tensor)
        assert torch.equal(joined, torch.cat([tensors[f"model.layers.1.{name}.weight"] for name in names]))


@pytest.fixture(params=[True, False], ids=["fast", "any_cpu"])
def has_fast_int8(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the CPU's own instruction is used; False takes the way of a CPU without it."""
    if request.param and not weights_module.has_fast_int8():
        pytest.skip("this CPU has no such instruction")
    monkeypatch.setattr(weights_module, "has_fast_int8", lambda: request.param)
    return bool(request.param)


@pytest.mark.parametrize("num_rows", [1, 3, 4, 7, 64])
def test_a_product_in_8_bits_is_that_of_the_rounded_numbers(has_fast_int8: bool, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    x, matrix = torch.randn(num_rows, 2560, generator=generator), torch.randn(48, 2560, generator=generator)
    x *= torch.rand(num_rows, 1, generator=generator) * 100
    x_step, step = x.abs().amax(1, keepdim=True) / 127, matrix.abs().amax(1, keepdim=True) / 127
    rounded = (x / x_step + 128.5).floor() - 128  # so written, halves fall to the side to which they fall there
    steps = rounded.long() @ (matrix / step).round().long().T
    found = product(x, quantize_matrix(matrix))
    # The sums are exact; three fp32 products follow, each right to 6e-8.
    torch.testing.assert_close(found, (steps.double() * x_step * step.T).float(), rtol=1e-6, atol=0)


def test_a_row_of_an_8_bit_product_is_the_same_alone_and_among_others(has_fast_int8: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, matrix = torch.randn(130, 96, generator=generator), torch.randn(64, 96, generator=generator)
    rounded = quantize_matrix(matrix)
    together = product(x, rounded)
    for start, end in [(0, 1), (5, 6), (3, 9), (0, 64), (66, 130)]:
        assert torch.equal(product(x[start:end], rounded), together[start:end])


def test_a_row_of_zeros_stays_zero_in_8_bits_and_nan_stays_in_its_row(has_fast_int8: bool) -> None:
    rounded = quantize_matrix(torch.cat((torch.zeros(1, 32), torch.ones(7, 32))))
    x = torch.ones(4, 32)
    x[1] = 0.0
    x[2, 5] = float("nan")
    found = product(x, rounded)
    assert not found[:2, 0].any()
    assert not found[1].any()
    assert found[2].isnan().all()
    assert torch.equal(found[3], found[0])


def test_packing_changes_no_product_beyond_rounding(model: Llama) -> None:
    weights = read_weights(model, torch.bfloat16)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    found, wanted = product(x, pack(weights).head).float(), product(x, weights.head).float()
    # Both sum in fp32 and round once to bf16, by 1/256 at most.
    torch.testing.assert_close(found, wanted, rtol=2 / 256, atol=1e-3)


def test_fp32_is_not_packed(model: Llama) -> None:
    weights = read_weights(model, torch.float32)
    assert pack(weights) is weights
