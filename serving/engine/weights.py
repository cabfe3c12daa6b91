"""A model's weights as the engine reads them: projections of one input joined, in the dtype that decodes.

D d_model, H n_heads, K n_kv_heads, E head_dim, V vocab_size
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from model.llama import Llama


class LayerWeights(NamedTuple):
    """Weights of one transformer layer."""

    attention_norm: Tensor  # (D,)
    qkv: Tensor  # ((H + 2 K) * E, D)
    o: Tensor  # (D, D)
    mlp_norm: Tensor  # (D,)
    gate_up: Tensor  # (2 * d_ff, D)
    down: Tensor  # (D, d_ff)


class Weights(NamedTuple):
    """Weights of the whole model; the head is the embedding."""

    embedding: Tensor  # (V, D)
    layers: list[LayerWeights]
    norm: Tensor  # (D,)


FAST_IN_FP32 = 32_000_000
"""Parameters up to which fp32 is fast enough on a CPU that reading half the bytes is not worth its rounding."""


def decoding_dtype(name: str, model: Llama) -> torch.dtype:
    """Returns the dtype of a setting.

    "auto" is bfloat16 where it pays: on a GPU, and on a CPU for a model of more than `FAST_IN_FP32` parameters.
    In float32 the tokens are those of the checkpoint's own weights; in bfloat16 a near tie may go the other way.
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
    return Weights(tensors["model.embed_tokens.weight"], layers, tensors["model.norm.weight"])


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
