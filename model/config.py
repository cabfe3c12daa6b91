"""Architecture of the model: its dimensions, what they must satisfy, and their Hugging Face spelling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Dimensions of a Llama-style decoder with tied embedding; the defaults are the reference model.

    Attributes:
        vocab_size: rows of the embedding; at least the tokenizer's vocabulary, often padded above it.
        d_model: width of the residual stream.
        n_layers: number of transformer layers.
        n_heads: query heads per layer.
        n_kv_heads: key/value heads per layer; each serves n_heads / n_kv_heads query heads.
        d_ff: inner width of the SwiGLU feed-forward.
        max_seq_len: most tokens that attend to each other, in training and in generation.
        rope_theta: base of the rotary frequencies.
        norm_eps: added to the mean square inside RMSNorm.
    """

    vocab_size: int
    d_model: int = 768
    n_layers: int = 12
    n_heads: int = 12
    n_kv_heads: int = 4
    d_ff: int = 2560
    max_seq_len: int = 512
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.n_heads

    @property
    def n_params(self) -> int:
        """Number of trainable parameters; the tied embedding counts once."""
        d_kv = self.n_kv_heads * self.head_dim
        attention = 2 * self.d_model * self.d_model + 2 * self.d_model * d_kv
        feed_forward = 3 * self.d_model * self.d_ff
        matrices = self.vocab_size * self.d_model + self.n_layers * (attention + feed_forward)
        return matrices + self.n_norm_params

    @property
    def n_norm_params(self) -> int:
        """Number of parameters of the norms: two of a layer and the last."""
        return (2 * self.n_layers + 1) * self.d_model

    @property
    def flops_per_token(self) -> int:
        """FLOPs of forward and backward for one token, without activation checkpointing.

        6 per parameter of a matrix (the tied embedding counts as lm_head, the norms do not count) plus the
        attention scores over a full window:
        PaLM (https://arxiv.org/abs/2204.02311), appendix B.
        """
        return 6 * (self.n_params - self.n_norm_params) + 12 * self.n_layers * self.d_model * self.max_seq_len

    def problems(self) -> list[str]:
        """Returns a sentence that names `model.<key>` for every violated constraint."""
        problems = [
            f"model.{key}={value!r} must be a whole number of at least 1."
            for key, value in self._integers().items()
            if isinstance(value, bool) or not isinstance(value, int) or value < 1
        ]
        problems += [
            f"model.{key}={value!r} must be a finite number greater than 0."
            for key, value in (("rope_theta", self.rope_theta), ("norm_eps", self.norm_eps))
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf
        ]
        return problems or self._relation_problems()

    def _integers(self) -> dict[str, int]:
        return {
            "vocab_size": self.vocab_size,
            "d_model": self.d_model,
            "n_layers": self.n_layers,
            "n_heads": self.n_heads,
            "n_kv_heads": self.n_kv_heads,
            "d_ff": self.d_ff,
            "max_seq_len": self.max_seq_len,
        }

    def _relation_problems(self) -> list[str]:
        """Returns the violated relations between keys, each of which is known to be sound alone."""
        problems = []
        if self.d_model % self.n_heads:
            problems.append(
                f"model.d_model={self.d_model} must be a multiple of model.n_heads ({self.n_heads}): "
                f"use {_multiples_around(self.d_model, self.n_heads)}."
            )
        elif self.head_dim % 2:
            problems.append(
                f"model.d_model={self.d_model} over model.n_heads={self.n_heads} gives heads of width "
                f"{self.head_dim}, which rotary positions need to be even: use "
                f"{_multiples_around(self.d_model, 2 * self.n_heads)} for model.d_model."
            )
        if self.n_heads % self.n_kv_heads:
            divisors = [str(n) for n in range(1, self.n_heads + 1) if self.n_heads % n == 0]
            problems.append(
                f"model.n_kv_heads={self.n_kv_heads} must divide model.n_heads ({self.n_heads}): "
                f"use one of {', '.join(divisors)}."
            )
        return problems

    def to_hf(self) -> dict[str, Any]:
        """Returns the content of a `config.json` from which transformers builds a LlamaForCausalLM."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.d_model,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.d_ff,
            "max_position_embeddings": self.max_seq_len,
            # Both spellings: transformers 5 reads rope_parameters, older readers rope_theta.
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "rms_norm_eps": self.norm_eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "use_cache": True,
            "torch_dtype": "float32",
        }

    @staticmethod
    def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
        """Returns the config that a LlamaForCausalLM's `config.json` describes.

        Raises:
            ValueError: the file lacks a key or describes another architecture; every reason is named.
        """
        try:
            config = ModelConfig(
                vocab_size=hf["vocab_size"],
                d_model=hf["hidden_size"],
                n_layers=hf["num_hidden_layers"],
                n_heads=hf["num_attention_heads"],
                n_kv_heads=hf.get("num_key_value_heads", hf["num_attention_heads"]),
                d_ff=hf["intermediate_size"],
                max_seq_len=hf["max_position_embeddings"],
                rope_theta=_rope_theta(hf),
                norm_eps=hf["rms_norm_eps"],
            )
        except KeyError as error:
            raise ValueError(f"the Llama config has no key {error}, which every Llama config needs.") from error
        problems = config.problems() or _foreign_settings(hf, config)
        if problems:
            raise ValueError("the Llama config does not describe a model of this kind: " + " ".join(problems))
        return config


def _multiples_around(value: int, base: int) -> str:
    below = value // base * base
    return f"{below} or {below + base}" if below else f"{base}"


def _rope_theta(hf: Mapping[str, Any]) -> float:
    theta = (hf.get("rope_parameters") or {}).get("rope_theta", hf.get("rope_theta"))
    if theta is None:
        raise KeyError("rope_theta")
    return float(theta)


def _foreign_settings(hf: Mapping[str, Any], config: ModelConfig) -> list[str]:
    """Returns a sentence for each setting that this architecture does not have."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    found_and_wanted = {
        "model_type": (hf.get("model_type"), "llama"),
        "head_dim": (hf.get("head_dim") or config.head_dim, config.head_dim),
        "hidden_act": (hf.get("hidden_act", "silu"), "silu"),
        "attention_bias": (hf.get("attention_bias", False), False),
        "mlp_bias": (hf.get("mlp_bias", False), False),
        "tie_word_embeddings": (hf.get("tie_word_embeddings", False), True),
        "rope_type": (rope.get("rope_type", rope.get("type", "default")), "default"),
    }
    return [
        f"{key} is {found!r}, expected {wanted!r}."
        for key, (found, wanted) in found_and_wanted.items()
        if found != wanted
    ]
