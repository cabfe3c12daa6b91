"""Changing the checkpoint of a running service: a bad one changes nothing, a good one loses no request."""

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from model.complete import CheckpointError
from serving.http.routes import create_app
from serving.http.service import Service
from tests.serving_checkpoint import Client, Served, close, save_run, serve_run


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "tiny"
    save_run(folder, step=100)
    return folder


@pytest.fixture
def served(run_folder: Path) -> Iterator[Served]:
    service = serve_run(run_folder / "step_00000100")
    yield service
    close(service)


def missing(runs: Path) -> Path:
    return runs / "tiny" / "step_00000200"


def empty(runs: Path) -> Path:
    (runs / "empty").mkdir()
    return runs / "empty"


def torn(runs: Path) -> Path:
    folder = save_run(runs / "tiny", step=200, seed=2)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return folder


def flipped(runs: Path) -> Path:
    folder = save_run(runs / "tiny", step=200, seed=2)
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    return folder


def without_complete(runs: Path) -> Path:
    folder = save_run(runs / "tiny", step=200, seed=2)
    (folder / "COMPLETE").unlink()
    return folder


def other_vocabulary(runs: Path) -> Path:
    return save_run(runs / "tiny", step=200, vocab_size=340)


def not_finite(runs: Path) -> Path:
    def poison(weights: dict[str, Any]) -> None:
        weights["model.layers.1.mlp.up_proj.weight"][3, 3] = float("nan")

    return save_run(runs / "tiny", step=200, change=poison)


def pickled(runs: Path) -> Path:
    folder = save_run(runs / "tiny", step=200)
    (folder / "model.safetensors").write_bytes(b"\x80\x04cposix\nsystem\n")
    return folder


BAD = [missing, empty, torn, flipped, without_complete, other_vocabulary, not_finite, pickled]


@pytest.mark.parametrize("make_bad", BAD)
def test_a_bad_checkpoint_leaves_the_old_one_serving(
    served: Served, run_folder: Path, make_bad: Callable[[Path], Path]
) -> None:
    before = served.client.generate(prompt="Once", seed=1, max_new_tokens=5).json()["outputs"]
    bad = make_bad(run_folder.parent)
    served.client.run(served.service.update({"checkpoint": str(bad)}))
    health = served.client.request("GET", "/health")
    assert health.status_code == 200
    assert health.json()["update_error"].startswith("update failed: ")
    assert str(bad) in health.json()["update_error"]
    answer = served.client.generate(prompt="Once", seed=1, max_new_tokens=5).json()
    assert answer["outputs"] == before
    assert answer["checkpoint"]["step"] == 100


@pytest.mark.parametrize("make_bad", [bad for bad in BAD if bad is not other_vocabulary])
def test_a_service_does_not_start_with_a_bad_checkpoint(tmp_path: Path, make_bad: Callable[[Path], Path]) -> None:
    (tmp_path / "runs").mkdir()
    with pytest.raises(CheckpointError):
        asyncio.run(Service().update({"checkpoint": str(make_bad(tmp_path / "runs"))}))


def test_a_bad_user_config_is_refused_like_a_bad_checkpoint(served: Served) -> None:
    served.client.run(served.service.update({"checkpoint": "x", "slots": 3}))
    assert "num_slots" in served.client.request("GET", "/health").json()["update_error"]


def test_a_good_checkpoint_clears_the_error_and_answers_with_its_step(served: Served, run_folder: Path) -> None:
    served.client.run(served.service.update({"checkpoint": "/nowhere"}))
    newer = save_run(run_folder, step=200, seed=2)
    served.client.run(served.service.update({"checkpoint": str(newer)}))
    health = served.client.request("GET", "/health").json()
    assert (health["checkpoint"]["step"], health["update_error"]) == (200, None)
    assert served.client.generate(prompt="Once", max_new_tokens=1).json()["checkpoint"] == health["checkpoint"]


def test_another_vocabulary_is_served_under_another_name(served: Served, run_folder: Path) -> None:
    other = other_vocabulary(run_folder.parent)
    served.client.run(served.service.update({"checkpoint": str(other), "model_name": "other"}))
    assert served.client.request("GET", "/health").json()["model"] == "other"


def test_no_request_is_lost_and_no_answer_mixes_two_checkpoints_during_a_change(
    served: Served, run_folder: Path
) -> None:
    body = {"prompt": "Once upon", "seed": 1, "max_new_tokens": 30, "ignore_eos": True}
    newer = save_run(run_folder, step=200, seed=2)

    async def change_under_load() -> list[Any]:
        post = served.client.post
        before = [asyncio.create_task(post(body)) for _ in range(6)]
        change = asyncio.create_task(served.service.update({"checkpoint": str(newer)}))
        during = []
        while not change.done():
            during.append(asyncio.create_task(post(body)))
            await asyncio.sleep(0.005)
        after = [asyncio.create_task(post(body)) for _ in range(3)]
        return await asyncio.gather(*before, *during, *after)

    answers = served.client.run(change_under_load())
    assert {answer.status_code for answer in answers} == {200}
    texts: dict[int, set[str]] = {}
    for answer in (response.json() for response in answers):
        texts.setdefault(answer["checkpoint"]["step"], set()).add(answer["text"])
    assert set(texts) == {100, 200}
    assert all(len(of_step) == 1 for of_step in texts.values())


def test_a_run_folder_means_its_best_checkpoint(run_folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run_folder, copy)
    service = serve_run(copy)
    assert service.client.request("GET", "/health").json()["model"] == "copy"
    close(service)


def test_without_a_model_the_answer_is_503() -> None:
    with asyncio.Runner() as runner:
        client = Client(create_app(Service()), runner)
        for response in (client.request("GET", "/health"), client.generate(prompt="a")):
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "model_loading"


def test_a_closing_service_takes_no_more_requests(served: Served) -> None:
    served.service.close()
    response = served.client.generate(prompt="a")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "shutting_down")


def test_a_dead_engine_is_a_503(served: Served) -> None:
    engine = served.service.engine()
    engine.close()
    engine.join(10)
    for response in (served.client.request("GET", "/health"), served.client.generate(prompt="a")):
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_dead")
