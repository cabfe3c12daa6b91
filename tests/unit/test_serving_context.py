"""Prompt and answer share the context; what does not fit is refused with both numbers or cut at the left."""

import pytest

from serving.engine.context import ContextLengthExceeded, fit_prompt


@pytest.mark.parametrize(
    ("prompt_tokens", "max_new_tokens", "expected"),
    [
        (1, None, 128),
        (500, None, 12),
        (511, None, 1),
        (512, None, 1),
        (1, 511, 511),
        (500, 12, 12),
        (512, 1, 1),
    ],
)
def test_what_fits_is_left_alone(prompt_tokens: int, max_new_tokens: int | None, expected: int) -> None:
    fitted = fit_prompt(range(prompt_tokens), max_new_tokens, 512)
    assert fitted == (tuple(range(prompt_tokens)), expected, 0)


@pytest.mark.parametrize(("prompt_tokens", "max_new_tokens"), [(513, None), (513, 1), (512, 2), (500, 13), (1, 512)])
def test_what_does_not_fit_is_refused_with_both_numbers(prompt_tokens: int, max_new_tokens: int | None) -> None:
    with pytest.raises(ContextLengthExceeded, match=rf"\b{prompt_tokens} tokens.*\b512\b"):
        fit_prompt(range(prompt_tokens), max_new_tokens, 512)


@pytest.mark.parametrize(
    ("prompt_tokens", "max_new_tokens", "kept"),
    [(600, 100, 412), (500, 100, 412), (600, None, 384), (600, 511, 1)],
)
def test_truncate_left_drops_the_oldest_tokens(prompt_tokens: int, max_new_tokens: int | None, kept: int) -> None:
    fitted = fit_prompt(range(prompt_tokens), max_new_tokens, 512, truncate_left=True)
    assert fitted.tokens == tuple(range(prompt_tokens))[-kept:]
    assert fitted.truncated_tokens == prompt_tokens - kept
    assert len(fitted.tokens) + fitted.max_new_tokens <= 512


def test_truncate_left_leaves_a_prompt_that_fits() -> None:
    assert fit_prompt([1, 2, 3], 5, 512, truncate_left=True).truncated_tokens == 0


def test_truncate_left_cannot_make_room_for_an_answer_that_fills_the_context() -> None:
    with pytest.raises(ContextLengthExceeded):
        fit_prompt(range(600), 512, 512, truncate_left=True)
