"""moto's S3 server on a loopback port, with a place to hold up or refuse requests."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow.fs
import pytest

moto_app = pytest.importorskip(
    "moto.moto_server.werkzeug_app", reason="the extra `test` installs moto, which serves S3"
)

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


class _QuietHandler(moto_app.MotoRequestHandler):  # type: ignore[name-defined,misc]
    def log_request(self, *_args: object) -> None:
        """A line for each request would hide what a failed test says."""


class S3Server:
    """A running server.

    Attributes:
        environment: what leads a client there.
        intercept: called with method and path before each request, in a thread of the server; it may block, and a
            status such as "500 Refused" answers the request instead of the server.
    """

    def __init__(self) -> None:
        from werkzeug.serving import make_server

        self.intercept: Callable[[str, str], str | None] = lambda _method, _path: None
        self._app = moto_app.DomainDispatcherApplication(moto_app.create_backend_app)
        self._server = make_server("127.0.0.1", 0, self, threaded=True, request_handler=_QuietHandler)
        self._address = f"127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.environment = CREDENTIALS | {"AWS_ENDPOINT_URL": f"http://{self._address}"}

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        refusal = self.intercept(environ["REQUEST_METHOD"], environ["PATH_INFO"])
        if "HTTP_AUTHORIZATION" not in environ:
            refusal = "403 Forbidden"  # moto takes unsigned requests, S3 does not
        if refusal:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response(refusal, [("Content-Length", "0")])
            return []
        return self._app(environ, start_response)

    def client(self) -> pyarrow.fs.S3FileSystem:
        """A client that may create buckets too."""
        return pyarrow.fs.S3FileSystem(
            access_key=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            secret_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
            region=CREDENTIALS["AWS_REGION"],
            scheme="http",
            endpoint_override=self._address,
            allow_bucket_creation=True,
        )

    def make_bucket(self, name: str) -> None:
        self.client().create_dir(name)

    def objects(self, folder: str) -> dict[str, bytes]:
        """Every object below `bucket/folder`, by its path below it."""
        client = self.client()
        found = client.get_file_info(pyarrow.fs.FileSelector(folder, recursive=True, allow_not_found=True))
        contents = {}
        for info in found:
            if info.type == pyarrow.fs.FileType.File:
                with client.open_input_stream(info.path) as stream:
                    contents[info.path.removeprefix(f"{folder}/")] = stream.read()
        return contents

    def put(self, path: str, content: bytes) -> None:
        with self.client().open_output_stream(path, compression=None) as stream:  # not packed, whatever its name
            stream.write(content)

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def running_server() -> Iterator[S3Server]:
    server = S3Server()
    try:
        yield server
    finally:
        server.stop()
