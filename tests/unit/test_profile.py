"""The profile of a tiny model: real steps, real profiler, no Ray."""

import gzip
import json
from pathlib import Path

import pytest

from rayjob.__main__ import main
from rayjob.config import ConfigError, JobConfig
from rayjob.config_file import load_config
from rayjob.profile import N_OPERATORS, profile_steps, render_profile

TINY = """
    model.d_model=32 model.n_layers=2 model.n_heads=4 model.n_kv_heads=2 model.d_ff=64 model.max_seq_len=16
    tokenizer.vocab_size=300 train.num_workers=2 train.use_gpu=false train.global_batch_size=8 train.micro_batch_size=2
""".split()


@pytest.fixture
def config(tmp_path: Path) -> JobConfig:
    return load_config(None, [*TINY, f"storage={tmp_path}"])


def test_trace_is_what_perfetto_reads_and_names_the_operators(tmp_path: Path) -> None:
    # Wide enough for its products to outweigh the many small operators of a step.
    wide = ["model.d_model=256", "model.d_ff=1024", "model.max_seq_len=64"]
    found = profile_steps(load_config(None, [*TINY, *wide, f"storage={tmp_path}"]), n_steps=2)
    with gzip.open(found.trace) as file:
        events = json.load(file)["traceEvents"]
    names = [event.get("name") for event in events if event.get("ph") == "X"]
    assert names.count("step") == 2
    assert len(found.operators) == N_OPERATORS
    assert {operator.name for operator in found.operators} <= set(names)
    shares = [operator.share_pct for operator in found.operators]
    assert shares == sorted(shares, reverse=True)
    assert 50 < sum(shares) <= 100.5, "ten of them are most of a step"
    text = render_profile(found)
    assert str(found.trace) in text
    assert all(operator.name[:56] in text for operator in found.operators)


def test_speed_is_that_of_one_workers_share(config: JobConfig) -> None:
    found = profile_steps(config, n_steps=1)
    # 8 windows of 16 tokens over two workers
    assert found.tokens_per_s * found.step_s == pytest.approx(4 * 16)
    assert found.peak is not None
    assert "measured" in found.peak


def test_gpu_without_a_gpu_is_refused(config: JobConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.use_gpu=false"):
        profile_steps(load_config(None, [*TINY, f"storage={tmp_path}", "train.use_gpu=true"]))


def test_command_prints_one_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--json", *TINY, f"storage={tmp_path}"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert Path(found["trace"]).is_relative_to(tmp_path)
    assert found["tokens_per_s"] > 0
