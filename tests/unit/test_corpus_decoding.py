import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.normalizer import Normalizer
from rayjob.corpus.decoding import cut_slabs, decode_bytes, decode_utf8

PLAIN = Normalizer(detokenize=False, lowercase=False)
CLEANING = Normalizer(detokenize=True, lowercase=True)
TOKENS = (
    "word",
    "Other",
    "word",
    "Other",
    "n't",
    "``",
    "''",
    "`",
    "'",
    "'s",
    ",",
    ".",
    "...",
    "-lrb-",
    "gon",
    "na",
    "'t",
)
TOKENS += ("will", "$", "5", "ΟΔΟΣ", "é", "\ufeff", "\u2581", "\0", ". .")


def test_valid_utf8_is_read_as_it_is() -> None:
    assert decode_bytes("naïve “quotes” 漢字 🙂\n".encode()) == ("naïve “quotes” 漢字 🙂\n", 0)


def test_bytes_that_are_not_utf8_are_read_as_windows_1252_and_counted() -> None:
    assert decode_bytes("“café” – it’s".encode("cp1252")) == ("“café” – it’s", 5)


def test_one_bad_byte_does_not_spoil_the_good_ones() -> None:
    assert decode_bytes("naïve ".encode() + b"caf\xe9 " + "漢字".encode()) == ("naïve café 漢字", 1)


def test_byte_without_a_windows_1252_character_becomes_the_replacement_character() -> None:
    assert decode_bytes(b"a\x81b") == ("a\N{REPLACEMENT CHARACTER}b", 1)


def test_lone_surrogate_is_one_replacement_character() -> None:
    assert decode_bytes(b"a \xed\xa0\x80 \xed\xbf\xbfb") == ("a \ufffd \ufffdb", 6)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_utf16_with_a_byte_order_mark_is_read(encoding: str) -> None:
    mark = b"" if encoding == "utf-16" else b"\xfe\xff"
    assert decode_bytes(mark + "Ein Café\n".encode(encoding)) == ("Ein Café\n", 0)


@given(st.binary(max_size=200))
def test_any_bytes_give_text_that_can_be_encoded(data: bytes) -> None:
    text, invalid = decode_bytes(data)
    assert invalid <= len(data)
    PLAIN(text).encode()


@pytest.fixture
def _short_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayjob.corpus.decoding.SLAB_BYTES", 40)


def bits(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


def normalize_slabs(data: bytes, normalizer: Normalizer, size: int = 16) -> str:
    return "".join(normalizer(decode_utf8(slab)[0]) for slab in cut_slabs(bits(data, size)))


@given(st.binary(max_size=300), st.integers(1, 80))
@pytest.mark.usefixtures("_short_slabs")
def test_slabs_are_bounded_and_join_to_the_bytes_however_they_come(data: bytes, size: int) -> None:
    slabs = list(cut_slabs(bits(data, size)))
    assert b"".join(slabs) == data
    assert all(0 < len(slab) <= 40 for slab in slabs)
    assert slabs == list(cut_slabs([data]))


# At most nine short tokens in a line, so that it ends within a slab.
lines = st.lists(
    st.lists(st.sampled_from(TOKENS), max_size=6).map(" ".join).filter(lambda line: len(line.encode()) < 19),
    max_size=20,
)


@given(lines, st.sampled_from(["\n", "\r\n", "\r", "\r\ufeff\n"]), st.booleans())
@pytest.mark.usefixtures("_short_slabs")
def test_normalized_slabs_are_the_normalized_text(some: list[str], line_end: str, has_odd_bytes: bool) -> None:
    data = line_end.join(some).encode()
    data = data.replace("é".encode(), b"\xe9") if has_odd_bytes else data
    assert normalize_slabs(data, CLEANING) == CLEANING(decode_bytes(data)[0])


@given(st.lists(st.lists(st.sampled_from(TOKENS[4:]), max_size=3).map(" ".join), max_size=20))
@pytest.mark.usefixtures("_short_slabs")
def test_long_line_is_cut_between_plain_words(some: list[str]) -> None:
    words = " word other word other "
    data = (words + words.join(each for each in some if len(each.encode()) < 10)).encode()
    slabs = list(cut_slabs([data]))
    assert all(slab[:5].strip().isalpha() and slab[:1] == b" " for slab in slabs[1:])
    assert normalize_slabs(data, CLEANING) == CLEANING(data.decode())


@pytest.mark.usefixtures("_short_slabs")
def test_line_without_plain_words_is_cut_before_a_space_and_else_between_characters() -> None:
    assert all(slab.startswith(b" ") for slab in list(cut_slabs([b"one ab " * 40]))[1:])
    slabs = list(cut_slabs(["漢字🙂é".encode() * 40]))
    assert "".join(slab.decode() for slab in slabs) == "漢字🙂é" * 40
    assert all(len(slab) >= 40 - len("🙂".encode()) for slab in slabs[:-1])


@given(st.integers(30, 40), st.integers(0, 6))
@pytest.mark.usefixtures("_short_slabs")
def test_character_before_stray_bytes_stays_whole(before: int, stray: int) -> None:
    data = b"a" * before + "🙂".encode() + b"\x80" * stray + b"b" * 30
    decoded = [decode_utf8(slab) for slab in cut_slabs([data])]
    assert ("".join(text for text, _ in decoded), sum(invalid for _, invalid in decoded)) == decode_utf8(data)


def test_slab_is_as_long_as_its_lines_allow() -> None:
    data = b"".join(b"line %d\n" % number for number in itertools.islice(itertools.count(), 100_000))
    slabs = list(cut_slabs([data]))
    assert all(2**18 - 20 < len(slab) <= 2**18 for slab in slabs[:-1])
