"""Connects the driver to a Ray cluster, or starts a local one."""

import os
import signal
import socket
import sys
from urllib.parse import urlsplit

import ray

from rayjob.config import ConfigError

_TIMEOUT_S = 10.0


class ConnectCancelled(RuntimeError):
    """A SIGTERM came while Ray was starting."""


def connect() -> None:
    """Connects to the cluster of RAY_ADDRESS, or starts a local Ray if that is not set; once per process.

    Raises:
        ConfigError: RAY_ADDRESS names a cluster that does not answer.
        ConnectCancelled: a SIGTERM came meanwhile; the handler that was set before has been called.
    """
    if ray.is_initialized():
        return
    if not sys.stderr.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # what workers print; colours are noise in a job's log
    address = os.environ.get("RAY_ADDRESS")
    if address:
        _check_answers(address)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address)
    except SystemExit as error:  # of the handler that Ray puts in the place of ours
        if not callable(handler):
            raise
        handler(signal.SIGTERM, None)
        raise ConnectCancelled("stopped while Ray was starting.") from error
    except ConnectionError as error:
        if not address:
            raise
        raise ConfigError([f"RAY_ADDRESS={address} cannot be used: {error}"]) from error
    finally:
        signal.signal(signal.SIGTERM, handler)


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
