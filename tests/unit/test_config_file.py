"""Configuration: defaults < YAML < KEY=VALUE, and every problem in one message."""

import os
from pathlib import Path

import pytest
import yaml

from rayjob.config import ConfigError
from rayjob.config_file import flatten_tree, load_config, to_tree

CONFIGS = Path(__file__).parents[2] / "rayjob" / "configs"


def problems_of(path: Path | None = None, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value.problems


@pytest.mark.parametrize("name", ["small.yaml", "bookcorpus_4x5090.yaml"])
def test_shipped_configs_load(name: str) -> None:
    assert load_config(CONFIGS / name).run_name


def test_overrides_win_over_yaml_and_yaml_over_defaults(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("seed: 5\ntrain:\n  epochs: 7\n")
    config = load_config(path, ["train.epochs=2"])
    assert (config.seed, config.train.epochs, config.train.micro_batch_size) == (5, 2, 32)


def test_every_problem_is_in_one_message() -> None:
    found = problems_of(None, "learning_rate=1", "train.epocs=2", "model.n_heads=7", "train.global_batch_size=100")
    text = "\n".join(found)
    for part in ("learning_rate", "train.epocs", "train.epochs", "model.n_heads (7)", "train.global_batch_size=100"):
        assert part in text


def test_misspelt_key_names_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("optimizer:\n  learning_rat: 0.001\n  warmup_step: 3\n")
    assert "optimizer.warmup_step is not a configuration key: did you mean optimizer.warmup_steps?" in problems_of(path)


@pytest.mark.parametrize(
    ("text", "value"), [("3e-4", 0.0003), ("1e-08", 1e-08), ("1", 1.0), ("'0.5'", 0.5), ("1E-3", 0.001)]
)
def test_numbers_that_yaml_reads_as_text_are_numbers(text: str, value: float) -> None:
    assert load_config(None, [f"optimizer.min_lr={text}", "optimizer.lr=2"]).optimizer.min_lr == value


@pytest.mark.parametrize(
    "override",
    [
        "optimizer.lr=abc",
        "optimizer.lr=nan",
        "optimizer.lr=.inf",
        "optimizer.lr=true",
        "train.max_steps=-1",
        "train.max_steps=1.5",
        "train.max_steps=true",
        "train.num_workers=0",
        "train.num_workers=[0, 2]",
        "train.num_workers=[4, 2]",
        "train.num_workers=[1, 2, 4]",
        "train.num_workers=[1, a]",
        "train.num_workers=null",
        "checkpoint.interval_s=[3]",
        "failure.max_bad_steps=0",
        "train.use_gpu=1",
        "train.precision=fp16",
        "data.source=web",
        "data.paths=[1]",
        "optimizer.betas=[0.9]",
        "optimizer.betas=[0.9, 1.0]",
        "seed=-1",
        "run_name=",
        "run_name=../x",
        "run_name=a b",
        "run_name=" + "x" * 300,
        "tokenizer.vocab_size=70000",
        "model.vocab_size=512",
        "checkpoint.keep=0",
        "cost.max_usd=5",
        "data.source=text",
        "model",
        "=3",
    ],
)
def test_bad_value_is_refused_and_named(override: str) -> None:
    key = override.partition("=")[0]
    assert any(key in problem for problem in problems_of(None, override))


@pytest.mark.parametrize(("given", "sizes"), [("4", (4, 4)), ("[1, 4]", (1, 4)), ("[4, 4]", (4, 4))])
def test_number_of_workers_is_one_number_or_a_range(given: str, sizes: tuple[int, int]) -> None:
    config = load_config(None, [f"train.num_workers={given}"])
    assert (config.train.min_workers, config.train.max_workers) == sizes
    assert load_config(None, [f"train.num_workers={to_tree(config)['train']['num_workers']}"]) == config
    assert config.train.grad_accum_steps == 3


def test_global_batch_must_suit_the_greatest_number_of_workers_and_then_suits_every_fewer() -> None:
    sizes = ["train.micro_batch_size=2", "train.num_workers=[1, 4]"]
    assert load_config(None, ["train.global_batch_size=16", *sizes]).train.grad_accum_steps == 2
    assert "use 8 or 16" in "".join(problems_of(None, "train.global_batch_size=12", *sizes))


def test_micro_batch_is_a_number_or_auto() -> None:
    for given, size in (("8", 8), ("8.0", 8), ("auto", "auto")):
        config = load_config(None, [f"train.micro_batch_size={given}"])
        assert config.train.micro_batch_size == size
        assert load_config(None, [f"train.micro_batch_size={to_tree(config)['train']['micro_batch_size']}"]) == config
    for given in ("automatic", "[8, 16]", "0", "null", "2.5"):
        assert any(
            "train.micro_batch_size" in problem for problem in problems_of(None, f"train.micro_batch_size={given}")
        )
    assert "must be auto or a whole number" in "".join(problems_of(None, "train.micro_batch_size=automatic"))


def test_auto_may_choose_what_every_worker_gets_equally_many_of() -> None:
    sizes = ["train.micro_batch_size=auto", "train.num_workers=[1, 4]"]
    train = load_config(None, ["train.global_batch_size=48", *sizes]).train
    assert train.micro_batch_sizes == [1, 2, 3, 4, 6, 12]
    assert (train.assumed_micro_batch_size, train.grad_accum_steps) == (12, 1)
    assert load_config(None, sizes).train.assumed_micro_batch_size == 32, "of 384 windows"
    assert "must be a multiple of num_workers (4): use 12 or 16" in "".join(
        problems_of(None, "train.global_batch_size=14", *sizes)
    )


def test_whole_number_in_scientific_form_is_one() -> None:
    assert load_config(None, ["train.max_steps=1e3"]).train.max_steps == 1000


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [", "\x00", "5\n"])
def test_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert str(path) in problems_of(path)[0]


def test_missing_file_is_named(tmp_path: Path) -> None:
    assert "nowhere.yaml does not exist" in problems_of(tmp_path / "nowhere.yaml")[0]


def test_empty_file_and_empty_section_set_nothing(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("train:\n")
    assert load_config(path) == load_config(None)


def test_resolved_tree_loads_as_the_same_config(tmp_path: Path) -> None:
    config = load_config(CONFIGS / "small.yaml", ["storage=x", "checkpoint.interval_s=null"])
    path = tmp_path / "again.yaml"
    path.write_text(yaml.safe_dump(to_tree(config)))
    assert load_config(path) == config


def test_storage_is_the_same_however_it_is_spelt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    spellings = ["runs", "./runs/", f"{tmp_path}/runs", f"{tmp_path}/x/../runs//"]
    assert {load_config(None, [f"storage={spelling}"]).storage for spelling in spellings} == {str(tmp_path / "runs")}


def test_relative_storage_of_a_submitted_job_is_not_in_its_temporary_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert load_config(None, ["storage=runs"]).storage == str(tmp_path / "home" / "runs")


def test_vocabulary_of_the_model_is_the_tokenizers() -> None:
    assert load_config(None, ["tokenizer.vocab_size=4096"]).model.vocab_size == 4096


@pytest.mark.parametrize(("n_kv_heads", "is_good"), [(12, True), (1, True), (4, True), (5, False), (0, False)])
def test_kv_heads_divide_the_heads(n_kv_heads: int, is_good: bool) -> None:
    if is_good:
        assert load_config(None, [f"model.n_kv_heads={n_kv_heads}"]).model.n_kv_heads == n_kv_heads
    else:
        assert "n_kv_heads" in "".join(problems_of(None, f"model.n_kv_heads={n_kv_heads}"))


def test_every_documented_key_exists() -> None:
    documented = """run_name storage seed
        data.source data.paths data.text_column data.doc_column data.revision data.detokenize data.lowercase
        data.dedup data.val_fraction tokenizer.vocab_size tokenizer.model_type
        model.d_model model.n_layers model.n_heads model.n_kv_heads model.d_ff model.max_seq_len model.rope_theta
        model.norm_eps train.num_workers train.use_gpu train.global_batch_size train.micro_batch_size train.epochs
        train.max_steps train.precision train.compile train.eval_interval train.grad_clip
        optimizer.lr optimizer.min_lr optimizer.warmup_steps optimizer.betas optimizer.weight_decay
        checkpoint.interval_s checkpoint.interval_steps checkpoint.keep failure.max_failures failure.max_preemptions
        tracking.mlflow_uri tracking.experiment tracking.tensorboard tracking.wandb
        cost.gpu_usd_per_hour cost.max_usd""".split()
    assert set(documented) <= set(flatten_tree(to_tree(load_config(None))))


def test_config_error_survives_pickling_by_ray() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(ConfigError(["a", "b"])))
    assert error.problems == ["a", "b"]
    assert os.linesep.join(["a", "b"]) == str(error)
