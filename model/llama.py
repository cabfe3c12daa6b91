"""Llama-style decoder: RoPE, pre-norm RMSNorm, grouped query attention, SwiGLU, embedding tied to the head.

The names in a state dict are those of Hugging Face's LlamaForCausalLM, so that a saved one is its weights file; in
memory query, key and value are one parameter, and so are gate and up (`model/fused.py`).

B batch, T time (new tokens), S time with cached tokens
D d_model, F d_ff, H n_heads, K n_kv_heads, E head_dim, V vocab_size
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig
from model.cpu_attention import CausalAttentionFunction
from model.elementwise import RMSNormFunction, RotateFunction, SwiGLUFunction
from model.fused import FusedLinear, Linear, name_parts_in_state_dicts, split_parts
from model.kv_cache import AttentionCache
from model.loss import LossSums, cross_entropy_sums, rows_into_gradient

INIT_STD = 0.02


class Embedding(nn.Embedding):
    """Embedding whose weight is unset until `init_weights` or a checkpoint sets it.

    Its gradient is sparse: it is added in place to the dense one that the same weight gets as head, where a dense one
    would be 154 MB of zeros but for a few rows.
    """

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the rows (…, D) of `tokens`."""
        return F.embedding(tokens, self.weight, sparse=self.weight.device.type == "cpu")

    def reset_parameters(self) -> None:
        """Does nothing, for the reason given at `Linear`."""


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in fp32 (https://arxiv.org/abs/1910.07467)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.d_model))
        self.eps = config.norm_eps

    def forward(self, x: Tensor) -> Tensor:
        """Returns the normed x in the dtype of the products that read it: autocast's where it is on."""
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        return RMSNormFunction.apply(x, self.weight, self.eps, dtype)  # type: ignore[no-any-return,no-untyped-call]


class RotaryTables(nn.Module):
    """Cosine and sine of every position's angles, always fp32 (https://arxiv.org/abs/2104.09864).

    In bf16 neighbouring positions beyond 256 would share one row, so the tables refuse to be cast.
    """

    cos: Tensor  # (max_seq_len, E/2)
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        device = torch.get_default_device()
        for name, table in zip(("cos", "sin"), self._compute(device), strict=True):
            self.register_buffer(name, table, persistent=False)

    def _compute(self, device: torch.device) -> tuple[Tensor, Tensor]:
        # On the CPU whatever the device: training and serving then rotate by the same bits everywhere.
        exponents = torch.arange(0, self.config.head_dim, 2, dtype=torch.float32, device="cpu")
        frequencies = 1.0 / self.config.rope_theta ** (exponents / self.config.head_dim)
        positions = torch.arange(self.config.max_seq_len, dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, frequencies)
        return angles.cos().to(device), angles.sin().to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryTables:
        """Follows the module to another device, but not to another dtype."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.cos, self.sin = self._compute(self.cos.device)
        return self

    def forward(self, positions: Tensor | int) -> tuple[Tensor, Tensor]:
        """Returns cos and sin (…, T, 1, E/2) of positions (T,) or (B, T); a number T means the first T."""
        index = slice(positions) if isinstance(positions, int) else positions
        return self.cos[index].unsqueeze(-2), self.sin[index].unsqueeze(-2)


class Attention(nn.Module):
    """Causal grouped query attention (https://arxiv.org/abs/2305.13245)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.n_heads, self.n_kv_heads = config.n_heads, config.n_kv_heads
        self.is_grouped = config.n_kv_heads < config.n_heads
        d_kv = config.n_kv_heads * config.head_dim
        self.qkv_proj = FusedLinear(config.d_model, {"q_proj": config.d_model, "k_proj": d_kv, "v_proj": d_kv})
        self.o_proj = Linear(config.d_model, config.d_model)

    def forward(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor | None, cache: AttentionCache | None
    ) -> Tensor:
        B, T, D = x.shape
        H, K = self.n_heads, self.n_kv_heads
        qk, v = self.qkv_proj(x).view(B, T, H + 2 * K, self.head_dim).split((H + K, K), dim=2)
        q, k = RotateFunction.apply(qk, *rotation).transpose(1, 2).split((H, K), dim=1)  # type: ignore[no-untyped-call]
        v = v.transpose(1, 2)  # (B, K, T, E), as k; q is (B, H, T, E)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)  # (B, K, S, E)
        if cache is None and q.device.type == "cpu" and q.dtype == torch.bfloat16:
            y = CausalAttentionFunction.apply(q, k, v)  # type: ignore[no-untyped-call]
            return self.o_proj(y.view(B, T, D))  # type: ignore[no-any-return]
        # Without a mask either S = T, or one query sees all S keys.
        is_causal = mask is None and T > 1
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, enable_gqa=self.is_grouped)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, D))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """SwiGLU (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = FusedLinear(config.d_model, {"gate_proj": config.d_ff, "up_proj": config.d_ff})
        self.down_proj = Linear(config.d_ff, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(SwiGLUFunction.apply(self.gate_up_proj(x)))  # type: ignore[no-any-return,no-untyped-call]


class Layer(nn.Module):
    """One transformer layer: attention, then feed-forward, each normed before and added after."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config)
        self.mlp = FeedForward(config)

    def forward(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor | None, cache: AttentionCache | None
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Everything below the head: tokens (B, T) -> hidden states (B, T, D)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.n_layers))
        self.norm = RMSNorm(config)
        self.rotary = RotaryTables(config)
        # A list of callables and not of modules, so that a compiled layer has no parameters of its own.
        self.compiled_layers: list[Callable[..., Tensor]] = []

    def forward(self, tokens: Tensor, cache: AttentionCache | None = None) -> Tensor:
        T = tokens.shape[1]
        positions = T if cache is None else cache.positions(T)
        mask = None if cache is None else cache.mask(T)
        rotation = self.rotary(positions)
        x = self.embed_tokens(tokens)  # (B, T, D)
        # Generation has other shapes at every token: compiling for each would never end.
        for layer in self.compiled_layers if cache is None and self.compiled_layers else self.layers:
            x = layer(x, rotation, mask, cache)
        if cache is not None:
            cache.advance(T)
        return self.norm(x)  # type: ignore[no-any-return]


class Llama(nn.Module):
    """The language model; `lm_head` is the embedding itself and so has no parameter of its own."""

    def __init__(self, config: ModelConfig) -> None:
        """Builds the model with weights unset: call `init_weights` or load a state dict.

        Raises:
            ValueError: the config contradicts itself; every problem is named.
        """
        super().__init__()
        if problems := config.problems():
            raise ValueError(" ".join(problems))
        self.config = config
        self.model = Decoder(config)
        self._rows_into_gradient = rows_into_gradient
        name_parts_in_state_dicts(self)

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every weight by its Hugging Face name; those of a fused parameter are views of it."""
        yield from split_parts(self, {name: parameter.detach() for name, parameter in self.named_parameters()}).items()

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Draws all weights from `seed` alone: the global generators neither matter nor move.

        Matrices are normal with standard deviation 0.02, those that write into the residual stream divided by
        sqrt(2 n_layers) so that its variance does not grow with depth (GPT-2); norms are 1.
        """
        generator = torch.Generator(device="cpu").manual_seed(seed)
        residual_std = INIT_STD / math.sqrt(2 * self.config.n_layers)
        for name, weight in self.parts():
            if weight.dim() == 1:
                weight.fill_(1.0)
                continue
            std = residual_std if name.endswith(("o_proj.weight", "down_proj.weight")) else INIT_STD
            # Drawn on the CPU in fp32, so that every device and dtype starts from the same numbers.
            drawn = torch.empty(weight.shape, dtype=torch.float32, device="cpu")
            weight.copy_(drawn.normal_(0.0, std, generator=generator))

    @overload
    def forward(self, tokens: Tensor, targets: None = None, cache: AttentionCache | None = None) -> Tensor: ...

    @overload
    def forward(self, tokens: Tensor, targets: Tensor, cache: AttentionCache | None = None) -> LossSums: ...

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, cache: AttentionCache | None = None
    ) -> Tensor | LossSums:
        """Returns logits (B, T, V), or with targets the sums of their loss.

        The loss is part of forward so that DistributedDataParallel's forward covers it.

        Args:
            tokens: (B, T) int64; with a cache, the tokens that follow those it holds.
            targets: (B, T) int64, the token after each; -100 for a position that does not count.
            cache: keys and values of earlier tokens; the new ones are added to it.

        Raises:
            ValueError: tokens are not (B, T), or more than max_seq_len.
        """
        hidden = self.hidden(tokens, cache)
        if targets is None:
            return self.logits(hidden)
        return cross_entropy_sums(hidden, self.model.embed_tokens.weight, targets, self._rows_into_gradient)

    def compile_layers(self) -> None:
        """Compiles what forward without a cache runs: each layer, and the softmax of the loss.

        Layer by layer, and not all in one: DistributedDataParallel then reduces the gradients of a layer while those
        below are still computed, and all layers share what was compiled for the first.
        """
        self.model.compiled_layers = [
            torch.compile(layer, dynamic=False, fullgraph=True) for layer in self.model.layers
        ]
        self._rows_into_gradient = torch.compile(rows_into_gradient, dynamic=False, fullgraph=True)

    def hidden(self, tokens: Tensor, cache: AttentionCache | None = None) -> Tensor:
        """Returns the normed last hidden states (B, T, D), for callers that need few positions' logits."""
        if tokens.dim() != 2:
            raise ValueError(f"tokens must have the shape (batch, time), got {tuple(tokens.shape)}.")
        if tokens.shape[1] > self.config.max_seq_len:
            raise ValueError(
                f"got {tokens.shape[1]} tokens in a row, but model.max_seq_len is {self.config.max_seq_len}: "
                "shorten the sequence."
            )
        return self.model(tokens, cache)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits (…, V) of hidden states (…, D) through the tied head."""
        return F.linear(hidden, self.model.embed_tokens.weight)
