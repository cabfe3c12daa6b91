"""The command line: every problem in one message with exit code 2, before Ray is touched."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

from rayjob.__main__ import main

SMALL = str(Path(__file__).parents[2] / "rayjob" / "configs" / "small.yaml")
TINY = (
    "model.d_model=32 model.n_layers=1 model.n_heads=4 model.n_kv_heads=2 model.d_ff=32 model.max_seq_len=32 "
    "tokenizer.vocab_size=300 data.source=text data.val_fraction=0.3"
).split()


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_settings: object) -> None:
        pytest.fail("Ray was started")

    monkeypatch.setattr(ray, "init", refuse)


def book(folder: Path, name: str, n_words: int) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(" ".join(f"word{i % 89} of book {name}" for i in range(n_words)) + ".\n")
    return folder


def run(tmp_path: Path, *overrides: str) -> int:
    return main(["run", *TINY, f"storage={tmp_path / 'storage'}", *overrides])


def test_all_problems_of_a_config_are_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "train.epocs=3", "train.global_batch_size=100", "model.n_kv_heads=3", "data.paths=[]") == 2
    told = capsys.readouterr().err
    for problem in (
        "train.epocs is not a configuration key: did you mean train.epochs?",
        "train.global_batch_size=100 must be a multiple of",
        "model.n_kv_heads=3 must divide",
        "data.paths is empty",
    ):
        assert problem in told
    assert not (tmp_path / "storage").exists()


def test_missing_paths_are_all_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = [str(tmp_path / "nowhere"), str(tmp_path / "*.never")]
    assert run(tmp_path, f"data.paths={json.dumps(missing)}") == 2
    told = capsys.readouterr().err
    assert missing[0] in told
    assert missing[1] in told


@pytest.mark.parametrize(
    ("sizes", "overrides", "told"),
    [
        ({"a.txt": 0, "b.txt": 0}, [], "too small"),
        ({"a.txt": 1, "b.txt": 1}, ["model.max_seq_len=512"], "too small"),
        ({"a.txt": 300, "b.txt": 300, "c.txt": 300}, ["tokenizer.vocab_size=50000"], "the largest possible is"),
    ],
)
def test_corpus_that_cannot_work_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sizes: dict[str, int], overrides: list[str], told: str
) -> None:
    for name, n_words in sizes.items():
        book(tmp_path / "books", name, n_words)
    assert run(tmp_path, f"data.paths=[{tmp_path / 'books'}]", *overrides) == 2
    assert told in capsys.readouterr().err


def test_empty_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "books").mkdir()
    assert run(tmp_path, f"data.paths=[{tmp_path / 'books'}]") == 2
    assert "holds no text files" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["fly"], ["run", "--fast"], ["run", "a=1", "--fast", "b=2"], ["eval"]])
def test_wrong_usage_exits_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_eval_of_no_checkpoint_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--checkpoint", str(tmp_path / "step_1"), "--config", SMALL]) == 2
    assert str(tmp_path / "step_1") in capsys.readouterr().err


def test_status_of_a_run_that_never_was_has_every_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--json", "--config", SMALL, f"storage={tmp_path}"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    status = json.loads(line)
    assert set(status) == set(
        "stage step max_steps epoch tokens train_loss val_loss best_val_loss best_checkpoint latest_checkpoint "
        "mlflow_run_id tokens_per_s mfu_pct elapsed_s eta_s cost_usd restarts".split()
    )
    assert status["stage"] == "new"
    assert not list(tmp_path.iterdir()), "looking changes nothing"


def test_show_config_prints_what_loads_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show-config", "--json", "--config", SMALL, f"storage={tmp_path}", "seed=5"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["seed"] == 5
    assert shown["derived"]["storage_folder"] == str(tmp_path)
    assert shown["derived"]["run_folder"] == str(tmp_path / "runs" / "small")


def test_overrides_may_stand_on_both_sides_of_an_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show-config", f"storage={tmp_path}", "--config", SMALL, "seed=5", "--json", "run_name=mine"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["seed"] == 5
    assert shown["derived"]["run_folder"] == str(tmp_path / "runs" / "mine")


def test_show_config_of_auto_tells_what_it_will_be_chosen_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [f"storage={tmp_path}", "train.micro_batch_size=auto"]
    assert main(["show-config", "--json", "--config", SMALL, *overrides]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["train"]["micro_batch_size"] == "auto"
    assert shown["derived"]["grad_accum_steps"] is None
    assert shown["derived"]["micro_batch_sizes"] == [1, 2, 4], "8 windows over two workers"


def test_plan_json_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--json", "--config", SMALL, f"storage={tmp_path}"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["steps"] == 560


def test_plan_of_missing_paths_names_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "nowhere"
    assert main(["plan", *TINY, f"storage={tmp_path}", f"data.paths=[{missing}]"]) == 2
    assert str(missing) in capsys.readouterr().err


def test_dead_cluster_in_ray_address_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        for name in "abc":
            book(tmp_path / "books", f"{name}.txt", 300)
        assert run(tmp_path, f"data.paths=[{tmp_path / 'books'}]") == 2
    assert f"RAY_ADDRESS={address} does not answer" in capsys.readouterr().err


def test_parquet_that_cannot_be_used_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    pq.write_table(pa.table({"sentence": ["a row"]}), folder / "column.parquet")
    pq.write_table(pa.table({"text": [1.5]}), folder / "kind.parquet")
    (folder / "cut.parquet").write_bytes((folder / "kind.parquet").read_bytes()[:-20])
    assert run(tmp_path, "data.source=parquet", f"data.paths=[{folder}]") == 2
    told = capsys.readouterr().err
    assert "column.parquet: there is no column 'text'" in told
    assert "kind.parquet: column 'text' (data.text_column) is of type double" in told
    assert "cut.parquet is no whole Parquet file" in told


def test_window_of_a_corpus_that_is_not_prepared_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [*TINY, f"storage={tmp_path / 'storage'}", f"data.paths=[{book(tmp_path / 'books', 'a.txt', 99)}]"]
    assert main(["show-window", *settings, "3"]) == 2
    assert "not prepared: run `prepare`" in capsys.readouterr().err
    assert main(["show-window", "3", "--split", "val", *settings]) == 2
    assert "not prepared: run `prepare`" in capsys.readouterr().err
    assert main(["show-window", *settings, "5x"]) == 2
    assert "'5x' is no window id" in capsys.readouterr().err
    assert main(["show-window", *settings]) == 2
    assert "no window id is given" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "show-config"])
def test_reader_that_has_gone_ends_the_command_quietly(command: str) -> None:
    """`… | head`: what it prints is short enough to stand in a buffer until the end, or is not."""
    read, write = os.pipe()
    os.close(read)
    line = [sys.executable, "-m", "rayjob", command, "--config", SMALL]
    finished = subprocess.run(line, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert (finished.returncode, finished.stderr) == (1, "")


def test_connection_that_breaks_is_no_quiet_end_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise BrokenPipeError("the connection broke")

    monkeypatch.setattr("rayjob.__main__._work", fail)
    with pytest.raises(BrokenPipeError, match="the connection broke"):
        run(tmp_path, f"data.paths=[{book(tmp_path / 'books', 'a.txt', 500)}]")
