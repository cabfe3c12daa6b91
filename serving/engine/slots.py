"""Keys and values of all slots: one tensor of each for every layer, a row for every slot, never reallocated.

Keys lie transposed, the tokens in their last dimension: the product of a decode step reads them as they are then,
in about half the time.

B rows, N rows with padding, T new tokens, S length of the cache, L length read
H n_heads, K n_kv_heads, G query heads of one key/value head, E head_dim
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model.config import ModelConfig
from serving.engine.scheduler import Move

LENGTH_STEP = 64
"""Lengths at which the cache is read are its multiples, so that few shapes occur."""


class Piece(NamedTuple):
    """Consecutive tokens of one sequence, the first `start` of which are in its row already."""

    row: int
    start: int
    tokens: Sequence[int]
    is_last: bool  # whether the prompt ends with them


class SlotCache:
    """The cache; attention reads it here, so that nothing else knows its layout."""

    def __init__(self, config: ModelConfig, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        """Reserves room for max_seq_len tokens in each of `num_slots` rows; memory is touched only when written."""
        heads, length, width = config.n_kv_heads, read_length(config.max_seq_len), config.head_dim
        self._keys = [_zeros((num_slots, heads, width, length), dtype, device) for _ in range(config.n_layers)]
        self._values = [_zeros((num_slots, heads, length, width), dtype, device) for _ in range(config.n_layers)]

    def move(self, move: Move) -> None:
        """Copies a row into another one."""
        for tensor in (*self._keys, *self._values):
            tensor[move.target] = tensor[move.source]

    def clear(self, row: int) -> None:
        """Forgets a row. What a mask hides must be finite all the same: 0 times NaN is NaN."""
        for tensor in (*self._keys, *self._values):
            tensor[row].zero_()

    def prefill(self, pieces: Sequence[Piece], num_padding: int) -> "PackedAttention":
        """Returns the attention of the tokens of several rows, one row's after another's, then `num_padding` zeros."""
        return PackedAttention([PrefillAttention(self._keys, self._values, piece) for piece in pieces], num_padding)

    def decode(self, positions: Sequence[int], num_padding: int = 0) -> "DecodeAttention":
        """Returns the attention of one new token at `positions` (B,) in each of the first B rows.

        After them come `num_padding` rows that have no place in the cache and read zeros.
        """
        return DecodeAttention(self._keys, self._values, positions, num_padding)


class PackedAttention:
    """Attention of the tokens of several sequences, each with itself alone."""

    def __init__(self, parts: Sequence["PrefillAttention"], num_padding: int) -> None:
        self._parts = parts
        self._num_padding = num_padding
        self._lengths = [*(part.num_tokens for part in parts), num_padding]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores k and v (N, K, E) and returns what the queries (N, H, E) read, (N, H * E)."""
        of_parts = zip(*(tensor.split_with_sizes(self._lengths) for tensor in (q, k, v)), strict=True)
        y = [part(layer, *one) for part, one in zip(self._parts, of_parts, strict=False)]
        return F.pad(torch.cat(y), (0, 0, 0, self._num_padding))


class PrefillAttention:
    """Causal attention of consecutive tokens of one sequence, whose earlier ones are in the cache."""

    def __init__(self, keys: list[Tensor], values: list[Tensor], piece: Piece) -> None:
        self.num_tokens = len(piece.tokens)
        self._keys = keys
        self._values = values
        self._row = piece.row
        self._start = start = piece.start
        self._end = end = start + self.num_tokens
        # SDPA's own causal flag aligns top-left: right only where nothing came before.
        shape = (self.num_tokens, end)
        self._mask = torch.ones(shape, dtype=torch.bool, device=keys[0].device).tril(start) if start else None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores k and v (T, K, E) and returns what the queries (T, H, E) read, (T, H * E)."""
        keys, values = self._keys[layer][self._row], self._values[layer][self._row]  # (K, E, S), (K, S, E)
        keys[:, :, self._start : self._end] = k.permute(1, 2, 0)
        values[:, self._start : self._end] = v.transpose(0, 1)
        if self._start:
            k = keys[:, :, : self._end].permute(2, 0, 1).contiguous()  # (S, K, E), the earlier ones too
            v = values[:, : self._end].transpose(0, 1)
        y = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            self._mask,
            is_causal=self._mask is None,
            enable_gqa=True,
        )  # (1, H, T, E)
        return y[0].transpose(0, 1).flatten(1)


class DecodeAttention:
    """Attention of one new token in each of the first B rows, each at a position of its own.

    Written out: on a CPU the fused kernel takes twice as long for a single query. A row comes out the same, bit for
    bit, whatever the number of rows and the length read.
    """

    def __init__(self, keys: list[Tensor], values: list[Tensor], positions: Sequence[int], num_padding: int) -> None:
        self._keys = keys
        self._values = values
        self._num_padding = num_padding
        self._num_read = read_length(max(positions) + 1)
        self._at = at = torch.tensor(positions, device=keys[0].device)
        self._rows = torch.arange(len(positions), device=at.device)
        is_later = torch.arange(self._num_read, device=at.device) > at[:, None]
        mask = torch.zeros(is_later.shape, dtype=keys[0].dtype, device=at.device).masked_fill_(is_later, -torch.inf)
        self._mask = mask[:, None, None]  # (B, 1, 1, L)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores k and v (N, K, E) and returns what the queries (N, H, E) read, (N, H * E)."""
        keys, values = self._keys[layer], self._values[layer]
        B, (_, K, E) = len(self._rows), k.shape
        keys[self._rows, :, :, self._at] = k[:B]
        values[self._rows, :, self._at] = v[:B]
        # The G query heads of one key/value head stand where more tokens would: nothing is repeated.
        queries = (q[:B] * E**-0.5).view(B, K, -1, E)
        scores = torch.matmul(queries, keys[:B, :, :, : self._num_read]).add_(self._mask)  # (B, K, G, L)
        y = torch.matmul(scores.softmax(-1), values[:B, :, : self._num_read])  # (B, K, G, E)
        return F.pad(y.view(B, -1), (0, 0, 0, self._num_padding))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def read_length(num_tokens: int) -> int:
    """Returns the length at which a cache of so many tokens is read."""
    return -(-num_tokens // LENGTH_STEP) * LENGTH_STEP
