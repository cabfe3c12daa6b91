from pathlib import Path

import pytest

from model.config import ModelConfig
from model.llama import Llama
from model.normalizer import Normalizer
from model.tokenizer import Tokenizer, train_tokenizer
from rayjob.training.sample import draw_sample, write_sample


@pytest.mark.parametrize("max_seq_len", [1, 8, 64])
def test_sample_is_written_for_any_context_length(max_seq_len: int, tmp_path: Path) -> None:
    model_bytes = train_tokenizer(["the old house by the river stood alone\n"] * 20, vocab_size=290)
    config = ModelConfig(
        vocab_size=290, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=16, max_seq_len=max_seq_len
    )
    model = Llama(config)
    model.init_weights(0)
    sample = draw_sample(model, Tokenizer(model_bytes, Normalizer(detokenize=False, lowercase=False)), seed=0)
    write_sample(tmp_path, 7, sample)
    assert (tmp_path / "samples" / "step_00000007.txt").read_text().startswith("T")
