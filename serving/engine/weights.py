"""A model's weights as the engine reads them: projections of one input joined, in the dtype that decodes.

D d_model, H n_heads, K n_kv_heads, E head_dim, V vocab_size, N rows of what is multiplied
I and O inputs and outputs of a product
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model.llama import Llama


class Int8Matrix(NamedTuple):
    """A matrix (O, I) of 8-bit integers, each row of which counts in steps of its own.

    Sums of integers are exact: a product is the same, bit for bit, however it is computed.
    """

    steps: Tensor  # (O, I) int8, in the library's own order if `is_packed`
    step_size: Tensor  # (O,) fp32
    zero_steps: Tensor  # (O,) int64, all 0, which the library wants to be told
    is_packed: bool


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

MOST_STEPS = 127
ZERO_STEP = 128
"""What stands for 0 where what is multiplied is unsigned, as the CPU's instruction wants it."""
LEAST_STEP = 1e-12


def decoding_dtype(name: str, model: Llama) -> torch.dtype:
    """Returns the dtype of a setting.

    "auto" is bfloat16 where it pays: on a GPU, and on a CPU for a model of more than `FAST_IN_FP32` parameters.
    In float32 the tokens are those of the checkpoint's own weights; in bfloat16 a near tie may go the other way.
    int8 rounds all that is multiplied, weights and what they are multiplied by, and is the fastest on a CPU.

    Raises:
        ValueError: int8 on a GPU.
    """
    is_on_gpu = model.model.embed_tokens.weight.is_cuda
    if name == "int8" and is_on_gpu:
        raise ValueError("dtype int8 is for CPUs: use bfloat16 on a GPU, or auto.")
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    return torch.bfloat16 if is_on_gpu or model.config.n_params > FAST_IN_FP32 else torch.float32


def read_weights(model: Llama, dtype: torch.dtype) -> Weights:
    """Returns the weights by their Hugging Face names, whatever the modules that hold them look like."""
    tensors = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    layers = [_layer(tensors, f"model.layers.{index}.") for index in range(model.config.n_layers)]
    embedding = tensors["model.embed_tokens.weight"]
    return Weights(embedding, layers, tensors["model.norm.weight"], embedding)


def quantize(weights: Weights) -> Weights:
    """Returns the fp32 weights with the matrices rounded to 8 bits: half the bytes and half the work of bf16.

    Measured on one core, all products of a step of the 128.3M model: 7 ms in place of 11 at 4 rows, 28 in place of 48
    at 64.
    """
    return _replace_matrices(weights, quantize_matrix)


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
    """Returns x (N, I) times the transposed matrix, (N, O); in fp32 if that one is of integers."""
    if isinstance(matrix, Int8Matrix):
        return _product_of_steps(x.float(), matrix)
    if isinstance(matrix, PackedMatrix):
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, matrix.packed, None, "none", [], "")
        return y
    return F.linear(x, matrix)


def _pack(matrix: Matrix) -> PackedMatrix:
    assert isinstance(matrix, Tensor), "packed from the plain matrix"
    return PackedMatrix(torch.ops.mkldnn._reorder_linear_weight(matrix, _PACKED_FOR_ROWS))


def quantize_matrix(matrix: Matrix) -> Int8Matrix:
    """Returns an fp32 matrix in 8 bits, each row in steps of its own."""
    assert isinstance(matrix, Tensor), "rounded from the plain matrix"
    # A row of zeros has any step.
    step_size = (matrix.abs().amax(1) / MOST_STEPS).clamp_(min=LEAST_STEP)
    steps = (matrix / step_size[:, None]).round_().to(torch.int8)
    is_packed = has_fast_int8()
    if is_packed:
        steps = torch.ops.onednn.qlinear_prepack(steps, None)
    return Int8Matrix(steps, step_size, torch.zeros_like(step_size, dtype=torch.int64), is_packed)


def has_fast_int8() -> bool:
    """Tells whether this CPU multiplies 8-bit integers faster than anything else, and torch has the library for it."""
    is_able: bool = torch.cpu._is_vnni_supported()
    return is_able and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def _product_of_steps(x: Tensor, matrix: Int8Matrix) -> Tensor:
    """Rounds each row of x to 8 bits, in steps of its own, multiplies integers, and returns fp32."""
    # Not by `vector_norm`, which takes twenty times as long. NaN and infinity go through the step size into the result.
    step_size = (x.abs().amax(1, keepdim=True) / MOST_STEPS).clamp_(min=LEAST_STEP)  # (N, 1)
    shifted = (x / step_size).add_(ZERO_STEP + 0.5)  # the conversion cuts off: half a step makes it round
    if matrix.is_packed:
        y: Tensor = torch.ops.onednn.qlinear_pointwise(
            *(shifted.int().byte(), 1.0, ZERO_STEP),  # faster than without the detour
            *(matrix.steps, matrix.step_size, matrix.zero_steps),
            *(None, 1.0, 0, torch.float32, "none", [], ""),
        )
    else:
        steps = shifted.floor_().sub_(ZERO_STEP).to(torch.int8)
        y = torch._int_mm(steps, matrix.steps.t()) * matrix.step_size
    return y.mul_(step_size)


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
