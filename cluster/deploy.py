"""Deploys a checkpoint on Ray Serve and asks it for one text."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

from cluster.settings import LOOPBACK, REPOSITORY, Settings, auth_headers

CONFIG = REPOSITORY / "serving" / "config.yaml"
PROMPT = "The old man opened the door, and"
POLL_S = 0.25
# The service shares the machine with training, which takes four fifths of the CPUs and waits for ever for them.
NUM_CPUS = 0.1
TIMEOUT_S = 600  # loading takes seconds; this is for a machine that is busy with something else


class DeployError(Exception):
    """Why the service does not run or did not answer."""


def render(config: dict[str, Any], checkpoint: str, port: int) -> dict[str, Any]:
    """Returns the Serve config with the checkpoint and the port in their places, and no CPU that training needs.

    Raises:
        DeployError: no deployment of the config takes a checkpoint.
    """
    rendered: dict[str, Any] = json.loads(json.dumps(config))
    rendered["http_options"] = {**rendered.get("http_options", {}), "host": LOOPBACK, "port": port}
    deployments = [one for app in rendered["applications"] for one in app.get("deployments", [])]
    takers = [one for one in deployments if "checkpoint" in one.get("user_config", {})]
    if not takers:
        raise DeployError(f"{CONFIG} has no deployment with user_config.checkpoint.")
    for deployment in takers:
        deployment["user_config"]["checkpoint"] = checkpoint
        deployment["ray_actor_options"] = {**deployment.get("ray_actor_options", {}), "num_cpus": NUM_CPUS}
    return rendered


def deploy(settings: Settings, checkpoint: str) -> None:
    """Makes the service serve `checkpoint`; does nothing if it does already.

    Raises:
        DeployError: the service came up with an error, or not at all.
    """
    config = render(yaml.safe_load(CONFIG.read_text()), checkpoint, settings.ports["SERVE_PORT"])
    client = ServeSubmissionClient(settings.dashboard_url, headers=auth_headers(settings))
    if is_serving(client.get_serve_details(), config, written_at_s(checkpoint)):
        print(f"The service has {checkpoint} already.", flush=True)
        return
    print(f"Deploying {checkpoint} …", flush=True)
    client.deploy_applications(config)
    wait_running(client, [app["name"] for app in config["applications"]])


def written_at_s(checkpoint: str) -> float:
    """Returns when the checkpoint was completed, 0 if that cannot be seen from here."""
    try:
        return (Path(checkpoint) / "COMPLETE").stat().st_mtime
    except OSError:
        return 0


def is_serving(details: dict[str, Any], config: dict[str, Any], written_at_s: float) -> bool:
    """Says whether all applications run as the config has them, with the checkpoint as it is on disk now."""
    running = details.get("applications", {})
    return all(
        (app := running.get(wanted["name"])) is not None
        and app["status"] == "RUNNING"
        and app["deployed_app_config"] == wanted
        and app["last_deployed_time_s"] > written_at_s
        for wanted in config["applications"]
    )


def wait_running(client: ServeSubmissionClient, names: list[str]) -> None:
    """Waits until the applications run.

    Raises:
        DeployError: with Serve's reason if one failed; or none came in time.
    """
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        applications = client.get_serve_details().get("applications", {})
        states = [applications.get(name, {}) for name in names]
        failed = [state for state in states if state.get("status") in ("DEPLOY_FAILED", "UNHEALTHY")]
        if failed:
            raise DeployError(f"the service did not start: {failed[0].get('message') or 'no reason given'}")
        if all(state.get("status") == "RUNNING" for state in states):
            return
        if time.monotonic() > deadline_s:
            raise DeployError(f"the service is not up after {TIMEOUT_S} s; its state: {states}")
        time.sleep(POLL_S)


def generate(settings: Settings, prompt: str = PROMPT) -> str:
    """Returns the text that the service answers to one POST /generate.

    Raises:
        DeployError: it answered with an error or not at all.
    """
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    body = json.dumps({"prompt": prompt, "seed": 0}).encode()
    request = urllib.request.Request(f"{settings.serve_url}/generate", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return str(json.load(response)["text"])
    except urllib.error.HTTPError as error:
        raise DeployError(f"POST /generate was answered {error.code}: {error.read().decode()}") from error
    except OSError as error:
        raise DeployError(f"POST {settings.serve_url}/generate failed: {error}") from error
