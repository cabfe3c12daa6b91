"""The service on a real local Ray Serve.

Real: Ray, Serve's proxy and replica, HTTP over a socket, checkpoints on disk. Faked: nothing, but the model
is tiny and its weights are random.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import ray
import yaml
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from serving import settings
from tests.serving_checkpoint import save_run

pytestmark = pytest.mark.ray

BODY = {"prompt": "Once upon a time", "max_new_tokens": 20, "seed": 3, "ignore_eos": True}
READY_WITHIN_S = 120.0  # a start of Ray Serve takes about 10 s on two free cores


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    save_run(folder / "tiny", step=100)
    return folder


@pytest.fixture(scope="module")
def cluster(local_ray: None) -> Iterator[None]:
    """Ray Serve on the session's Ray."""
    yield
    serve.shutdown()


@pytest.fixture(scope="module")
def url(cluster: None, runs: Path) -> str:
    """The application as `serving/config.yaml` declares it, on a free port."""
    url = start_serve("127.0.0.1")
    deploy(runs / "tiny" / "step_00000100")
    health_once(url, lambda health: health["status"] == "ok")
    return url


def start_serve(host: str) -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    serve.start(http_options={"host": host, "port": port})
    return f"http://127.0.0.1:{port}"


def deploy(checkpoint: Path, *, env: dict[str, str] | None = None, num_replicas: int = 1, **limits: float) -> None:
    """Does what `serve deploy` does with the shipped file, but for checkpoint, limits, replicas and port."""
    config = yaml.safe_load(Path(settings.__file__).with_name("config.yaml").read_text())
    (application,) = config["applications"]
    (deployment,) = application["deployments"]
    # One thread: the model is tiny, and two CPUs are all that this machine is sure to have.
    deployment["user_config"] |= {"checkpoint": str(checkpoint), "num_slots": 4, "num_threads": 1, **limits}
    deployment["num_replicas"] = num_replicas
    application["runtime_env"] = {"env_vars": {"PYTHONPATH": str(settings.REPOSITORY), **(env or {})}}
    del config["http_options"], config["proxy_location"]
    _get_global_client().deploy_apps(ServeDeploySchema.model_validate(config))


def health_once(url: str, is_reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Polls /health until it shows what is waited for, and returns it."""
    deadline_s = time.monotonic() + READY_WITHIN_S
    health: dict[str, Any] = {}
    while time.monotonic() < deadline_s:
        try:
            response = httpx.get(f"{url}/health")
            health = response.json() if response.status_code == 200 else {}
        except httpx.TransportError:
            continue
        if health and is_reached(health):
            return health
        time.sleep(0.05)
    raise TimeoutError(f"not within {READY_WITHIN_S} s: {health}, {serve.status()}")


def replicas() -> dict[str, int]:
    """Returns the process id of each running replica, by its actor's id."""
    details = ray.get(_get_global_client()._controller.get_serve_instance_details.remote())
    deployments = details["applications"]["generator"]["deployments"].values()
    found = [replica for deployment in deployments for replica in deployment["replicas"]]
    return {replica["actor_id"]: replica["pid"] for replica in found if replica["state"] == "RUNNING"}


def replica_ids() -> set[str]:
    return set(replicas())


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    return error


def test_beyond_loopback_the_service_starts_only_with_a_key(cluster: None, runs: Path) -> None:
    url = start_serve("0.0.0.0")
    deploy(runs / "tiny")
    deadline_s = time.monotonic() + READY_WITHIN_S
    while "API_KEY is not set" not in str(serve.status().applications["generator"]):
        assert time.monotonic() < deadline_s, serve.status()
        time.sleep(0.05)
    deploy(runs / "tiny", env={"API_KEY": "abc"})
    health_once(url, lambda health: health["status"] == "ok")
    assert httpx.post(f"{url}/generate", json=BODY).status_code == 401
    answer = httpx.post(f"{url}/generate", json=BODY, headers={"Authorization": "Bearer abc"}, timeout=60)
    assert answer.status_code == 200
    serve.shutdown()


def test_generate_and_health_answer(url: str) -> None:
    answers = [httpx.post(f"{url}/generate", json=BODY, timeout=60).json() for _ in range(2)]
    assert answers[0]["outputs"] == answers[1]["outputs"]
    assert answers[0]["usage"]["completion_tokens"] == 20
    assert answers[0]["model"] == "tiny"
    health = httpx.get(f"{url}/health")
    assert (health.status_code, health.json()["checkpoint"]["step"]) == (200, 100)
    assert "/generate" in httpx.get(f"{url}/openapi.json").json()["paths"]
    page = httpx.get(url)
    assert (page.status_code, "default-src 'none'" in page.headers["content-security-policy"]) == (200, True)
    assert "rayjob:generation_tokens_total" in httpx.get(f"{url}/metrics").text


def test_a_stream_over_the_proxy_equals_the_unstreamed_text(url: str) -> None:
    whole = httpx.post(f"{url}/generate", json=BODY, timeout=60).json()["text"]
    with httpx.stream("POST", f"{url}/generate", json={**BODY, "stream": True}, timeout=60) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "".join(event["text"] for event in events[:-1]) == whole


def test_the_openai_client_streams_through_the_proxy(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60) as client:
        fields: dict[str, Any] = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 12, "seed": 3}
        whole = client.completions.create(**fields, logprobs=2, echo=True)
        chunks = list(client.completions.create(**fields, logprobs=2, echo=True, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


BAD = [
    (b'{"prompt":"Once","temperature":NaN}', 400),
    (b'{"prompt":"Once","top_k":true}', 400),
    (b'{"prompt":"Once","max_new_token":4}', 400),
    (b'{"prompt":"a","temperature":' + b"9" * 5000 + b"}", 400),
    (b'{"prompt":' + b"[" * 100_000, 400),
    (b"\xff", 400),
    (b'{"prompt":"' + b"x" * (10 << 20) + b'"}', 413),
]


@pytest.mark.parametrize(("body", "status"), BAD, ids=lambda value: repr(value)[:30])
def test_bad_bodies_answer_in_the_one_shape(url: str, body: bytes, status: int) -> None:
    response = httpx.post(f"{url}/generate", content=body, timeout=60)
    assert response.status_code == status
    assert set(error_of(response)) == {"message", "type", "param", "code"}
    assert httpx.get(f"{url}/nothing").status_code == 404
    assert error_of(httpx.get(f"{url}/generate"))["code"] == "method_not_allowed"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_clients_that_leave_free_their_slots(url: str, is_streamed: bool) -> None:
    body = {**BODY, "n": 16, "max_new_tokens": 50, "stream": is_streamed}

    def leave() -> None:
        try:
            with httpx.stream("POST", f"{url}/generate", json=body, timeout=0.05) as response:
                next(response.iter_lines())
        except httpx.TimeoutException:
            pass

    for _ in range(10):
        leave()
    deadline_s = time.monotonic() + 10
    while (health := httpx.get(f"{url}/health").json())["running"] or health["waiting"]:
        assert time.monotonic() < deadline_s, health
    assert httpx.post(f"{url}/generate", json=BODY, timeout=60).status_code == 200


class Load(threading.Thread):
    """Sends requests one after another until it is told to stop, and keeps what came back."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._is_over = threading.Event()
        self.answers: list[tuple[int, dict[str, Any]]] = []

    def run(self) -> None:
        with httpx.Client(timeout=60) as client:
            while not self._is_over.is_set():
                response = client.post(f"{self._url}/generate", json=BODY)
                is_json = response.headers["content-type"] == "application/json"
                self.answers.append((response.status_code, response.json() if is_json else {}))

    def stop(self) -> list[tuple[int, dict[str, Any]]]:
        self._is_over.set()
        self.join()
        return self.answers


def test_a_bad_then_a_good_checkpoint_under_load_lose_no_request(url: str, runs: Path) -> None:
    torn = save_run(runs / "tiny", step=150, seed=5)
    (torn / "model.safetensors").write_bytes(b"torn")
    replicas = replica_ids()
    load = start_load(url, 3)
    deploy(torn)
    health = health_once(url, lambda health: health["update_error"] is not None)
    assert health["checkpoint"]["step"] == 100
    assert "model.safetensors" in health["update_error"]
    deploy(save_run(runs / "tiny", step=200, seed=2))
    assert health_once(url, lambda health: health["checkpoint"]["step"] == 200)["update_error"] is None
    answers = [answer for thread in load for answer in thread.stop()]
    assert {status for status, _ in answers} == {200}
    texts: dict[int, set[str]] = {}
    for _, answer in answers:
        texts.setdefault(answer["checkpoint"]["step"], set()).add(answer["text"])
    assert set(texts) == {100, 200}
    assert all(len(of_step) == 1 for of_step in texts.values()), "an answer mixes two checkpoints"
    assert replica_ids() == replicas, "the replica was replaced instead of reconfigured"


def test_overload_is_answered_429_by_the_service_before_ray_serve_refuses(url: str, runs: Path) -> None:
    deploy(runs / "tiny", num_slots=1, max_waiting=3)
    health_once(url, lambda health: health["slots"] == 1)

    async def flood() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=60) as client:
            body = {**BODY, "max_new_tokens": 50}
            return await asyncio.gather(*(client.post(f"{url}/generate", json=body) for _ in range(40)))

    responses = asyncio.run(flood())
    refused = [response for response in responses if response.status_code == 429]
    assert {response.status_code for response in responses} == {200, 429}
    assert all(error_of(response)["code"] == "queue_full" for response in refused)
    assert all(int(response.headers["retry-after"]) >= 1 for response in refused)


def until(is_reached: Callable[[], bool]) -> None:
    """Waits for something that Ray Serve does."""
    deadline_s = time.monotonic() + READY_WITHIN_S
    while not is_reached():
        assert time.monotonic() < deadline_s, serve.status()
        time.sleep(0.05)


def start_load(url: str, clients: int) -> list[Load]:
    load = [Load(url) for _ in range(clients)]
    for thread in load:
        thread.start()
    return load


def test_a_new_best_of_a_followed_run_is_served_without_a_request_lost(url: str, runs: Path) -> None:
    save_run(runs / "followed", step=1, seed=1, val_loss=3.0)
    deploy(runs / "followed", follow_interval_s=0.2)
    health_once(url, lambda health: health["model"] == "followed")
    load = start_load(url, 3)
    save_run(runs / "followed", step=2, seed=2, val_loss=2.0)
    health_once(url, lambda health: health["checkpoint"]["step"] == 2)
    httpx.post(f"{url}/generate", json=BODY, timeout=60)
    answers = [answer for thread in load for answer in thread.stop()]
    assert {status for status, _ in answers} == {200}
    texts: dict[int, set[str]] = {}
    for _, answer in answers:
        texts.setdefault(answer["checkpoint"]["step"], set()).add(answer["text"])
    assert all(len(of_step) == 1 for of_step in texts.values()), "an answer mixes two checkpoints"


def test_kill_9_of_one_of_two_replicas_loses_only_its_requests_and_draining_loses_none(url: str, runs: Path) -> None:
    deploy(runs / "tiny", num_replicas=2)
    until(lambda: len(replicas()) == 2)
    alone = httpx.post(f"{url}/generate", json=BODY, timeout=60).json()["text"]
    load = start_load(url, 6)
    before = replicas()
    killed, pid = next(iter(before.items()))
    body = {**BODY, "n": 16, "max_new_tokens": 50, "stream": True}
    stream = httpx.stream("POST", f"{url}/generate", json=body, timeout=60)
    with stream as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(httpx.NetworkError, httpx.ProtocolError):  # no ReadTimeout: a stream that hangs fails
            for _ in lines:  # ends, or breaks, or is another replica's
                pass
    until(lambda: killed not in replicas() and len(replicas()) == 2)
    deploy(runs / "tiny", num_replicas=1)
    until(lambda: len(replicas()) == 1)
    counts = [len(thread.answers) for thread in load]
    until(lambda: all(len(thread.answers) > count for thread, count in zip(load, counts, strict=True)))
    answers = [answer for thread in load for answer in thread.stop()]
    lost = [status for status, _ in answers if status != 200]
    assert all(status >= 500 for status in lost)
    assert len(lost) <= len(load), "each client had one request with the replica that was killed, or none"
    assert {answer["text"] for status, answer in answers if status == 200} == {alone}, "the same on every replica"
