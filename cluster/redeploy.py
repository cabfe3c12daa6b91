"""Remembers what Ray Serve runs, so that a head that takes the place of a dead one gets it too.

Ray Serve itself replaces a replica or controller that dies; only with the head everything is gone. What runs is asked
of Serve, whoever deployed it: run_all, or a person with `serve deploy`. What a person deletes stays deleted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

from cluster import head
from cluster.settings import ANSWER_TIMEOUT_S, LOOPBACK, Settings, auth_headers, replace_json


class ServeClient(ServeSubmissionClient):
    """Ray's client, but no call waits for ever for a dashboard that has lost its head."""

    def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
        return super()._do_request(method, endpoint, **{"timeout": ANSWER_TIMEOUT_S, **options})


def record_path(settings: Settings) -> Path:
    return settings.state / "serve.json"


def keep(settings: Settings) -> None:
    """Notes what Serve runs; deploys what it ran on another head, without waiting for it.

    Raises:
        OSError, RuntimeError: the head does not answer, or does not take the deployment.
    """
    client = ServeClient(settings.dashboard_url, headers=auth_headers(settings))
    running, this_head = declared(client.get_serve_details()), head.identity(settings)
    remembered = load(settings)
    if running is None and remembered is not None and remembered["head"] != this_head:
        print("Bringing back the service that the last head ran.", flush=True)
        running = with_checkpoints_that_exist(remembered["config"])
        client.deploy_applications(running)
    if running is None:
        forget(settings)
    else:
        save(settings, running, this_head)


def declared(details: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the config that would deploy all that runs, from what Serve says of itself; None if nothing does."""
    found = details.get("applications", {}).values()
    applications = [one["deployed_app_config"] for one in found if one.get("deployed_app_config")]
    if not applications:
        return None
    options = details.get("http_options") or {}
    http = {name: options[name] for name in ("host", "port") if name in options}
    return {
        "proxy_location": details.get("proxy_location") or "HeadOnly",
        "http_options": {"host": LOOPBACK} | http,  # Ray's own default is all interfaces
        "applications": applications,
    }


def with_checkpoints_that_exist(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config with the run's best in the place of each checkpoint that has been removed since."""
    renewed: dict[str, Any] = json.loads(json.dumps(config))
    for deployment in (one for app in renewed["applications"] for one in app.get("deployments", [])):
        user_config = deployment.get("user_config") or {}
        checkpoint = user_config.get("checkpoint")
        if checkpoint and not Path(checkpoint).exists():
            user_config["checkpoint"] = str(Path(checkpoint).parent)
    return renewed


def forget(settings: Settings) -> None:
    """Lets the next head start without what this one ran."""
    record_path(settings).unlink(missing_ok=True)


def load(settings: Settings) -> dict[str, Any] | None:
    """Returns the note of what Serve ran and on which head; None if there is no readable one."""
    try:
        remembered = json.loads(record_path(settings).read_text())
    except (OSError, ValueError):
        return None
    return remembered if isinstance(remembered, dict) and {"head", "config"} <= remembered.keys() else None


def save(settings: Settings, config: dict[str, Any], this_head: str) -> None:
    """Replaces the note whole, if it says something else."""
    contents = {"head": this_head, "config": config}
    if load(settings) != contents:
        replace_json(record_path(settings), contents)
