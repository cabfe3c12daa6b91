"""Why a sequence ends when several reasons come with the same token."""

import pytest

from model.generate import GeneratedToken
from serving.engine.sequence import Delta, SequenceSpec, Transcript
from tests.serving_checkpoint import trained_tokenizer

TOKENIZER = trained_tokenizer(320)
WORDS = TOKENIZER.encode("Once upon a time")


def deltas_of(tokens: list[int], **fields: object) -> list[Delta]:
    spec = SequenceSpec(prompt=(5,), seed=0, **{"max_new_tokens": len(tokens), **fields})  # type: ignore[arg-type]
    transcript = Transcript(spec, TOKENIZER)
    return [transcript.push(GeneratedToken(token, -1.0, [])) for token in tokens]


def ends(deltas: list[Delta]) -> list[tuple[str | None, str | None]]:
    return [(delta.finish_reason, delta.stop_reason) for delta in deltas]


def test_the_last_token_allowed_ends_with_length() -> None:
    assert ends(deltas_of(WORDS)) == [(None, None)] * (len(WORDS) - 1) + [("length", None)]


@pytest.mark.parametrize("max_new_tokens", [len(WORDS) + 1, 100])
def test_eos_ends_with_stop_at_the_limit_too(max_new_tokens: int) -> None:
    deltas = deltas_of([*WORDS, TOKENIZER.eos_id], max_new_tokens=max_new_tokens)
    assert ends(deltas)[-1] == ("stop", None)
    assert "".join(delta.text for delta in deltas) == "Once upon a time"


def test_an_ignored_eos_ends_nothing_and_adds_no_text() -> None:
    deltas = deltas_of([WORDS[0], TOKENIZER.eos_id, *WORDS[1:]], ignore_eos=True)
    assert [delta.finish_reason for delta in deltas][:-1] == [None] * len(WORDS)
    assert "".join(delta.text for delta in deltas) == "Once upon a time"


@pytest.mark.parametrize("max_new_tokens", [len(WORDS), 100])
def test_a_stop_string_ends_with_stop_at_the_limit_too(max_new_tokens: int) -> None:
    deltas = deltas_of(WORDS, max_new_tokens=max_new_tokens, stop=("time",))
    assert ends(deltas)[-1] == ("stop", "time")
    assert "".join(delta.text for delta in deltas) == "Once upon a "


def test_text_held_back_for_a_stop_string_comes_with_eos() -> None:
    deltas = deltas_of([*WORDS, TOKENIZER.eos_id], max_new_tokens=100, stop=("time!",))
    assert ends(deltas)[-1] == ("stop", None)
    assert "".join(delta.text for delta in deltas) == "Once upon a time"
