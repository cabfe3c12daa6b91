"""The generate command line: the service's text for the same seed, and usage errors with exit code 2."""

import io
from pathlib import Path

import pytest

from serving.generate import main
from tests.serving_checkpoint import MAX_SEQ_LEN, close, save_run, serve_run


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    save_run(folder)
    return folder


def command(run_folder: Path, *options: str) -> int:
    """Runs the command in this process and returns its exit code, argparse's included."""
    try:
        return main(["--checkpoint", str(run_folder), *options])
    except SystemExit as stopped:
        return int(stopped.code or 0)


def test_the_text_is_that_of_the_service_for_the_same_seed(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--max_new_tokens", "30", "--temperature", "1.3", "--top_k", "40", "--top_p", "0.9"]
    code = command(run_folder, "--prompt", "Once", "--repetition_penalty", "1.2", "--seed", "7", *options)
    assert code == 0
    served = serve_run(run_folder)
    answer = served.client.generate(
        prompt="Once", max_new_tokens=30, temperature=1.3, top_k=40, top_p=0.9, repetition_penalty=1.2, seed=7
    )
    close(served)
    assert capsys.readouterr().out == answer.json()["text"] + "\n"


def test_a_checkpoint_folder_works_like_its_run_folder(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--prompt", "Once", "--seed", "1", "--max_new_tokens", "5")
    assert command(run_folder, *options) == command(run_folder / "step_00001200", *options) == 0
    first, second = capsys.readouterr().out.split("\n", 1)
    assert first + "\n" == second


def test_a_drawn_seed_is_shown_and_repeats_the_text(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--prompt", "Once", "--temperature", "2", "--max_new_tokens", "20")
    assert command(run_folder, *options) == 0
    drawn = capsys.readouterr()
    assert command(run_folder, *options, "--seed", drawn.err.split()[1]) == 0
    assert capsys.readouterr().out == drawn.out


def test_interactive_answers_each_line_and_survives_a_bad_one(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Once\n\nOnce\n"))
    assert command(run_folder, "--interactive", "--seed", "3", "--max_new_tokens", "4") == 0
    captured = capsys.readouterr()
    assert "empty" in captured.err
    answers = captured.out.split("> ")
    assert answers[1] == answers[3].rstrip("\n") + "\n"


BAD_USAGE = [
    ([], "--prompt"),
    (["--prompt", ""], "empty"),
    (["--prompt", "a", "--interactive"], "--interactive"),
    (["--prompt", "a", "--temperature", "-1"], "temperature"),
    (["--prompt", "a", "--temperature", "nan"], "temperature"),
    (["--prompt", "a", "--temperature", "hot"], "temperature"),
    (["--prompt", "a", "--top_k", "1.5"], "top_k"),
    (["--prompt", "a", "--top_p", "0"], "top_p"),
    (["--prompt", "a", "--repetition_penalty", "11"], "repetition_penalty"),
    (["--prompt", "a", "--max_new_tokens", "0"], "max_new_tokens"),
    (["--prompt", "a", "--max_new_tokens", "1000"], "1000"),
    (["--prompt", "a", "--seed", "-1"], "seed"),
    (["--prompt", "a", "--unknown", "1"], "--unknown"),
    (["--prompt", "word " * 100], str(MAX_SEQ_LEN)),
    (["--prompt", "a", "--checkpoint", "s3://b/runs/x"], "must be a local checkpoint"),
]


@pytest.mark.parametrize(("options", "named"), BAD_USAGE, ids=lambda value: str(value)[:40])
def test_bad_usage_is_exit_code_2_with_the_reason(
    run_folder: Path, options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(run_folder, *options) == 2
    captured = capsys.readouterr()
    assert named in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_a_missing_or_torn_checkpoint_is_exit_code_2_with_its_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path / "none", "--prompt", "a") == 2
    assert str(tmp_path / "none") in capsys.readouterr().err
    torn = save_run(tmp_path / "runs" / "tiny")
    (torn / "model.safetensors").write_bytes(b"\x80\x04cposix\nsystem\n")
    assert command(torn, "--prompt", "a") == 2
    assert str(torn / "model.safetensors") in capsys.readouterr().err
