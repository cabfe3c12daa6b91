"""Rendering and judging Serve's config; the HTTP side is a small real server."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import deploy
from cluster.settings import Settings, read_settings

CONFIG: dict[str, Any] = {
    "http_options": {"host": "0.0.0.0", "port": 8000},
    "applications": [
        {"name": "generator", "deployments": [{"name": "d", "user_config": {"checkpoint": "old", "num_slots": 4}}]}
    ],
}


def details(config: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """What Serve says of an application that runs as `config` has it."""
    (app,) = config["applications"]
    state = {"status": "RUNNING", "deployed_app_config": app, "last_deployed_time_s": 100.0, "message": ""} | fields
    return {"applications": {app["name"]: state}}


def test_checkpoint_and_port_are_put_in_and_the_rest_is_kept() -> None:
    rendered = deploy.render(CONFIG, "/st/step_00000010", 8123)
    assert rendered["http_options"] == {"host": "127.0.0.1", "port": 8123}
    assert rendered["applications"][0]["deployments"][0]["user_config"] == {
        "checkpoint": "/st/step_00000010",
        "num_slots": 4,
    }
    assert CONFIG["applications"][0]["deployments"][0]["user_config"]["checkpoint"] == "old"


def test_shipped_config_takes_a_checkpoint() -> None:
    rendered = deploy.render(yaml.safe_load(deploy.CONFIG.read_text()), "/here", 8123)
    assert "/here" in json.dumps(rendered["applications"])


def test_config_without_a_checkpoint_is_refused() -> None:
    with pytest.raises(deploy.DeployError, match="user_config.checkpoint"):
        deploy.render({"applications": [{"name": "a", "deployments": [{"name": "d"}]}]}, "/x", 1)


def test_running_application_is_not_deployed_again() -> None:
    config = deploy.render(CONFIG, "/x", 1)
    assert deploy.is_serving(details(config), config, written_at_s=99.0)


@pytest.mark.parametrize(
    "state",
    [
        {"status": "UNHEALTHY"},
        {"status": "DEPLOYING"},
        {"deployed_app_config": deploy.render(CONFIG, "/other", 1)["applications"][0]},
        {"last_deployed_time_s": 98.0},  # the checkpoint has been written anew under the same name
    ],
)
def test_anything_else_is_deployed_again(state: dict[str, Any]) -> None:
    config = deploy.render(CONFIG, "/x", 1)
    assert not deploy.is_serving(details(config, **state), config, written_at_s=99.0)
    assert not deploy.is_serving({}, config, written_at_s=0)


class FakeServe:
    def __init__(self, states: list[dict[str, Any]]) -> None:
        self.states = iter(states)

    def get_serve_details(self) -> dict[str, Any]:
        return {"applications": {"generator": next(self.states)}}


def test_waiting_ends_when_the_application_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy, "POLL_S", 0)
    serve: Any = FakeServe([{"status": "DEPLOYING"}, {"status": "DEPLOYING"}, {"status": "RUNNING"}])
    deploy.wait_running(serve, ["generator"])
    with pytest.raises(StopIteration):
        next(serve.states)


@pytest.mark.parametrize("status", ["DEPLOY_FAILED", "UNHEALTHY"])
def test_failed_deployment_gives_serves_reason(status: str) -> None:
    serve: Any = FakeServe([{"status": status, "message": "no COMPLETE file"}])
    with pytest.raises(deploy.DeployError, match="no COMPLETE file"):
        deploy.wait_running(serve, ["generator"])


class Answer(BaseHTTPRequestHandler):
    """Answers /generate with the prompt's length, or with 503 for a wrong key."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        is_allowed = self.headers.get("Authorization") == "Bearer key"
        answer = {"text": f"{len(body['prompt'])} characters"} if is_allowed else {"error": {"message": "loading"}}
        self.send_response(200 if is_allowed else 503)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def service() -> Iterator[Settings]:
    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield read_settings({"SERVE_PORT": str(server.server_port)})
        server.shutdown()
        thread.join()


def test_generated_text_is_returned(service: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "key")
    assert deploy.generate(service, "abc") == "3 characters"


def test_refused_request_shows_status_and_reason(service: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("API_KEY", raising=False)
    with pytest.raises(deploy.DeployError, match="503.*loading"):
        deploy.generate(service)


def test_checkpoint_that_cannot_be_seen_counts_as_old(tmp_path: Path) -> None:
    assert deploy.written_at_s(str(tmp_path)) == 0
    (tmp_path / "COMPLETE").touch()
    assert deploy.written_at_s(str(tmp_path)) > 0
