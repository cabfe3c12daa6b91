"""Waiting for an event, and killing worker processes of this session's Ray."""

import contextlib
import time
from collections.abc import Callable

import psutil


def await_true(condition: Callable[[], bool], seconds: float = 200) -> None:
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s, "waited too long"
        time.sleep(0.002)


def kill_tasks(function: str) -> list[int]:
    """kill -9 of the processes that run a function over a data set; only descendants of this process."""
    killed = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "".join(process.cmdline()).startswith(f"ray::Map({function})"):
                process.kill()
                killed.append(process.pid)
    return killed
