"""Connects the driver to a Ray cluster, or starts a local one."""

import os
import signal
import socket
from urllib.parse import urlsplit

import ray

from rayjob.config import ConfigError

_TIMEOUT_S = 10.0


def connect() -> None:
    """Connects to the cluster of RAY_ADDRESS, or starts a local Ray if that is not set; once per process.

    Raises:
        ConfigError: RAY_ADDRESS names a cluster that does not answer.
    """
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS")
    if address:
        _check_answers(address)
    handler = signal.getsignal(signal.SIGTERM)
    ray.init(address=address)
    signal.signal(signal.SIGTERM, handler)  # Ray puts its own in its place


def _check_answers(address: str) -> None:
    # Ray itself tries a dead address for two minutes, and then ends the process.
    host, _, port = urlsplit(address if "://" in address else f"ray://{address}").netloc.rpartition(":")
    if not port.isdigit():
        return  # "auto" and the like name no host
    try:
        socket.create_connection((host, int(port)), _TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(
            [f"RAY_ADDRESS={address} does not answer ({error}): start that cluster, or unset RAY_ADDRESS."]
        ) from error
