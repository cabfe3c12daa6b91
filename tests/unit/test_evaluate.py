"""`eval` of a checkpoint folder: it knows its own length and tokenizer, whatever the configuration says."""

from pathlib import Path

import numpy as np
import pytest

from model.checkpoint_writer import save_checkpoint
from model.config import ModelConfig
from model.llama import Llama
from model.normalizer import Normalizer
from model.tokenizer import Tokenizer, train_tokenizer
from rayjob.config import ConfigError
from rayjob.corpus.blocks import Manifest, SplitTotals
from rayjob.evaluate import evaluate_split, evaluate_texts

TEXT = "the old house by the river stood alone\n" * 20


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tokenizer_folder = tmp_path / "tokenizer"
    Tokenizer(train_tokenizer([TEXT], vocab_size=290), Normalizer(detokenize=False, lowercase=False)).save(
        tokenizer_folder
    )
    config = ModelConfig(vocab_size=290, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=16, max_seq_len=8)
    model = Llama(config)
    model.init_weights(0)
    return save_checkpoint(
        tmp_path / "run",
        1,
        model=model.state_dict(),
        config=config,
        tokenizer_folder=tokenizer_folder,
        trainer_tensors={},
        trainer_state={},
    )


def test_texts_are_cut_to_the_length_of_the_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text(TEXT)
    evaluation = evaluate_texts(checkpoint, [book])
    tokenizer = Tokenizer.load(checkpoint)
    assert evaluation.tokens == len(tokenizer.encode_prompt(TEXT))  # all but the first, and the end of the document
    assert np.isfinite(evaluation.bits_per_byte)


def test_texts_without_a_byte_to_predict_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path in paths:
        path.write_text("")
    with pytest.raises(ConfigError, match="no text to predict"):
        evaluate_texts(checkpoint, paths)


def test_corpus_of_another_tokenizer_is_refused_with_both_hashes(checkpoint: Path, tmp_path: Path) -> None:
    nothing = SplitTotals(0, 0, 0, 0, 0, "", [])
    manifest = Manifest("abc", {}, "other", "uint16", [], {}, nothing, nothing, {}, {}, [])
    manifest.save(tmp_path)
    with pytest.raises(ConfigError, match=f"tokenizer {Tokenizer.load(checkpoint).hash}.* of tokenizer other"):
        evaluate_split(checkpoint, tmp_path)
