from pathlib import Path

import numpy as np
import pytest

from model.normalizer import Normalizer
from model.tokenizer import Tokenizer, train_tokenizer
from rayjob.corpus.blocks import Manifest, Row, SplitTotals, write_block
from rayjob.corpus.card import CARD_FILES, write_card
from rayjob.corpus.lookup import find_window

TEXTS = {
    "a.txt": "the cat sat on the mat. " * 3,
    "b|c.txt": "<script>alert(1)</script> & the dog " * 3,
    "d.txt": "the end",
}
T = 8


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    model = train_tokenizer(TEXTS.values(), vocab_size=300)
    return Tokenizer(model, Normalizer(detokenize=False, lowercase=False))


@pytest.fixture
def corpus(tmp_path: Path, tokenizer: Tokenizer) -> Manifest:
    """Two blocks; the second document goes on in the second."""
    tokens = {name: [*tokenizer.encode(text), tokenizer.eos_id] for name, text in TEXTS.items()}
    rows = [Row(name, np.array(ids, dtype=np.uint16)) for name, ids in tokens.items()]
    middle = rows[1].tokens
    parts = [[rows[0], Row("b|c.txt", middle[:5])], [Row("b|c.txt", middle[5:]), rows[2]]]
    blocks = [
        write_block(tmp_path / "train" / f"part-{number:05d}.parquet", part, unit_hash="u", text_bytes=1)
        for number, part in enumerate(parts)
    ]
    n_tokens = sum(map(len, tokens.values()))
    train = SplitTotals(3, n_tokens, (n_tokens - 1) // T, (n_tokens - 1) % T + 1, 9, "", blocks)
    empty = SplitTotals(0, 0, 0, 0, 0, "", [])
    sources = [{"name": name, "bytes": len(text), "sha256": "x"} for name, text in TEXTS.items()]
    totals = {"tokens": n_tokens, "max_seq_len": T}
    manifest = Manifest("hash", {}, "t", "uint16", sources, {}, train, empty, totals, {}, ["<odd> | warning"])
    manifest.save(tmp_path)
    return manifest


def test_windows_tell_their_documents_and_join_to_the_stream(
    tmp_path: Path, corpus: Manifest, tokenizer: Tokenizer
) -> None:
    stream = [token for text in TEXTS.values() for token in (*tokenizer.encode(text), tokenizer.eos_id)]
    seen = []
    for window in range(corpus.train.windows):
        parts = find_window(tmp_path, corpus, tokenizer, "train", window, T)
        assert sum(part.tokens for part in parts) == T + 1
        assert "".join(part.text for part in parts) == tokenizer.decode(stream[window * T : window * T + T + 1])
        seen += [(part.doc_id, part.block) for part in parts]
    assert list(dict.fromkeys(seen))[:3] == [
        ("a.txt", "train/part-00000.parquet"),
        ("b|c.txt", "train/part-00000.parquet"),
        ("b|c.txt", "train/part-00001.parquet"),
    ]


@pytest.mark.parametrize("window", [-1, 10_000])
def test_window_that_is_not_there_is_an_error(
    tmp_path: Path, corpus: Manifest, tokenizer: Tokenizer, window: int
) -> None:
    with pytest.raises(IndexError):
        find_window(tmp_path, corpus, tokenizer, "train", window, T)


def test_card_quotes_text_as_text(tmp_path: Path, corpus: Manifest, tokenizer: Tokenizer) -> None:
    write_card(tmp_path, corpus, tokenizer)
    page, markdown = ((tmp_path / name).read_text() for name in CARD_FILES)
    assert "<script" not in page
    assert "&lt;script&gt;" in page or "&lt;" in page
    assert "&lt;odd&gt; | warning" in page
    assert "b\\|c.txt" in markdown
    assert "&lt;odd> | warning" in markdown
    assert page.count("<h3>") == min(10, corpus.train.windows)
