"""The load benchmark against a real server on loopback, and its arithmetic."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest

from serving import bench
from serving.bench import main
from serving.benchmark.ceiling import KV_BYTES_PER_TOKEN, WEIGHT_BYTES, Ceiling, measure_bandwidth_gb_s
from serving.benchmark.client import Measurement, Target
from serving.benchmark.load import Load, Outcome
from serving.benchmark.summary import summarize
from tests.serving_checkpoint import save_run
from tests.serving_server import Server, http_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with http_server(save_run(tmp_path_factory.mktemp("runs") / "tiny"), num_slots=4) as running:
        yield running


def run(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any]]:
    code = main(list(options))
    lines = capsys.readouterr().out.splitlines()
    return code, json.loads(lines[-1]) if lines else {}


def test_a_run_reports_every_load_and_draws_it(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = ("--prompt_tokens", "40", "--max_tokens", "5", "--requests", "8")
    common = ("--url", f"{server.url}/v1", *shape, "--json", str(tmp_path / "a.json"))
    code, report = run(capsys, *common, "--concurrency", "1,4", "--rate", "200", "--bandwidth_gb_s", "30")
    assert code == 0
    assert json.loads((tmp_path / "a.json").read_text()) == report
    assert report["model"] == "tiny"
    one, four, rate = report["points"]
    assert (one["concurrency"], four["concurrency"], rate["rate"]) == (1, 4, 200)
    for point in report["points"]:
        assert (point["requests"], point["answered"], point["problems"]) == (8, 8, {})
        assert point["completion_tokens_mean"] == 5
        assert 25 <= point["prompt_tokens_mean"] <= 55, "about as many as were asked for"
        assert point["tokens_per_s"] == pytest.approx(8 * 5 / point["elapsed_s"], rel=0.05)  # both are rounded
        for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
            assert 0 < point[name]["p50"] <= point[name]["p95"] <= point[name]["p99"]
        assert point["ttft_ms"]["p50"] <= point["e2e_ms"]["p50"]
    assert one["ceiling_pct"] == pytest.approx(
        100 * one["tokens_per_s"] / one["ceiling_tokens_per_s"], rel=0.01
    )  # rounded too
    assert "ceiling_pct" not in rate
    plot = tmp_path / "plot.svg"
    options = ("--label", "<a> & b", "--concurrency", "1,2", "--with", str(tmp_path / "a.json"), "--plot", str(plot))
    assert run(capsys, *common, *options)[0] == 0
    svg = ElementTree.fromstring(plot.read_text())
    texts = [element.text for element in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"<a> & b", f"{server.url}/v1", "tokens/s"} <= set(texts)
    assert len(list(svg.iter("{http://www.w3.org/2000/svg}polyline"))) == 2 * 10


@pytest.mark.parametrize("loads", [(), ("--rate", "200,400")])
def test_a_plot_shows_the_default_loads_and_rates_alone_too(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], loads: tuple[str, ...]
) -> None:
    plot = tmp_path / "plot.svg"
    shape = ("--prompt_tokens", "4", "--max_tokens", "2", "--requests", "2")
    assert run(capsys, "--url", f"{server.url}/v1", *shape, *loads, "--plot", str(plot))[0] == 0
    assert "<polyline" in plot.read_text()


def test_a_missing_report_to_compare_with_is_told_before_anything_is_measured(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_measure", None)
    assert run(capsys, "--url", f"{server.url}/v1", "--with", str(tmp_path / "absent.json")) == (2, {})


class Sent(NamedTuple):
    target: Target
    load: Load
    prompts: list[str]
    options: dict[str, Any]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Sent]:
    """What is sent to a server that answers every load with one request of 4 and 3 tokens."""
    loads: list[Sent] = []

    async def run_load(target: Target, load: Load, prompts: list[str], **options: Any) -> Outcome:
        loads.append(Sent(target, load, prompts, options))
        return Outcome(load, [Measurement(0.0, 0.1, 0.2, 4, 3)], 1.0)

    monkeypatch.setattr(bench, "run_load", run_load)
    return loads


@pytest.fixture
def prompts_file(tmp_path: Path) -> str:
    file = tmp_path / "prompts.txt"
    file.write_text("Once upon\n\n  The naïve river \n", encoding="utf-8")
    return str(file)


def test_the_prompts_of_a_file_are_sent_as_the_options_say(
    sent: list[Sent], prompts_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("--url", "http://peer/v1/", "--model", "theirs", "--prompts", prompts_file, "--concurrency", "2")
    assert run(capsys, *common, "--warmup", "0", "--max_tokens", "9")[0] == 0
    rest = ("--warmup", "3", "--stop_at_eos", "--seed", "5", "--timeout_s", "7", "--requests", "11")
    assert run(capsys, *common, *rest)[0] == 0
    first, warmup, last = sent
    assert first.target.url == "http://peer/v1"
    assert first.prompts == ["Once upon", "The naïve river"]
    assert first.target.body == {"model": "theirs", "max_tokens": 9, "temperature": 0, "ignore_eos": True}
    assert last.target.body == {"model": "theirs", "max_tokens": 128, "temperature": 0}
    assert (warmup.load, last.load) == (Load("concurrency", 1, 3), Load("concurrency", 2, 11))
    assert last.options == {"seed": 5, "timeout_s": 7}


def test_a_file_without_prompts_is_exit_code_2(sent: list[Sent], tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n \n")
    for file in (empty, tmp_path / "absent.txt"):
        assert main(["--model", "theirs", "--prompts", str(file)]) == 2
    assert sent == []


def test_the_ceiling_takes_the_bytes_of_the_model_that_is_measured(
    sent: list[Sent], prompts_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("--model", "theirs", "--prompts", prompts_file, "--concurrency", "2", "--bandwidth_gb_s", "30")
    weights = run(capsys, *common, "--weight_bytes", "1000000000", "--kv_bytes_per_token", "0")[1]
    assert weights["points"][0]["ceiling_tokens_per_s"] == 60.0
    cache = run(capsys, *common, "--weight_bytes", "0", "--kv_bytes_per_token", "1000000")[1]
    # Each of the two reads 4 tokens of prompt and on the mean half of its 3 own at every step.
    assert cache["points"][0]["ceiling_tokens_per_s"] == round(30e9 / 5.5e6, 1)


def test_refused_requests_are_counted_by_their_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with http_server(save_run(tmp_path / "tiny"), num_slots=1, max_waiting=0) as full:
        options = ("--concurrency", "16", "--requests", "32", "--max_tokens", "40", "--prompt_tokens", "4")
        code, report = run(capsys, "--url", f"{full.url}/v1", *options)
    [point] = report["points"]
    assert code == 1
    assert set(point["problems"]) == {"429 queue_full"}
    assert point["answered"] + point["problems"]["429 queue_full"] == 32


def test_a_server_that_cannot_be_measured_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://127.0.0.1:9/v1"]) == 2
    assert "http://127.0.0.1:9/v1/models" in capsys.readouterr().err
    with http_server(save_run(tmp_path / "tiny"), api_key="abc") as closed:
        assert main(["--url", f"{closed.url}/v1", "--model", "tiny"]) == 2
    assert "401 invalid_api_key" in capsys.readouterr().err


def test_percentiles_and_rates_are_those_of_the_measurements() -> None:
    measurements = [Measurement(0.0, 0.1 * i, 0.1 * i + 0.9, 64, 10) for i in range(1, 101)]
    measurements.append(Measurement(0.0, problem="429 queue_full"))
    point = summarize(Outcome(Load("concurrency", 4, 101), measurements, 20.0))
    assert point["tokens_per_s"] == 1000 / 20
    assert (point["requests"], point["answered"], point["problems"]) == (101, 100, {"429 queue_full": 1})
    # 100 evenly spaced values from 100 ms to 10,000 ms, interpolated.
    assert point["ttft_ms"] == {"p50": 5050.0, "p95": 9505.0, "p99": 9901.0}
    assert point["tpot_ms"]["p50"] == 100.0
    assert point["e2e_ms"]["p50"] == 5950.0


def test_the_ceiling_is_that_of_the_known_hardware() -> None:
    """RTX 5090, 1.79 TB/s: 6,900 tokens/s alone and 250,000 with 64 sequences of 256 tokens, both rounded."""
    assert (WEIGHT_BYTES, KV_BYTES_PER_TOKEN) == (256_611_840, 12_288)
    ceiling = Ceiling(1790)
    assert ceiling.tokens_per_s(1, 256) == pytest.approx(6_900, rel=0.01)
    assert ceiling.tokens_per_s(64, 256) == pytest.approx(250_000, rel=0.01)


def test_a_measured_bandwidth_is_a_plausible_one() -> None:
    # A small array: this checks the unit, between a floppy drive and ten of the fastest GPUs.
    assert 0.1 < measure_bandwidth_gb_s(1 << 24, repeats=2) < 100_000
