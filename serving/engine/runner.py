"""The model over the slots: prefill of the chunks of some sequences, and one decode step of all running rows.

N tokens in a forward with padding, P sequences that end their prompt in it, B rows of a decode step
D d_model, H n_heads, K n_kv_heads, E head_dim, V vocab_size
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from model.llama import Llama
from serving.engine.scheduler import Move
from serving.engine.slots import Piece, SlotCache
from serving.engine.weights import LayerWeights, pack, product, quantize, read_weights

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q (N, H, E), k (N, K, E), v (N, K, E)) -> (N, H * E); it keeps k and v."""

DeviceFailed = torch.AcceleratorError
"""A GPU's error that stays: after it every call of the process fails, also for requests that are sound."""

LEAST_ROWS = 4
"""A row's result must not depend on how many others there are. The libraries' products of fewer than four rows of
floats take another way, which sums in another order; from four on a row comes out the same, bit for bit, at every
width. Sums of integers are exact."""
PREFILL_STEP = 8
"""Prefills compute multiples of so many tokens; the reason is that of `LEAST_ROWS`, where 5, 6, 7 and 9 differ too."""


class Runner:
    """Owns weights and cache; used by one thread."""

    def __init__(self, model: Llama, *, num_slots: int, dtype: torch.dtype) -> None:
        self.config = model.config
        is_int8 = dtype == torch.int8
        plain = read_weights(model, torch.float32 if is_int8 else dtype)
        self._weights = quantize(plain) if is_int8 else pack(plain)
        self._rotary = model.model.rotary
        self._device = self._weights.embedding.device
        self._attention_dtype = torch.bfloat16 if is_int8 else dtype
        self._least_rows = 1 if is_int8 else LEAST_ROWS
        self._cache = SlotCache(model.config, num_slots, self._attention_dtype, self._device)

    def move(self, moves: Sequence[Move]) -> None:
        """Moves rows of the cache, in this order."""
        for move in moves:
            self._cache.move(move)

    @torch.inference_mode()
    def prefill(self, pieces: Sequence[Piece]) -> Tensor:
        """Computes tokens of several rows in one go; returns the logits (P, V) after those that end their prompt."""
        tokens = [token for piece in pieces for token in piece.tokens]
        positions = [piece.start + index for piece in pieces for index in range(len(piece.tokens))]
        padding = [0] * (-len(tokens) % PREFILL_STEP)
        for piece in pieces:
            if piece.start == 0:
                self._cache.clear(piece.row)
        hidden = self._forward([*tokens, *padding], [*positions, *padding], self._cache.prefill(pieces, len(padding)))
        ends = accumulate(len(piece.tokens) for piece in pieces)
        last = [end - 1 for end, piece in zip(ends, pieces, strict=True) if piece.is_last]
        if not last:
            return hidden.new_empty((0, self.config.vocab_size))
        return product(hidden[last + last[:1] * (self._width(len(last)) - len(last))], self._weights.head)[: len(last)]

    @torch.inference_mode()
    def decode(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Computes one token in each of the first B rows at its position; returns the logits (B, V) after it."""
        padding = [0] * (self._width(len(tokens)) - len(tokens))
        attend = self._cache.decode(positions, len(padding))
        hidden = self._forward([*tokens, *padding], [*positions, *padding], attend)
        return product(hidden, self._weights.head)[: len(tokens)]

    def _forward(self, tokens: Sequence[int], positions: Sequence[int], attend: Attention) -> Tensor:
        """Returns the last hidden states (N, D), normed."""
        weights = self._weights
        cos, sin = self._rotary(torch.tensor(positions, device=self._device))  # (N, 1, E/2), fp32
        rotation = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        x = F.embedding(torch.tensor(tokens, device=self._device), weights.embedding)  # (N, D)
        for index, layer in enumerate(weights.layers):
            q, k, v = self._project(self._norm(x, layer.attention_norm), layer, rotation)
            x = x + product(attend(index, q, k, v), layer.o)
            gate, up = product(self._norm(x, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
            x = x + product(F.silu(gate) * up, layer.down)
        return self._norm(x, weights.norm)

    def _project(
        self, x: Tensor, layer: LayerWeights, rotation: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        H, K, E = self.config.n_heads, self.config.n_kv_heads, self.config.head_dim
        heads = product(x, layer.qkv).view(len(x), H + 2 * K, E)
        qk = _rotate(heads[:, : H + K], *rotation).to(self._attention_dtype)
        return qk[:, :H], qk[:, H:], heads[:, H + K :].to(self._attention_dtype)

    def _width(self, num_rows: int) -> int:
        """Returns the number of rows, a power of two, at which so many are computed."""
        return max(1 << (num_rows - 1).bit_length(), self._least_rows)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm as the model computes it: in fp32, cast, then scaled."""
        x_fp32 = x.float()
        normed = x_fp32 * torch.rsqrt(x_fp32.square().mean(-1, keepdim=True) + self.config.norm_eps)
        return weight * normed.to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns x (N, heads, E) turned by angles, in fp32; halves paired as in Hugging Face.

    Args:
        cos: Of the angles (N, 1, E/2), twice.
        sin: Of the angles, the first time negative.
    """
    x = x.float()
    return (x * cos).add_(x.roll(x.shape[-1] // 2, dims=-1).mul_(sin))
