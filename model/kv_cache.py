"""Keys and values of the tokens already seen, so that decoding computes each token once.

B batch, T new tokens, S tokens seen so far including the new ones, K n_kv_heads, E head_dim
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from model.config import ModelConfig


class AttentionCache(Protocol):
    """What `Llama.forward` asks of a cache; an engine may bring one with other rows or another layout.

    One forward over T new tokens calls `positions` and `mask` once, `extend` once per layer, `advance` once.
    """

    def positions(self, n_tokens: int) -> Tensor:
        """Returns the positions of the new tokens, int64 (T,) for all rows alike or (B, T)."""

    def mask(self, n_tokens: int) -> Tensor | None:
        """Returns which keys each new token sees: bool, broadcastable to (B, H, T, S).

        None means the plain causal mask: either nothing came before, or one new token sees everything.
        """

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the new (B, K, T, E) keys and values of a layer and returns all (B, K, S, E) of it."""

    def advance(self, n_tokens: int) -> None:
        """Counts the new tokens as seen, after all layers have stored them."""


class KVCache:
    """One key and one value tensor per layer, and one position offset that all rows of the batch share."""

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Reserves room for max_seq_len tokens in each of `batch_size` rows."""
        shape = (batch_size, config.n_kv_heads, config.max_seq_len, config.head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.n_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.n_layers)]
        self.max_seq_len = config.max_seq_len
        self.offset = 0  # tokens seen, and so the position of the next one

    def positions(self, n_tokens: int) -> Tensor:
        """Returns the positions (T,) of the next `n_tokens` tokens.

        Raises:
            ValueError: they do not fit into max_seq_len.
        """
        if self.offset + n_tokens > self.max_seq_len:
            raise ValueError(
                f"the cache holds {self.offset} tokens and got {n_tokens} more, but model.max_seq_len is "
                f"{self.max_seq_len}: shorten the prompt or generate fewer tokens."
            )
        return torch.arange(self.offset, self.offset + n_tokens, device=self.keys[0].device)

    def mask(self, n_tokens: int) -> Tensor | None:
        """Returns the (T, S) causal mask of new over all tokens, or None where the plain one is right."""
        if self.offset == 0 or n_tokens == 1:
            return None
        # SDPA's own causal flag aligns top-left: its first query would see key 0 only, whatever came before.
        shape = (n_tokens, self.offset + n_tokens)
        return torch.ones(shape, dtype=torch.bool, device=self.keys[0].device).tril(self.offset)

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the new (B, K, T, E) keys and values and returns views (B, K, S, E) of all of them."""
        end = self.offset + keys.shape[2]
        self.keys[layer][:, :, self.offset : end] = keys
        self.values[layer][:, :, self.offset : end] = values
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]

    def advance(self, n_tokens: int) -> None:
        """Counts `n_tokens` more tokens as seen."""
        self.offset += n_tokens
