"""The architecture's config: constraints, derived numbers and the Hugging Face form."""

import dataclasses

import pytest
from transformers import LlamaConfig

from model.config import ModelConfig

REFERENCE = ModelConfig(vocab_size=50_304)


def test_reference_model_has_128_305_920_parameters() -> None:
    assert REFERENCE.n_params == 128_305_920
    assert REFERENCE.head_dim == 64


def test_reference_flops_per_token_follow_the_formula() -> None:
    assert REFERENCE.flops_per_token == 6 * (128_305_920 - 25 * 768) + 12 * 12 * 768 * 512


def test_sound_configs_have_no_problems() -> None:
    assert REFERENCE.problems() == []
    for n_kv_heads in (1, 2, 3, 4, 6, 12):
        assert dataclasses.replace(REFERENCE, n_kv_heads=n_kv_heads).problems() == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"d_model": 100}, ["model.d_model=100", "96 or 108"]),
        ({"d_model": 12 * 7}, ["model.d_model=84", "72 or 96"]),
        ({"n_kv_heads": 5}, ["model.n_kv_heads=5", "1, 2, 3, 4, 6, 12"]),
        ({"n_kv_heads": 24}, ["model.n_kv_heads=24"]),
        ({"n_layers": 0}, ["model.n_layers=0"]),
        ({"vocab_size": -1}, ["model.vocab_size=-1"]),
        ({"max_seq_len": 1.5}, ["model.max_seq_len=1.5"]),
        ({"d_ff": True}, ["model.d_ff=True"]),
        ({"rope_theta": 0.0}, ["model.rope_theta=0.0"]),
        ({"norm_eps": float("nan")}, ["model.norm_eps=nan"]),
        ({"rope_theta": "10000"}, ["model.rope_theta='10000'"]),
    ],
)
def test_each_problem_names_its_key_and_what_to_use(changes: dict[str, object], named: list[str]) -> None:
    problems = dataclasses.replace(REFERENCE, **changes).problems()  # type: ignore[arg-type]
    assert len(problems) == 1
    assert all(part in problems[0] for part in named)


def test_all_problems_are_reported_at_once() -> None:
    assert len(dataclasses.replace(REFERENCE, d_model=0, n_heads=0, norm_eps=-1.0).problems()) == 3
    assert len(dataclasses.replace(REFERENCE, d_model=100, n_kv_heads=5).problems()) == 2


def test_hugging_face_form_round_trips() -> None:
    config = ModelConfig(300, 48, 3, 4, 2, 80, 40, 5_000.0, 1e-6)
    assert ModelConfig.from_hf(config.to_hf()) == config


def test_config_as_transformers_writes_it_is_understood() -> None:
    config = ModelConfig(300, 48, 3, 4, 2, 80, 40, 5_000.0, 1e-6)
    assert ModelConfig.from_hf(LlamaConfig(**config.to_hf()).to_dict()) == config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "gpt2"),
        ("tie_word_embeddings", False),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("hidden_act", "gelu"),
        ("head_dim", 32),
        ("num_key_value_heads", 5),
        ("rope_parameters", {"rope_type": "llama3", "rope_theta": 10_000.0}),
    ],
)
def test_another_architecture_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(
        ValueError, match="rope_type" if key == "rope_parameters" else key.replace("num_key_value", "n_kv")
    ):
        ModelConfig.from_hf({**REFERENCE.to_hf(), key: value})


@pytest.mark.parametrize("key", ["hidden_size", "rms_norm_eps", "vocab_size"])
def test_missing_key_is_named(key: str) -> None:
    hf = REFERENCE.to_hf()
    del hf[key]
    with pytest.raises(ValueError, match=key):
        ModelConfig.from_hf(hf)
