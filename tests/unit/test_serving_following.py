"""A run folder is followed: its new best checkpoint is served, and nothing else makes a difference."""

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving.engine.engine import Engine
from serving.http.app import Generator
from serving.http.errors import ApiError
from serving.http.service import Service
from tests.serving_checkpoint import Served, close, save_run, serve_run

BODY = {"prompt": "Once upon a time", "max_new_tokens": 20, "seed": 3, "ignore_eos": True}


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "tiny"
    save_run(folder, step=100, seed=1, val_loss=3.0)
    return folder


@pytest.fixture
def served(run_folder: Path) -> Iterator[Served]:
    service = serve_run(run_folder)
    yield service
    close(service)


def follow(served: Served) -> dict[str, Any]:
    served.client.run(served.service.follow())
    health: dict[str, Any] = served.client.request("GET", "/health").json()
    return health


def test_a_new_best_is_served_and_a_worse_one_is_not(served: Served, run_folder: Path) -> None:
    save_run(run_folder, step=200, seed=2, val_loss=4.0)
    assert follow(served)["checkpoint"]["step"] == 100
    save_run(run_folder, step=300, seed=3, val_loss=2.0)
    assert follow(served)["checkpoint"]["step"] == 300


def test_an_unchanged_folder_is_only_looked_at(served: Served) -> None:
    before = served.service.engine()
    follow(served)
    assert served.service.engine() is before


def test_a_checkpoint_that_was_named_is_not_left(run_folder: Path) -> None:
    served = serve_run(run_folder / "step_00000100")
    save_run(run_folder, step=300, seed=3, val_loss=2.0)
    assert follow(served)["checkpoint"]["step"] == 100
    close(served)


def test_a_bad_new_best_is_tried_once_and_the_old_one_goes_on(
    served: Served, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def poison(weights: dict[str, Any]) -> None:
        weights["model.norm.weight"][0] = float("nan")

    save_run(run_folder, step=300, seed=3, val_loss=2.0, change=poison)
    health = follow(served)
    assert health["checkpoint"]["step"] == 100
    assert "step_00000300" in health["update_error"]
    monkeypatch.setattr(served.service, "_prepare", None)  # a second try would call it
    assert follow(served) == health


def test_a_checkpoint_written_again_under_its_name_is_another_one(served: Served, run_folder: Path) -> None:
    before = served.client.request("GET", "/health").json()["checkpoint"]
    for file in (run_folder / "step_00000100").rglob("*"):
        if file.is_file():
            file.unlink()
    os.rename(run_folder / "step_00000100", run_folder.parent / "gone")
    assert follow(served)["checkpoint"] == before, "a folder that is gone changes nothing"
    save_run(run_folder, step=100, seed=9, val_loss=3.0)
    assert follow(served)["checkpoint"]["sha256"] != before["sha256"]


def test_running_sequences_finish_on_the_weights_they_began_with(served: Served, run_folder: Path) -> None:
    alone = served.client.generate(**BODY).json()
    save_run(run_folder, step=300, seed=3, val_loss=2.0)

    async def change_under_load() -> list[dict[str, Any]]:
        requests = [asyncio.create_task(served.client.post(BODY)) for _ in range(12)]
        while not served.service.health().running:
            await asyncio.sleep(0.001)
        await served.service.follow()
        return [
            json.loads((await request).text) for request in [*requests, asyncio.create_task(served.client.post(BODY))]
        ]

    answers = served.client.run(change_under_load())
    texts: dict[int, set[str]] = {}
    for answer in answers:
        texts.setdefault(answer["checkpoint"]["step"], set()).add(answer["text"])
    assert texts[100] == {alone["text"]}
    assert len(texts[300]) == 1
    assert texts[300] != texts[100]


def test_a_replica_with_a_dead_engine_is_not_healthy(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.http.app._http_host", lambda: "127.0.0.1")
    generator = Generator(api_key=None)

    async def reconfigure() -> Service:
        await generator.reconfigure({"checkpoint": str(run_folder)})
        return generator._service

    engine: Engine = asyncio.run(reconfigure()).engine()
    generator.check_health()
    engine.close()
    engine.join(timeout_s=20)
    with pytest.raises(ApiError, match="engine"):
        generator.check_health()
