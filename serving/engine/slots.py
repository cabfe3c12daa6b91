"""Keys and values of all slots: one tensor of each for every layer, a row for every slot, never reallocated.

B rows, N rows with padding, T new tokens, S length of the cache, L length read
H n_heads, K n_kv_heads, G query heads of one key/value head, E head_dim
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from model.config import ModelConfig
from serving.engine.scheduler import Move

LENGTH_STEP = 128
"""Lengths at which the cache is read are its multiples, so that few shapes occur."""


class SlotCache:
    """The cache; attention reads it here, so that nothing else knows its layout."""

    def __init__(self, config: ModelConfig, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        """Reserves room for max_seq_len tokens in each of `num_slots` rows; memory is touched only when written."""
        # A row more than slots: a single sequence has something to be computed with, see `DecodeAttention`.
        shape = (num_slots + 1, config.n_kv_heads, read_length(config.max_seq_len), config.head_dim)
        self._keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.n_layers)]
        self._values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.n_layers)]

    def move(self, move: Move) -> None:
        """Copies a row into another one."""
        for tensor in (*self._keys, *self._values):
            tensor[move.target] = tensor[move.source]

    def clear(self, row: int) -> None:
        """Forgets a row. What a mask hides must be finite all the same: 0 times NaN is NaN."""
        for tensor in (*self._keys, *self._values):
            tensor[row].zero_()

    def prefill(self, row: int, start: int, end: int) -> "PrefillAttention":
        """Returns the attention of the tokens `start` to `end` of one row."""
        keys = [tensor[row] for tensor in self._keys]  # (K, S, E) each
        values = [tensor[row] for tensor in self._values]
        return PrefillAttention(keys, values, start, end)

    def decode(self, positions: Sequence[int], num_padding: int = 0) -> "DecodeAttention":
        """Returns the attention of one new token at `positions` (B,) in each of the first B rows.

        After them come `num_padding` rows that have no place in the cache and read zeros.
        """
        return DecodeAttention(self._keys, self._values, positions, num_padding)


class PrefillAttention:
    """Causal attention of consecutive tokens of one sequence, whose earlier ones are in the cache."""

    def __init__(self, keys: list[Tensor], values: list[Tensor], start: int, end: int) -> None:
        self._keys = keys
        self._values = values
        self._start = start
        self._end = end
        # SDPA's own causal flag aligns top-left: right only where nothing came before.
        shape = (end - start, end)
        self._mask = torch.ones(shape, dtype=torch.bool, device=keys[0].device).tril(start) if start else None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores k and v (T, K, E) and returns what the queries (T, H, E) read, (T, H * E)."""
        keys, values = self._keys[layer], self._values[layer]
        keys[:, self._start : self._end] = k.transpose(0, 1)
        values[:, self._start : self._end] = v.transpose(0, 1)
        y = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            keys[None, :, : self._end],
            values[None, :, : self._end],
            self._mask,
            is_causal=self._mask is None,
            enable_gqa=True,
        )  # (1, H, T, E)
        return y[0].transpose(0, 1).flatten(1)


class DecodeAttention:
    """Attention of one new token in each of the first B rows, each at a position of its own.

    One row is computed with the next one beside it, whatever that holds: alone it would be summed in another order.
    """

    def __init__(self, keys: list[Tensor], values: list[Tensor], positions: Sequence[int], num_padding: int) -> None:
        self._keys = keys
        self._values = values
        self._num_rows = B = len(positions)
        self._num_computed = max(B, 2)
        self._num_padding = num_padding + B - self._num_computed
        _, num_kv_heads, length, _ = keys[0].shape
        self._num_read = read_length(max(positions) + 1)
        at = torch.tensor(positions, device=keys[0].device)
        # Where each row's heads have their new entry in the cache seen as one list of entries of width E.
        heads = torch.arange(B * num_kv_heads, device=at.device).view(B, num_kv_heads)
        self._entries = (heads * length + at[:, None]).flatten()  # (B * K,)
        is_later = torch.arange(self._num_read, device=at.device) > at[:, None]
        mask = torch.zeros(is_later.shape, dtype=keys[0].dtype, device=at.device).masked_fill_(is_later, -torch.inf)
        self._mask = F.pad(mask, (0, 0, 0, self._num_computed - B))[:, None, None]  # (C, 1, 1, L), C rows computed

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores k and v (N, K, E) and returns what the queries (N, H, E) read, (N, H * E)."""
        keys, values = self._keys[layer], self._values[layer]
        B, C, (_, K, E) = self._num_rows, self._num_computed, k.shape
        keys.view(-1, E).index_copy_(0, self._entries, k[:B].reshape(-1, E))
        values.view(-1, E).index_copy_(0, self._entries, v[:B].reshape(-1, E))
        # The G query heads of one key/value head stand where more tokens would: nothing is repeated.
        y = F.scaled_dot_product_attention(
            q[:C].reshape(C, K, -1, E), keys[:C, :, : self._num_read], values[:C, :, : self._num_read], self._mask
        )  # (C, K, G, E)
        return F.pad(y.reshape(C, -1), (0, 0, 0, self._num_padding))


def read_length(num_tokens: int) -> int:
    """Returns the length at which a cache of so many tokens is read."""
    return -(-num_tokens // LENGTH_STEP) * LENGTH_STEP
