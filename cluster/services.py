"""Brings up what a job needs on this machine: the Ray head (all that head.sh does) and the MLflow server."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from cluster import head, locks, ports, processes, tracking_server
from cluster.settings import DEFAULT_PORTS, LOOPBACK, Settings, SettingsError, read_settings


def current_settings(environment: Mapping[str, str]) -> Settings:
    """Returns the settings, with the ports of what already runs for those that no variable names.

    Raises:
        SettingsError: the variables ask for what cannot be.
    """
    settings = read_settings(environment)
    running = {**head.running_ports(settings), **tracking_server.running_ports(settings)}
    return read_settings(environment, running)


def start(settings: Settings, storage: Path | None) -> None:
    """Brings up the head, and the MLflow server for `storage` if given; joins what runs already.

    Raises:
        SettingsError: a port is taken; nothing has been started.
        HeadError: the head did not come up.
    """
    with hold_services(settings):
        check_ports(settings, head.HEAD_PORTS if storage is None else DEFAULT_PORTS)
        if storage is None:
            head.ensure_head(settings)
            return
        is_new = tracking_server.launch(settings, storage)  # both take seconds, so both at once
        head.ensure_head(settings)
        if is_new:
            _await_tracking_server(settings)


def _await_tracking_server(settings: Settings) -> None:
    """Waits for the MLflow server; the job does not need it, so a failure is only told."""
    try:
        tracking_server.await_ready(settings)
    except tracking_server.TrackingServerError as error:
        print(f"warning: {error} The run goes on without it.", file=sys.stderr)


def start_tracking_server(settings: Settings, storage: Path) -> None:
    """Brings up the MLflow server alone.

    Raises:
        SettingsError: its port is taken.
        TrackingServerError: it did not come up.
    """
    with hold_services(settings):
        check_ports(settings, ["MLFLOW_PORT"])
        if tracking_server.launch(settings, storage):
            tracking_server.await_ready(settings)


def hold_services(settings: Settings) -> AbstractContextManager[None]:
    """Lets one call at a time start something: two heads that start at once spoil each other."""
    return locks.hold(settings.state / "locks" / "services.lock", wait=True, purpose="starting services")


def check_ports(settings: Settings, names: Iterable[str]) -> None:
    """Raises SettingsError if a stranger listens on one of the named ports."""
    records = {"head": head.record_path(settings), "mlflow": tracking_server.record_path(settings)}
    ours = [
        process.pid
        for part, record in records.items()
        # With the record, for what a dead head left behind may be known by nothing else.
        for process in processes.find_ours(settings.marker(part), processes.load_record(record)[0])
    ]
    taken = ports.find_taken({name: settings.ports[name] for name in names}, ours)
    if taken:
        raise SettingsError("\n".join(taken))


def main() -> int:
    """Starts or joins the head, says how to use it, and returns the exit code."""
    try:
        settings = current_settings(os.environ)
        start(settings, storage=None)
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (head.HeadError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    head.warn_exposed(settings)
    if settings.node_ip != LOOPBACK:
        print("warning: other machines can reach this head; whoever has the token can run code on it.")
        print(f"To join:     bash cluster/worker.sh {settings.ray_address} TOKEN_FILE")
    print(f"Its token:   {settings.token_path}")
    print(f"For `ray …`: export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH='{settings.token_path}'")
    return 0


if __name__ == "__main__":
    sys.exit(main())
