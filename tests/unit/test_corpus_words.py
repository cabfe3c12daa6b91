import re
from collections import Counter
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.normalizer import Normalizer
from model.tokenizer import Tokenizer, count_words, train_tokenizer
from rayjob.corpus import words
from rayjob.corpus.errors import CorpusError
from rayjob.corpus.row_units import RowUnit
from rayjob.corpus.text import Text
from rayjob.corpus.tokenize import encode_words
from rayjob.corpus.words import Words, load_words, save_words, split_words, words_path
from rayjob.corpus.words import count_words as count_kept

NASTY = "</s> <s> <unk> <0x41>  two  spaces\t\ttabs\n\n\nnaïve 漢字 🙂 \ufffd 1984 \n end </s> "


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    text = "the cat sat on the mat, and the dog saw it.\n" * 20 + NASTY
    return Tokenizer(train_tokenizer([text], vocab_size=340), Normalizer(detokenize=False, lowercase=False))


def split(*texts: str) -> Words:
    return split_words(iter(Text(f"doc {number}", [text], True) for number, text in enumerate(texts)))


def join(found: Words) -> str:
    return "".join(found.words[number] for number in found.order)


def encode(found: Words, tokenizer: Tokenizer) -> list[list[int]]:
    return [row.tokens.tolist() for row in encode_words(found, tokenizer)]


texts = st.text(alphabet="ab \t\n\u00e9.", max_size=80)


@given(texts)
def test_words_join_to_the_text(text: str) -> None:
    assert join(split(text)) == text


@given(st.lists(texts, max_size=4))
def test_words_begin_at_spaces_and_line_breaks_and_are_numbered_as_they_come(several: list[str]) -> None:
    found = split(*several)
    pieces = [re.findall(r"[ \n][^ \n]*|[^ \n]+", text) for text in several]
    assert found.words == list(dict.fromkeys(chain.from_iterable(pieces)))
    assert [found.words[number] for number in found.order] == list(chain.from_iterable(pieces))
    assert [row.n_words for row in found.rows] == list(map(len, pieces))
    assert found.text_bytes == len("".join(several).encode())


@given(texts)
def test_counts_train_the_tokenizer_that_the_text_trains(text: str) -> None:
    found = split(text)
    counted: Counter[str] = Counter()
    for word, count in zip(found.words, np.bincount(found.order, minlength=len(found.words)).tolist(), strict=True):
        for part, times in count_words(word).items():
            counted[part] += count * times
    assert counted == count_words(text)


@given(st.text(alphabet="thecatdogs .,\t\n\u00e91漢</>", max_size=200))
def test_tokens_of_words_are_the_tokens_of_the_text(tokenizer: Tokenizer, text: str) -> None:
    assert encode(split(text), tokenizer) == [[*tokenizer.encode(text), tokenizer.eos_id]]


def test_control_spellings_and_white_space_survive(tokenizer: Tokenizer) -> None:
    [tokens] = encode(split(NASTY), tokenizer)
    assert tokens.count(tokenizer.eos_id) == 1
    assert tokenizer.decode(tokens) == NASTY


def test_eos_follows_only_where_a_document_ends(tokenizer: Tokenizer) -> None:
    found = split_words(iter([Text("a", ["the", " cat"], False), Text("a", [" sat"], True), Text("b", [], True)]))
    one, two, three = encode(found, tokenizer)
    assert one == tokenizer.encode("the cat")
    assert two == [*tokenizer.encode(" sat"), tokenizer.eos_id]
    assert three == [tokenizer.eos_id]


def test_tokenizer_with_a_piece_across_words_is_refused(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text: [len(text)])
    with pytest.raises(CorpusError, match="reach across words.*remove tokenizers/"):
        encode_words(split("xx yy zz"), Tokenizer(tokenizer._model, Normalizer(detokenize=True, lowercase=True)))


def test_kept_words_read_back(tmp_path: Path) -> None:
    path = tmp_path / "key.words.parquet"
    found = split("the cat", "naïve\n\n", "")
    save_words(path, found)
    again = load_words(path)
    assert again is not None
    assert (again.words, again.rows, again.text_bytes) == (found.words, found.rows, found.text_bytes)
    assert again.order.tolist() == found.order.tolist()


@pytest.mark.parametrize("least_waiting_words", [0, 5, 10**6])
def test_kept_counts_add_up(least_waiting_words: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "LEAST_WAITING_WORDS", least_waiting_words)
    normalizer = Normalizer(detokenize=False, lowercase=False)
    texts = ["the cat", "", "the dog saw the cat", "a cat\n\na dog", " the dog"]
    units = [RowUnit("train", number, f"column {number}", ()) for number in range(len(texts))]
    for unit, text in zip(units, texts, strict=True):
        save_words(words_path(tmp_path, unit, normalizer), split(text))
    expected = Counter(piece for text in texts for piece in re.findall(r"[ \n][^ \n]*|[^ \n]+", text))
    assert count_kept(units, tmp_path, normalizer, lambda: False) == expected


def test_words_of_other_rules_are_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = RowUnit("train", 0, "text", ())
    normalizer = Normalizer(detokenize=True, lowercase=True)
    before = words_path(tmp_path, unit, normalizer)
    assert words_path(tmp_path, unit, normalizer) == before
    monkeypatch.setattr("rayjob.corpus.words.FORMAT", -1)
    assert words_path(tmp_path, unit, normalizer) != before


def test_words_that_were_half_written_are_absent(tmp_path: Path) -> None:
    path = tmp_path / "key.words.parquet"
    assert load_words(path) is None
    save_words(path, split("the cat"))
    path.unlink()  # it is written last
    assert load_words(path) is None
    path.write_bytes(b"torn")
    assert load_words(path) is None


def test_documents_whose_ends_would_join_to_a_piece_keep_their_own_tokens(tokenizer: Tokenizer) -> None:
    several = ["the c", "at sat on t", "he mat,", " and the d", "og "]
    assert len(tokenizer.encode("".join(several))) < sum(len(tokenizer.encode(text)) for text in several)
    assert encode(split(*several), tokenizer) == [[*tokenizer.encode(text), tokenizer.eos_id] for text in several]


@given(st.lists(texts, max_size=5))
def test_words_do_not_depend_on_the_parts_of_a_text(parts: list[str]) -> None:
    found, whole = (split_words(iter([Text("a", each, True)])) for each in (parts, ["".join(parts)]))
    assert (found.words, found.order.tolist(), found.rows) == (whole.words, whole.order.tolist(), whole.rows)
    assert found.text_bytes == whole.text_bytes
