"""The Ray Serve application as it is built, without a Ray."""

from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from serving import settings
from serving.http.app import Generator, build_app
from serving.settings import MAX_ONGOING_REQUESTS, parse_settings


def test_arguments_become_the_user_config() -> None:
    deployment = build_app({"checkpoint": "runs/a"})._bound_deployment
    assert deployment.name == "generator"
    assert deployment.user_config == {"checkpoint": "runs/a"}
    assert build_app({})._bound_deployment.user_config is None


def test_ray_serve_lets_in_more_than_any_settings_take() -> None:
    most = parse_settings({"checkpoint": "x", "num_slots": 256, "max_waiting": 256})
    assert build_app({})._bound_deployment.max_ongoing_requests == MAX_ONGOING_REQUESTS
    assert most.num_slots + most.max_waiting < MAX_ONGOING_REQUESTS


def test_the_shipped_file_is_what_serve_deploy_takes() -> None:
    config = ServeDeploySchema.model_validate(
        yaml.safe_load(Path(settings.__file__).with_name("config.yaml").read_text())
    )
    (application,) = config.applications
    assert application.import_path == "serving.http.app:build_app"
    (deployment,) = application.deployments
    assert deployment.name == build_app({})._bound_deployment.name


def test_the_key_of_the_deploying_process_reaches_the_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "abc")
    assert build_app({})._bound_deployment.init_args == ("abc",)


def test_a_replica_without_user_config_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.http.app._http_host", lambda: "127.0.0.1")
    with pytest.raises(ValueError, match="user_config"):
        Generator(api_key=None).check_health()
