"""The app behind a real HTTP server on loopback, in a thread of the test's process and without Ray."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from serving.http.routes import create_app
from serving.http.service import Service


@dataclass(frozen=True)
class Server:
    """A running server; `service` is the one behind it and `app` answers for it."""

    url: str
    service: Service
    app: Any


@contextlib.contextmanager
def http_server(checkpoint: Path, *, api_key: str | None = None, **limits: Any) -> Iterator[Server]:
    """Serves a checkpoint on a free port until the block ends."""
    service = Service()
    # The models of tests are tiny: a second thread costs more in waiting than it computes.
    config = {"checkpoint": str(checkpoint), "num_threads": 1, **limits}
    # In a thread, as the test's own may have an event loop running.
    with ThreadPoolExecutor(1) as thread_of_loading:
        thread_of_loading.submit(asyncio.run, service.update(config)).result()
    app = create_app(service, api_key=api_key)
    listener = socket.create_server(("127.0.0.1", 0))
    # Of the two implementations of HTTP that uvicorn has, h11 is the one that is always there.
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", http="h11", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield Server(f"http://127.0.0.1:{listener.getsockname()[1]}", service, app)
    finally:
        server.should_exit = True
        thread.join()
        service.close()
