"""The tokenizer: nothing lost, nothing depending on how text is cut, and transformers' ids."""

import json
import pickle
import random
import time
from collections import Counter
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from model.normalizer import Normalizer
from model.tokenizer import (
    Tokenizer,
    VocabularyTooLarge,
    count_words,
    train_tokenizer,
    train_tokenizer_from_counts,
)

CLEAN = Normalizer(detokenize=False, lowercase=False)
WORDS = [
    *(
        "the",
        "of",
        "and",
        "to",
        "in",
        "was",
        "he",
        "she",
        "it",
        "said",
        "that",
        "his",
        "her",
        "with",
        "for",
        "at",
    ),
    *(
        "naïve",
        "café",
        "Mr.",
        "Bennet's",
        "don't",
        "1812",
        "42",
        "three-and-twenty",
        "morning",
        "river,",
        "stone;",
    ),
    *(
        "light:",
        "door!",
        "window?",
        "(hand)",
        '"face"',
        "--",
        "walking",
        "walked",
        "walks",
        "quietly",
        "gardens",
    ),
]
ODD = [
    *("\n", "\n\n", "  ", "   ", "\t", "12", "3.14", "😀", "👩\u200d👩\u200d👧", "e\u0301", "漢字", "ﬁ", "①"),
    *("</s>", "<s>", "<unk>", "<0x41>", " ", "zzz"),
]


def make_text(seed: int, n_words: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) + rng.choice(["", "", "", ",", ".\n"]) for _ in range(n_words))


def make_passage(rng: random.Random) -> str:
    parts = [rng.choice(WORDS + ODD) + rng.choice(["", " "]) for _ in range(rng.randrange(1, 40))]
    return "".join(parts)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(train_tokenizer([make_text(0, 20_000)], vocab_size=500), CLEAN)


@pytest.fixture(scope="module")
def folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(folder)
    return folder


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a\n\nb",
        "  x",
        "x  ",
        " ",
        "\n",
        "\t",
        "e\u0301",
        "\ufb01",
        "\u2460",
        "😀",
        "👩‍👩‍👧",
        "漢字 かな",
        "é" * 100,
    ]
    + [
        "a" * 10_000,
        "</s>",
        "<s><unk><pad>",
        "<0x41>",
        "a\u00a0b\u2028c",
        "\u200b",
        "\ufffd",
        "\x01\x7f",
        "1234567890",
    ],
)
def test_decoding_gives_the_text_back(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert min(tokens, default=3) > 2  # neither <unk>, <s> nor </s>


@given(text=st.text(alphabet=st.characters(exclude_categories=())))
def test_decoding_any_normalized_text_gives_it_back(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode_prompt(text)
    assert tokenizer.decode(tokens) == tokenizer.normalize(text)
    assert min(tokens, default=3) > 2


@given(texts=st.lists(st.text(alphabet="the cat\n\u00e9 12", max_size=20)), repeats=st.sampled_from([1, 5_000]))
def test_encode_all_gives_the_ids_of_each_text(tokenizer: Tokenizer, texts: list[str], repeats: int) -> None:
    texts = [text * repeats for text in texts[:2]] + texts[2:]  # long ones are encoded in pieces
    assert tokenizer.encode_all(texts) == [tokenizer.encode(text) for text in texts]


def test_encode_prompt_normalizes_first(tokenizer: Tokenizer) -> None:
    bookcorpus = Tokenizer(tokenizer._model, Normalizer(detokenize=True, lowercase=True))
    corpus_form = bookcorpus.encode(bookcorpus.normalize("`` do n't go , '' said tom ."))
    assert bookcorpus.encode_prompt('"Don\'t go," said Tom.') == corpus_form


@pytest.mark.parametrize("max_chars", [1, 2, 3, 10, 100, 1000, 1_000_000])
def test_cutting_gives_the_ids_of_the_uncut_text(tokenizer: Tokenizer, max_chars: int) -> None:
    rng = random.Random(5)
    text = "".join(make_passage(rng) for _ in range(150)) + "the" * 300 + make_text(1, 200)
    assert list(chain.from_iterable(tokenizer.encode_pieces(text, max_chars))) == tokenizer._processor.encode(text)


@given(
    words=st.lists(st.sampled_from(WORDS + ODD + ["the", "an", "d", "s", "\u2581"])),
    max_chars=st.integers(1, 9),
)
def test_cutting_anywhere_never_changes_the_ids(tokenizer: Tokenizer, words: list[str], max_chars: int) -> None:
    text = tokenizer.normalize("".join(words))
    assert list(chain.from_iterable(tokenizer.encode_pieces(text, max_chars))) == tokenizer._processor.encode(text)


def test_pieces_of_a_long_line_stay_small(tokenizer: Tokenizer) -> None:
    line = make_text(2, 100_000).replace("\n", " ")
    lengths = [len(tokenizer.decode(piece)) for piece in tokenizer.encode_pieces(line, 1000)]
    assert sum(lengths) == len(line)
    assert max(lengths) <= 1000


def test_unigram_text_can_be_cut_too() -> None:
    tokenizer = Tokenizer(train_tokenizer([make_text(0, 5000)], vocab_size=330, model_type="unigram"), CLEAN)
    text = make_text(3, 500) + "".join(ODD)
    whole = tokenizer._processor.encode(text)
    for max_chars in (1, 5, 50):
        assert list(chain.from_iterable(tokenizer.encode_pieces(text, max_chars))) == whole
    assert tokenizer.decode(whole) == text


def test_auto_tokenizer_gives_the_same_ids_on_1000_passages(tokenizer: Tokenizer, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    theirs = AutoTokenizer.from_pretrained(folder)
    rng = random.Random(0)
    for _ in range(1000):
        passage = make_passage(rng)
        assert theirs.encode(passage) == tokenizer.encode(passage), passage
    assert theirs.decode(tokenizer.encode(passage)) == passage
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.unk_token_id) == (1, 2, 0)


def test_auto_tokenizer_gives_the_same_ids_of_a_unigram_model(tmp_path: Path) -> None:
    tokenizer = Tokenizer(train_tokenizer([make_text(0, 5000)], vocab_size=330, model_type="unigram"), CLEAN)
    tokenizer.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    rng = random.Random(0)
    passages = [make_passage(rng) for _ in range(300)]
    ordinary = [passage for passage in passages if not {"<", ">"} & set(passage)]  # see Tokenizer.save
    assert len(ordinary) > 50
    for passage in ordinary:
        assert theirs.encode(passage) == tokenizer.encode(passage), passage


def test_token_bytes_make_up_the_text(tokenizer: Tokenizer) -> None:
    text = make_text(4, 50) + "".join(ODD)
    tokens = tokenizer.encode(text)
    assert b"".join(tokenizer.token_bytes(token) for token in tokens) == text.encode()
    lengths = tokenizer.byte_lengths()
    assert lengths.shape == (tokenizer.vocab_size,)
    assert lengths[tokens].sum() == len(text.encode())
    assert np.array_equal(lengths, [len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)])


def test_control_and_padding_tokens_have_no_bytes(tokenizer: Tokenizer) -> None:
    padding = [tokenizer.vocab_size, tokenizer.vocab_size + 63]
    for token in [tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id, *padding]:
        assert tokenizer.token_bytes(token) == b""
    assert tokenizer.decode([1, *tokenizer.encode("the end"), 2, *padding]) == "the end"


def test_half_a_character_decodes_to_the_replacement_character(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("a😀")
    assert tokenizer.decode(tokens[:-1]) == "a\ufffd"


def test_each_digit_is_a_token(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("18121812")) == 8


def test_saved_tokenizer_loads_equal(tokenizer: Tokenizer, folder: Path) -> None:
    loaded = Tokenizer.load(folder)
    assert loaded.hash == tokenizer.hash
    assert loaded.normalizer == tokenizer.normalizer
    text = make_text(6, 100)
    assert loaded.encode(text) == tokenizer.encode(text)


def test_tokenizer_crosses_processes(tokenizer: Tokenizer) -> None:
    text = make_text(6, 100)
    assert pickle.loads(pickle.dumps(tokenizer)).encode(text) == tokenizer.encode(text)


def test_hash_depends_on_pieces_and_normalizer(tokenizer: Tokenizer) -> None:
    other_normalizer = Tokenizer(tokenizer._model, Normalizer(detokenize=True, lowercase=False))
    other_pieces = Tokenizer(train_tokenizer([make_text(9, 20_000) + "zyzzyva " * 999], vocab_size=500), CLEAN)
    assert len({tokenizer.hash, other_normalizer.hash, other_pieces.hash}) == 3
    assert len(tokenizer.hash) == 64


@pytest.mark.parametrize("name", ["tokenizer.model", "normalizer.json"])
def test_missing_or_damaged_file_is_named(tokenizer: Tokenizer, tmp_path: Path, name: str) -> None:
    tokenizer.save(tmp_path)
    (tmp_path / name).write_bytes(b"\x80\x02not it")
    with pytest.raises(ValueError, match=str(tmp_path)):
        Tokenizer.load(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=name):
        Tokenizer.load(tmp_path)


def test_training_is_deterministic_and_blind_to_the_order_of_texts() -> None:
    texts = [make_text(seed, 2000) for seed in range(3)]
    assert train_tokenizer(texts, vocab_size=400) == train_tokenizer(texts[::-1], vocab_size=400)


def test_training_from_counts_equals_training_from_text() -> None:
    texts = [make_text(seed, 2000) for seed in range(3)]
    counts = sum((count_words(text) for text in texts), Counter())
    assert train_tokenizer_from_counts(counts, vocab_size=400) == train_tokenizer(texts, vocab_size=400)


def test_a_book_on_one_line_contributes_fully() -> None:
    line = " ".join(f"zyzzyva {WORDS[i % len(WORDS)]}" for i in range(24_000))
    tokenizer = Tokenizer(train_tokenizer([line, make_text(0, 500)], vocab_size=450), CLEAN)
    assert len(tokenizer.encode(" zyzzyva")) == 1


def test_a_word_longer_than_sentencepiece_takes_contributes() -> None:
    tokenizer = Tokenizer(train_tokenizer(["xqzw" * 50_000], vocab_size=270), CLEAN)
    assert len(tokenizer.encode("xqzw" * 4)) <= 4


def test_counts_with_white_space_inside_lose_nothing() -> None:
    counts = {"one\ttwo": 50, " three four\n": 50}
    with pytest.raises(VocabularyTooLarge) as caught:
        train_tokenizer_from_counts(counts, vocab_size=1000)
    largest = caught.value.largest  # every word is a piece then
    tokenizer = Tokenizer(train_tokenizer_from_counts(counts, vocab_size=largest), CLEAN)
    assert all(len(tokenizer.encode(word)) == 1 for word in ("one", "two", " three", " four"))


def test_vocabulary_too_large_names_the_largest_fast_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "Once upon a time the small grey parrot said naïve 😀 things, twice a day, every day.\n\n" * 400
    started = time.monotonic()
    with pytest.raises(VocabularyTooLarge, match="vocab_size=32000") as caught:
        train_tokenizer([text], vocab_size=32_000)
    assert time.monotonic() - started < 10
    largest = caught.value.largest
    assert str(largest) in str(caught.value)
    assert Tokenizer(train_tokenizer([text], vocab_size=largest), CLEAN).vocab_size == largest
    with pytest.raises(VocabularyTooLarge):
        train_tokenizer([text], vocab_size=largest + 1)
    assert list(tmp_path.iterdir()) == []


def test_vocabulary_error_crosses_processes() -> None:
    error = pickle.loads(pickle.dumps(VocabularyTooLarge(32_000, 400)))
    assert (error.asked, error.largest, str(error)) == (32_000, 400, str(VocabularyTooLarge(32_000, 400)))
    assert isinstance(error, ValueError)


def test_vocabulary_too_small_names_the_smallest() -> None:
    with pytest.raises(ValueError, match=r"vocab_size=200 .* at least \d+"):
        train_tokenizer([make_text(0, 1000)], vocab_size=200)


@pytest.mark.parametrize("texts", [[], [""], [" \n\t "]])
def test_no_text_is_refused(texts: list[str]) -> None:
    with pytest.raises(ValueError, match="no text"):
        train_tokenizer(texts, vocab_size=300)


def test_unknown_model_type_is_refused() -> None:
    with pytest.raises(ValueError, match="model_type='word'"):
        train_tokenizer(["text"], vocab_size=300, model_type="word")
