"""Decoding with the cache equals one pass over everything."""

import pytest
import torch
from torch import Tensor

from model.config import ModelConfig
from model.kv_cache import KVCache
from model.llama import Llama

CONFIG = ModelConfig(vocab_size=320, d_model=96, n_layers=3, n_heads=12, n_kv_heads=4, d_ff=128, max_seq_len=80)


@pytest.fixture(scope="module")
def model() -> Llama:
    model = Llama(CONFIG)
    model.init_weights(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # attention far from uniform, so that a wrong key shows
    return model.eval()


def tokens_of(n_tokens: int, batch_size: int = 1) -> Tensor:
    return torch.randint(320, (batch_size, n_tokens), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("pieces", [[50], [1] * 50, [2] * 25, [7] * 7 + [1], [49, 1], [1, 49], [25, 25]])
def test_prefill_in_pieces_then_decode_equals_one_pass(model: Llama, pieces: list[int]) -> None:
    tokens = tokens_of(70, batch_size=2)
    cache = KVCache(CONFIG, 2)
    logits = [model(part, cache=cache) for part in torch.split(tokens, [*pieces, *[1] * 20], dim=1)]
    assert cache.offset == 70
    # 1e-4: fp32 products of other shapes sum in another order; a wrong key changes logits by more than 0.1.
    torch.testing.assert_close(torch.cat(logits, 1), model(tokens), atol=1e-4, rtol=0)


def test_cache_fills_to_max_seq_len_and_refuses_more_with_the_numbers(model: Llama) -> None:
    cache = KVCache(CONFIG, 1)
    model(tokens_of(79), cache=cache)
    model(tokens_of(1), cache=cache)
    with pytest.raises(ValueError, match=r"80 tokens and got 1 more.*max_seq_len is 80"):
        model(tokens_of(1), cache=cache)


def test_cache_works_in_bf16(model: Llama) -> None:
    half = Llama(CONFIG).bfloat16()
    half.load_state_dict(model.state_dict())
    cache = KVCache(CONFIG, 1, torch.bfloat16)
    tokens = tokens_of(30)
    cached = torch.cat([half(part, cache=cache) for part in torch.split(tokens, [20, 5, 5], dim=1)], 1)
    whole = half(tokens)
    assert cached.dtype == torch.bfloat16
    # 2 % of the spread: bf16 rounds at 0.4 % after each of the layers' products.
    assert (cached - whole).float().std() < 0.02 * whole.float().std()


def test_rows_of_their_own_lengths_can_share_a_batch(model: Llama) -> None:
    """An engine's cache with one length per row fits into the same forward (see AttentionCache)."""
    lengths = [3, 17]
    tokens = tokens_of(18, batch_size=2)
    rows = RowCache(lengths)
    for row, length in enumerate(lengths):
        prefilled = KVCache(CONFIG, 1)
        model(tokens[row : row + 1, :length], cache=prefilled)
        for layer in range(CONFIG.n_layers):
            rows.keys[layer][row] = prefilled.keys[layer][0]
            rows.values[layer][row] = prefilled.values[layer][0]
    new = torch.stack([tokens[row, length] for row, length in enumerate(lengths)]).unsqueeze(1)
    together = model(new, cache=rows)[:, 0]
    for row, length in enumerate(lengths):
        alone = model(tokens[row : row + 1, : length + 1])[0, -1]
        torch.testing.assert_close(together[row], alone, atol=1e-4, rtol=0)  # as above


class RowCache(KVCache):
    """One token per row and forward, each row at a position of its own."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__(CONFIG, len(lengths))
        self.lengths = torch.tensor(lengths)

    def positions(self, n_tokens: int) -> Tensor:
        return self.lengths.unsqueeze(1)

    def mask(self, n_tokens: int) -> Tensor:
        return (torch.arange(CONFIG.max_seq_len) <= self.lengths.unsqueeze(1))[:, None, None]

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.arange(len(self.lengths))
        self.keys[layer][rows, :, self.lengths] = keys[:, :, 0]
        self.values[layer][rows, :, self.lengths] = values[:, :, 0]
        return self.keys[layer], self.values[layer]
