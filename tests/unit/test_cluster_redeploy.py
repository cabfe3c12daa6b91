"""What is remembered of Ray Serve and when it is deployed again; Serve and the head are replaced by their answers."""

from pathlib import Path
from typing import Any

import pytest

from cluster import redeploy
from cluster.settings import Settings, read_settings

APP = {"name": "generator", "deployments": [{"name": "generator", "user_config": {"checkpoint": "/st/step_00000010"}}]}
DETAILS = {
    "proxy_location": "HeadOnly",
    "http_options": {"host": "127.0.0.1", "port": 8123, "root_path": ""},
    "applications": {"generator": {"status": "RUNNING", "deployed_app_config": APP}},
}
NOTHING: dict[str, Any] = {"controller_info": {}, "proxies": {}, "applications": {}, "target_capacity": None}


class Serve:
    """One cluster after another, each with what Serve says of itself."""

    def __init__(self) -> None:
        self.head, self.details = "head 1", NOTHING
        self.deployed: list[dict[str, Any]] = []

    def get_serve_details(self) -> dict[str, Any]:
        return self.details

    def deploy_applications(self, config: dict[str, Any]) -> None:
        self.deployed.append(config)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    serve = Serve()
    monkeypatch.setattr(redeploy, "ServeClient", lambda *_, **__: serve)
    monkeypatch.setattr(redeploy, "auth_headers", lambda _: {})
    monkeypatch.setattr(redeploy.head, "identity", lambda _: serve.head)
    return serve


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return read_settings({"RAYJOB_STATE": str(tmp_path)})


def test_what_ran_on_a_lost_head_is_deployed_on_the_next(serve: Serve, settings: Settings) -> None:
    serve.details = DETAILS
    redeploy.keep(settings)
    serve.head, serve.details = "head 2", NOTHING
    redeploy.keep(settings)
    (deployed,) = serve.deployed
    assert deployed["http_options"] == {"host": "127.0.0.1", "port": 8123}
    assert deployed["applications"][0]["name"] == "generator"
    redeploy.keep(settings)
    assert len(serve.deployed) == 1, "once: one that fails stays visible as failed"


def test_what_a_person_deletes_stays_deleted(serve: Serve, settings: Settings) -> None:
    serve.details = DETAILS
    redeploy.keep(settings)
    serve.details = NOTHING
    redeploy.keep(settings)
    serve.head = "head 2"
    redeploy.keep(settings)
    assert serve.deployed == []


def test_nothing_is_deployed_where_nothing_ran(serve: Serve, settings: Settings) -> None:
    redeploy.keep(settings)
    serve.head = "head 2"
    redeploy.keep(settings)
    assert serve.deployed == []


def test_service_comes_back_when_the_head_took_it_at_the_second_try(serve: Serve, settings: Settings) -> None:
    serve.details = DETAILS
    redeploy.keep(settings)
    serve.head, serve.details = "head 2", NOTHING

    def refuse(config: dict[str, Any]) -> None:
        raise RuntimeError("503: not yet")

    taking, serve.deploy_applications = serve.deploy_applications, refuse  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        redeploy.keep(settings)
    serve.deploy_applications = taking  # type: ignore[method-assign]
    redeploy.keep(settings)
    assert len(serve.deployed) == 1


def test_checkpoint_that_is_gone_gives_way_to_the_best_of_its_run(tmp_path: Path) -> None:
    (tmp_path / "step_00000020").mkdir()
    config = {
        "applications": [
            {
                "deployments": [
                    {"user_config": {"checkpoint": str(tmp_path / name)}} for name in ("step_00000010", "step_00000020")
                ]
                + [{"name": "without"}]
            }
        ]
    }
    renewed = redeploy.with_checkpoints_that_exist(config)
    taken = [one.get("user_config", {}).get("checkpoint") for one in renewed["applications"][0]["deployments"]]
    assert taken == [str(tmp_path), str(tmp_path / "step_00000020"), None]


def test_service_is_never_brought_back_on_all_interfaces_for_want_of_a_word() -> None:
    declared = redeploy.declared({"applications": {"a": {"deployed_app_config": APP}}, "http_options": None})
    assert declared is not None
    assert declared["http_options"] == {"host": "127.0.0.1"}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"head": 1}'])
def test_torn_note_is_as_good_as_none(settings: Settings, text: str) -> None:
    redeploy.record_path(settings).write_text(text)
    assert redeploy.load(settings) is None


def test_stop_forgets_the_service(serve: Serve, settings: Settings) -> None:
    serve.details = DETAILS
    redeploy.keep(settings)
    redeploy.forget(settings)
    serve.head, serve.details = "head 2", NOTHING
    redeploy.keep(settings)
    assert serve.deployed == []
