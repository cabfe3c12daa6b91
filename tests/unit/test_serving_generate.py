"""The generate command line: the service's text for the same seed, and usage errors with exit code 2."""

import io
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from serving.console.options import SAMPLING
from serving.generate import main
from tests.serving_checkpoint import MAX_SEQ_LEN, close, save_run, serve_run


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    save_run(folder)
    return folder


@pytest.fixture(autouse=True)
def _own_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def command(run_folder: Path, *options: str) -> int:
    """Runs the command in this process and returns its exit code, argparse's included."""
    try:
        return main(["--checkpoint", str(run_folder), *options])
    except SystemExit as stopped:
        return int(stopped.code or 0)


def test_the_text_is_that_of_the_service_for_the_same_seed(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sampling = {
        "temperature": 1.3,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.4,
        "presence_penalty": -0.3,
    }
    assert set(sampling) == set(SAMPLING), "every sampling option is tried"
    options = [word for name, value in sampling.items() for word in (f"--{name}", str(value))]
    options += ["--prompt", "Once", "--seed", "7", "--max_new_tokens", "30"]
    served = serve_run(run_folder)
    body = {"prompt": "Once", "max_new_tokens": 30, "seed": 7, **sampling}
    text = served.client.generate(**body).json()["text"]
    stop = [text[-1], text[len(text) // 2 :][:3]]
    stopped = served.client.generate(**body, stop=stop).json()["text"]
    close(served)
    assert command(run_folder, *options) == 0
    assert capsys.readouterr().out == text + "\n"
    assert command(run_folder, *options, "--stop", stop[0], "--stop", stop[1]) == 0
    assert capsys.readouterr().out == stopped + "\n"
    assert len(stopped) < len(text)


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
    (["--prompt", "a", "--prompts", "b"], "--prompts"),
    (["--interactive", "--json"], "--json"),
    (["--prompt", "a", "--n", "0"], "n must be"),
    (["--prompt", "a", "--min_p", "2"], "min_p"),
    (["--prompt", "a", "--stop", ""], "stop"),
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
    run_folder: Path,
    options: list[str],
    named: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", terminal)
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


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[Any]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_json_has_the_texts_and_where_they_come_from(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--prompt", "Once", "--seed", "7", "--max_new_tokens", "6", "--n", "3", "--temperature", "1.5")
    assert command(run_folder, *options, "--json") == 0
    [answer] = lines_of(capsys)
    assert (answer["prompt"], answer["seed"], answer["checkpoint"]["step"]) == ("Once", 7, 1200)
    assert [output["index"] for output in answer["outputs"]] == [0, 1, 2]
    assert command(run_folder, *options) == 0
    texts = [output["text"] for output in answer["outputs"]]
    assert capsys.readouterr().out == "\n\n".join(f"[{i}] {text}" for i, text in enumerate(texts, start=1)) + "\n"


def test_a_file_of_prompts_gives_each_the_texts_it_has_alone(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [f"Once upon {number}" for number in range(70)]
    file = tmp_path / "prompts.txt"
    file.write_text("\n\n".join(prompts) + "\n", encoding="utf-8")
    options = ("--seed", "3", "--max_new_tokens", "3", "--n", "2", "--json")
    assert command(run_folder, "--prompts", str(file), *options) == 0
    answers = lines_of(capsys)
    assert [answer["prompt"] for answer in answers] == prompts
    assert command(run_folder, "--prompt", prompts[69], *options) == 0
    assert lines_of(capsys) == answers[69:]
    as_json = tmp_path / "prompts.jsonl"
    as_json.write_text("\n".join(json.dumps({"prompt": prompt, "id": 1}) for prompt in prompts[:2]), encoding="utf-8")
    assert command(run_folder, "--prompts", str(as_json), *options) == 0
    assert lines_of(capsys) == answers[:2]


def test_a_bad_file_of_prompts_is_exit_code_2_with_its_line(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content, named in [
        ("empty.txt", "\n", "no prompts"),
        ("bad.jsonl", '{"prompt": "a"}\n{"text": "b"}\n', "line 2"),
        ("latin.txt", b"caf\xe9", "UTF-8"),
        ("long.txt", "a\n" + "word " * 200 + "\n", "prompt 2"),
    ]:
        file = tmp_path / name
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        assert command(run_folder, "--prompts", str(file)) == 2
        captured = capsys.readouterr()
        assert named in captured.err
        assert captured.out == ""
    assert command(run_folder, "--prompts", str(tmp_path / "none.txt")) == 2


def test_a_prompt_is_read_from_a_pipe(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--seed", "1", "--max_new_tokens", "5")
    assert command(run_folder, "--prompt", "Once\nupon", *options) == 0
    expected = capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("Once\nupon\n"))
    assert command(run_folder, *options) == 0
    assert capsys.readouterr().out == expected


def converse(run_folder: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    assert command(run_folder, "--interactive", "--max_new_tokens", "6") == 0


def test_commands_change_the_settings_and_the_seed(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    converse(
        run_folder,
        monkeypatch,
        "/set temperature 0",
        "Once",
        "/again",
        "/seed 5",
        "/set temperature 2",
        "Once",
        "/again",
    )
    texts = [answer for answer in capsys.readouterr().out.split("> ") if answer]
    assert texts[0] == texts[1]
    assert texts[2] == texts[3]
    options = ("--prompt", "Once", "--max_new_tokens", "6", "--seed", "5", "--temperature", "2")
    assert command(run_folder, *options) == 0
    assert capsys.readouterr().out == texts[2]


def test_wrong_commands_are_answered_and_end_nothing(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = ["/set temperature hot", "/set temperatur 1", "/set top_p 7", "/seed x", "/seed -1", "/nothing"]
    converse(run_folder, monkeypatch, *wrong, "/help", "/set", "/seed", "//x", "/quit", "never read")
    captured = capsys.readouterr()
    assert captured.err.count("error: ") == len(wrong)
    assert "the nearest one is temperature" in captured.err
    assert "/set NAME VALUE" in captured.err
    assert "top_k = 50" in captured.err
    assert captured.out.count("> ") == len(wrong) + 5


class InterruptedOutput(io.StringIO):
    """Standard output that gets a Ctrl-C once a text has begun."""

    writes = 0

    def write(self, text: str) -> int:
        self.writes += text != "> "
        if self.writes == 3:
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


def test_ctrl_c_stops_the_text_and_not_the_program(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where a shell started the tests in the background, SIGINT is ignored, and so it is in what they start.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    output = InterruptedOutput()
    monkeypatch.setattr("sys.stdout", output)
    lines = ["/set max_new_tokens 50", "/set repetition_penalty 1.3", "Once", "/set max_new_tokens 4", "Once"]
    try:
        converse(run_folder, monkeypatch, *lines)
    finally:
        signal.signal(signal.SIGINT, before)
    counts = [int(count) for count in re.findall(r"\[(\d+) tokens", capsys.readouterr().err)]
    assert len(counts) == 2
    assert counts[0] < 50
    assert 1 <= counts[1] <= 4
