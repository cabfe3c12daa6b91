"""A model's weights as the engine reads them: projections of one input joined, in the dtype that decodes.

D d_model, H n_heads, K n_kv_heads, E head_dim, V vocab_size, N rows, I and O inputs and outputs of a product
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model.llama import Llama


class Int8Matrix(NamedTuple):
    """A matrix (O, I) of 8-bit integers, each row of which counts in steps of its own."""

    steps: Tensor  # (O, I) int8
    step_size: Tensor  # (O,) bf16


class PackedMatrix(NamedTuple):
    """A matrix in the order in which the CPU's library reads it, which it would otherwise bring about at every use."""

    packed: Tensor


Matrix = Tensor | Int8Matrix | PackedMatrix


class LayerWeights(NamedTuple):
    """Weights of one transformer layer."""

    attention_norm: Tensor  # (D,)
    qkv: Matrix  # ((H + 2 K) * E, D)
    o: Matrix  # (D, D)
    mlp_norm: Tensor  # (D,)
    gate_up: Matrix  # (2 * d_ff, D)
    down: Matrix  # (D, d_ff)


class Weights(NamedTuple):
    """Weights of the whole model; the head is the embedding once more."""

    embedding: Tensor  # (V, D)
    layers: list[LayerWeights]
    norm: Tensor  # (D,)
    head: Matrix  # (V, D)


FAST_IN_FP32 = 32_000_000
"""Parameters up to which fp32 is fast enough on a CPU that reading half the bytes is not worth its rounding."""


_PACKED_FOR_ROWS = 4


def decoding_dtype(name: str, model: Llama) -> torch.dtype:
    """Returns the dtype of a setting.

    "auto" is bfloat16 where it pays: on a GPU, and on a CPU for a model of more than `FAST_IN_FP32` parameters.
    In float32 the tokens are those of the checkpoint's own weights; in bfloat16 a near tie may go the other way.
    int8 rounds the weights of decode steps, not those of prefill: on a CPU the fastest for one to four sequences at a
    time, and slower than bfloat16 for many.
    """
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    is_on_gpu = model.model.embed_tokens.weight.is_cuda
    return torch.bfloat16 if is_on_gpu or model.config.n_params > FAST_IN_FP32 else torch.float32


def read_weights(model: Llama, dtype: torch.dtype) -> Weights:
    """Returns the weights by their Hugging Face names, whatever the modules that hold them look like."""
    tensors = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    layers = [_layer(tensors, f"model.layers.{index}.") for index in range(model.config.n_layers)]
    embedding = tensors["model.embed_tokens.weight"]
    return Weights(embedding, layers, tensors["model.norm.weight"], embedding)


def quantize(weights: Weights) -> Weights:
    """Returns the weights with the matrices rounded to 8 bits: half the bytes of bf16 to read for a token."""
    return _replace_matrices(weights, _quantize)


def pack(weights: Weights) -> Weights:
    """Returns the weights with their bf16 matrices packed for the CPU at hand, where that pays.

    Measured on one core, all products of a step of the 128.3M model: 12.0 ms in place of 19.7 at 4 rows, 45.8 in
    place of 54.8 at 64.
    """
    is_bf16_on_cpu = weights.embedding.device.type == "cpu" and weights.embedding.dtype == torch.bfloat16
    has_library = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not (is_bf16_on_cpu and has_library and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return weights
    return _replace_matrices(weights, _pack)


def _replace_matrices(weights: Weights, change: Callable[[Matrix], Matrix]) -> Weights:
    layers = [
        layer._replace(qkv=change(layer.qkv), o=change(layer.o), gate_up=change(layer.gate_up), down=change(layer.down))
        for layer in weights.layers
    ]
    return weights._replace(layers=layers, head=change(weights.head))


def product(x: Tensor, matrix: Matrix) -> Tensor:
    """Returns x (N, I) times the transposed matrix, (N, O)."""
    if isinstance(matrix, Int8Matrix):
        return torch._weight_int8pack_mm(x, matrix.steps, matrix.step_size)
    if isinstance(matrix, PackedMatrix):
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, matrix.packed, None, "none", [], "")
        return y
    return F.linear(x, matrix)


def _pack(matrix: Matrix) -> PackedMatrix:
    assert isinstance(matrix, Tensor), "packed from the plain matrix"
    return PackedMatrix(torch.ops.mkldnn._reorder_linear_weight(matrix, _PACKED_FOR_ROWS))


def _quantize(matrix: Matrix) -> Int8Matrix:
    assert isinstance(matrix, Tensor), "rounded from the plain matrix"
    wide = matrix.float()
    # Rounded first: the integers are then those of the step size that is kept. A row of zeros has any step.
    step_size = (wide.abs().amax(1) / 127).clamp_(min=1e-12).bfloat16()
    steps = (wide / step_size.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return Int8Matrix(steps, step_size)


def _layer(tensors: Mapping[str, Tensor], prefix: str) -> LayerWeights:
    def of(*names: str) -> Tensor:
        found = [tensors[f"{prefix}{name}.weight"] for name in names]
        return torch.cat(found) if len(found) > 1 else found[0]

    return LayerWeights(
        attention_norm=of("input_layernorm"),
        qkv=of("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        o=of("self_attn.o_proj"),
        mlp_norm=of("post_attention_layernorm"),
        gate_up=of("mlp.gate_proj", "mlp.up_proj"),
        down=of("mlp.down_proj"),
    )
