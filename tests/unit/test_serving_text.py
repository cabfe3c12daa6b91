"""Incremental text: characters stay whole, stop strings never leak, deltas joined equal the whole."""

import codecs
import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from serving.engine.text import TextStream


def one_byte(token: int) -> bytes:
    return bytes([token])


def deltas_of(text: str, stop: tuple[str, ...] = (), *, include_stop: bool = False) -> tuple[list[str], str | None]:
    """Feeds the text byte by byte, as a tokenizer with byte fallback would, until a stop string ends it."""
    stream = TextStream(one_byte, stop, include_stop=include_stop)
    raw = text.encode()
    deltas = []
    for position, byte in enumerate(raw):
        deltas.append(stream.push(byte, is_last=position == len(raw) - 1))
        if stream.stop_reason is not None:
            break
    return deltas, stream.stop_reason


def cut(text: str, stop: tuple[str, ...]) -> str:
    """The oracle: the text before the earliest stop string."""
    return text[: min((at for s in stop if (at := text.find(s)) >= 0), default=len(text))]


def test_a_character_is_sent_once_all_of_its_bytes_are_there() -> None:
    deltas, _ = deltas_of("a😀é")
    assert deltas == ["a", "", "", "", "😀", "", "é"]


def test_a_character_cut_by_the_end_becomes_one_replacement_character() -> None:
    stream = TextStream(one_byte)
    assert stream.push(ord("a")) == "a"
    assert stream.push(0xF0) == ""
    assert stream.push(0x9F, is_last=True) == "\ufffd"


def test_control_tokens_add_no_text() -> None:
    stream = TextStream(lambda token: b"" if token == 2 else b"x")
    assert [stream.push(1), stream.push(2, is_last=True)] == ["x", ""]


def test_text_ends_before_a_stop_string_that_spans_tokens() -> None:
    deltas, reason = deltas_of("ban" + "ana split", ("ana",))
    assert "".join(deltas) == "b"
    assert reason == "ana"


def test_include_stop_leaves_the_stop_string() -> None:
    deltas, _ = deltas_of("banana", ("nan",), include_stop=True)
    assert "".join(deltas) == "banan"


def test_the_beginning_of_a_stop_string_is_sent_once_it_cannot_become_one() -> None:
    deltas, reason = deltas_of("xENx", ("END",))
    assert deltas == ["x", "", "", "ENx"]
    assert reason is None


def test_what_was_held_back_for_a_stop_string_is_sent_at_the_end() -> None:
    deltas, reason = deltas_of("xEN", ("END",))
    assert deltas == ["x", "", "EN"]
    assert reason is None


def test_the_longest_of_two_stop_strings_that_begin_together_wins() -> None:
    stream = TextStream(lambda token: b"abc!", ("ab", "abc"))
    assert stream.push(0) == ""
    assert stream.stop_reason == "abc"


def test_the_earliest_stop_string_wins_whatever_their_order() -> None:
    stream = TextStream(lambda token: b"one two", ("two", "one"))
    assert stream.push(0) == ""
    assert stream.stop_reason == "one"


texts = st.text(st.sampled_from("abé😀"), min_size=1, max_size=30)
stops = st.lists(st.text(st.sampled_from("abé😀"), min_size=1, max_size=4), max_size=3).map(tuple)


@given(texts, stops)
def test_joined_deltas_equal_the_text_cut_at_a_stop_string(text: str, stop: tuple[str, ...]) -> None:
    deltas, reason = deltas_of(text, stop)
    if reason is None:
        assert "".join(deltas) == text
        assert cut(text, stop) == text
    else:
        # A stop string that was complete first ends the text, even if a longer one began before it.
        first_end = min(at + len(s) for s in stop if (at := text.find(s)) >= 0)
        assert "".join(deltas) == cut(text[:first_end], stop)


@given(texts, stops)
def test_no_delta_leaks_a_stop_string(text: str, stop: tuple[str, ...]) -> None:
    deltas, _ = deltas_of(text, stop)
    sent = "".join(deltas)
    assert "\ufffd" not in sent
    assert not any(s in sent for s in stop)


def oracle(tokens: list[bytes], stop: tuple[str, ...], *, include_stop: bool) -> tuple[str, str | None]:
    """What the text is and which stop string ended it, from the whole text after each token."""
    for count in range(1, len(tokens) + 1):
        raw = b"".join(tokens[:count])
        text = raw.decode("utf-8", errors="replace")
        if count < len(tokens):  # an unfinished character may still become one
            text = codecs.getincrementaldecoder("utf-8")(errors="replace").decode(raw)
        hits = sorted((text.find(s), -len(s), s) for s in stop if s in text)
        if hits:
            at, _, hit = hits[0]
            return text[:at] + (hit if include_stop else ""), hit
    return text, None


def random_tokens(rng: random.Random) -> list[bytes]:
    """A text cut anywhere, within characters too; now and then with bytes that are no text."""
    raw = "".join(rng.choice("aab bé😀\u0301") for _ in range(rng.randint(1, 24))).encode()
    if rng.random() < 0.2:
        at = rng.randrange(len(raw))
        raw = raw[:at] + bytes([rng.randrange(128, 256)]) + raw[at:]
    borders = sorted(rng.sample(range(1, len(raw)), rng.randrange(len(raw)))) if len(raw) > 1 else []
    tokens = [raw[start:end] for start, end in pairwise([0, *borders, len(raw)])]
    return [b"", *tokens] if rng.random() < 0.1 else tokens


def test_20000_texts_cut_anywhere_equal_the_oracle_and_nothing_sent_is_taken_back() -> None:
    rng = random.Random(0)
    for _ in range(20_000):
        tokens = random_tokens(rng)
        stop = tuple("".join(rng.choice("ab é😀") for _ in range(rng.randint(1, 4))) for _ in range(rng.randrange(4)))
        include_stop = rng.random() < 0.3
        stream = TextStream(tokens.__getitem__, stop, include_stop=include_stop)
        sent = ""
        text, reason = oracle(tokens, stop, include_stop=include_stop)
        for token in range(len(tokens)):
            sent += stream.push(token, is_last=token == len(tokens) - 1)
            assert text.startswith(sent), (tokens, stop)
            if stream.stop_reason is not None:
                break
        assert (sent, stream.stop_reason) == (text, reason), (tokens, stop)
