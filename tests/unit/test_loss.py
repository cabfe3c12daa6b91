"""The loss in pieces against plain cross-entropy over the whole batch."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import model.loss
from model.loss import LossSums, cross_entropy_sums

B, T, D, V = 3, 17, 16, 50


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 7 rows: 51 rows make 8 pieces, the last of 2 rows; each is gone through 3 rows at a time."""
    monkeypatch.setattr(model.loss, "rows_per_piece", lambda n_rows, vocab_size: 7)
    monkeypatch.setattr(model.loss, "rows_in_cache", lambda vocab_size, device_type: 3)


@pytest.fixture
def real_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes of a run; undoes the small ones."""
    monkeypatch.undo()


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(B, T, D, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator).requires_grad_()
    targets = torch.randint(V, (B, T), generator=generator)
    targets[torch.rand(B, T, generator=generator) < 0.3] = -100
    return hidden, weight, targets


def plain_sums(hidden: Tensor, weight: Tensor, targets: Tensor) -> LossSums:
    logits = F.linear(hidden, weight).float().flatten(0, 1)
    flat = targets.flatten()
    nats = F.cross_entropy(logits, flat, ignore_index=-100, reduction="sum")
    return LossSums(nats, (logits.argmax(1) == flat).sum(), (flat != -100).sum())


def test_sums_and_gradients_equal_plain_cross_entropy() -> None:
    hidden, weight, targets = inputs()
    sums = cross_entropy_sums(hidden, weight, targets)
    gradients = torch.autograd.grad(sums.nats / sums.tokens, (hidden, weight))
    plain = plain_sums(hidden, weight, targets)
    wanted = torch.autograd.grad(plain.nats / plain.tokens, (hidden, weight))
    torch.testing.assert_close(sums.nats, plain.nats)
    assert (sums.correct, sums.tokens) == (plain.correct, plain.tokens)
    torch.testing.assert_close(gradients, wanted)


def test_gradient_agrees_with_finite_differences() -> None:
    hidden, weight, targets = inputs(torch.float64)
    weight = weight.detach().double().requires_grad_()
    direction = torch.randn(V, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (gradient,) = torch.autograd.grad(cross_entropy_sums(hidden, weight, targets).nats, weight)
    step = 1e-3
    with torch.no_grad():
        up, down = (cross_entropy_sums(hidden, weight + s * direction, targets).nats for s in (step, -step))
    # 1 %: the sums are kept in fp32, 7 digits of ~300 nats, of which the difference takes 3.
    assert ((up - down) / (2 * step)).item() == pytest.approx((gradient * direction).sum().item(), rel=0.01)


@pytest.mark.parametrize("rows", [1, 7, 17, 25, 51, 1_000_000])
def test_pieces_of_any_size_equal_plain_cross_entropy(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """25 and 7 leave a last piece of 1 and of 2 rows; 51 and more are one piece."""
    monkeypatch.setattr(model.loss, "rows_per_piece", lambda n_rows, vocab_size: rows)
    hidden, weight, targets = inputs()
    sums = cross_entropy_sums(hidden, weight, targets)
    gradients = torch.autograd.grad(sums.nats, (hidden, weight))
    plain = plain_sums(hidden, weight, targets)
    wanted = torch.autograd.grad(plain.nats, (hidden, weight))
    for mine, plains in zip((sums.nats, *gradients), (plain.nats, *wanted), strict=True):
        # 1e-6 of the size of the tensor: fp32 keeps 6e-8 of each value, and sums run in another order.
        assert (mine - plains).norm() <= 1e-6 * plains.norm()
    assert (sums.correct, sums.tokens) == (plain.correct, plain.tokens)


def test_no_counted_target_gives_zero_and_zero_gradients() -> None:
    hidden, weight, targets = inputs()
    sums = cross_entropy_sums(hidden, weight, torch.full_like(targets, -100))
    assert [value.item() for value in sums] == [0.0, 0, 0]
    for gradient in torch.autograd.grad(sums.nats, (hidden, weight)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_micro_batches_of_unequal_token_counts_equal_one_batch() -> None:
    hidden, weight, targets = inputs()
    targets = torch.full_like(targets, 3)
    targets[1, 3:] = -100  # 3 counted targets beside 17 and none
    targets[2] = -100
    whole = cross_entropy_sums(hidden, weight, targets)
    wanted = torch.autograd.grad(whole.nats / whole.tokens, weight)[0]
    parts = [cross_entropy_sums(hidden[i : i + 1], weight, targets[i : i + 1]) for i in range(B)]
    n_tokens = sum(part.tokens for part in parts)
    summed = sum(torch.autograd.grad(part.nats / n_tokens, weight)[0] for part in parts)
    assert [part.tokens.item() for part in parts] == [17, 3, 0]
    torch.testing.assert_close(summed, wanted, atol=1e-5, rtol=1e-5)  # sums in another order


def test_correct_counts_the_first_of_equal_logits_as_argmax_does() -> None:
    weight = torch.ones(V, D)
    hidden = torch.ones(1, 2, D)
    assert cross_entropy_sums(hidden, weight, torch.tensor([[0, 1]])).correct == 1


@pytest.mark.parametrize("vocab_size", [300, 4096, 50_304, 65_536])
@pytest.mark.parametrize("n_rows", [1, 2048, 16_384, 100_000])
def test_pieces_bound_the_memory_and_cover_the_rows(n_rows: int, vocab_size: int, real_sizes: None) -> None:
    rows = model.loss.rows_per_piece(n_rows, vocab_size)
    assert rows * vocab_size <= model.loss.MAX_LOGITS
    assert rows % 64 == 0
    n_pieces = -(-n_rows // rows)
    assert n_pieces * rows - n_rows < 64 * n_pieces, "pieces are about equal"


def test_dtypes_are_as_promised() -> None:
    hidden, weight, targets = inputs(torch.bfloat16)
    sums = cross_entropy_sums(hidden, weight, targets)
    assert [value.dtype for value in sums] == [torch.float32, torch.int64, torch.int64]
    assert all(value.dim() == 0 for value in sums)
    hidden_grad, weight_grad = torch.autograd.grad(sums.nats, (hidden, weight))
    assert (hidden_grad.dtype, weight_grad.dtype) == (torch.bfloat16, torch.float32)


def test_under_bf16_autocast_softmax_and_sums_are_fp32() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 2048, D, generator=generator)
    weight = torch.randn(V, D, generator=generator)
    targets = torch.randint(V, (1, 2048), generator=generator)
    with torch.autocast("cpu", torch.bfloat16):
        nats = cross_entropy_sums(hidden, weight, targets).nats
    logits = (hidden.bfloat16() @ weight.bfloat16().T).double()  # what the product gives, rounded to bf16
    exact = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    # 1e-5: fp32. With sums in bf16 it would be off by 1e-2, with the softmax in bf16 by 1e-3.
    assert nats.item() == pytest.approx(exact.item(), rel=1e-5)


def test_huge_logits_overflow_neither_loss_nor_gradient() -> None:
    hidden, weight, targets = inputs()
    sums = cross_entropy_sums(hidden * 1e4, weight, targets)
    gradients = torch.autograd.grad(sums.nats, (hidden, weight))
    assert sums.nats.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_nan_in_a_row_that_does_not_count_stays_out() -> None:
    hidden, weight, targets = inputs()
    targets[0, 0] = -100
    with torch.no_grad():
        hidden[0, 0] = float("nan")
    sums = cross_entropy_sums(hidden, weight, targets)
    assert sums.nats.isfinite()


def test_without_gradient_none_is_computed() -> None:
    hidden, weight, targets = inputs()
    with torch.no_grad():
        sums = cross_entropy_sums(hidden, weight, targets)
    assert not sums.nats.requires_grad
    torch.testing.assert_close(sums.nats, plain_sums(hidden, weight, targets).nats)


def test_without_grad_mode_a_weight_that_requires_gradients_costs_one_product() -> None:
    hidden, weight = torch.randn(6, 4), torch.randn(8, 4, requires_grad=True)
    with torch.no_grad(), torch.profiler.profile() as profile:
        cross_entropy_sums(hidden, weight, torch.randint(8, (6,)))
    assert sum(event.count for event in profile.key_averages() if event.key == "aten::mm") == 1


def test_a_whole_batch_of_logits_never_stands_in_memory() -> None:
    largest = 0

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                largest = max(largest, result.numel())
            return result

    hidden, weight, targets = inputs()
    with Largest():
        cross_entropy_sums(hidden, weight, targets).nats.backward()
    assert 0 < largest <= max(weight.numel(), hidden.numel())
