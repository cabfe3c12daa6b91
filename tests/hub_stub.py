"""A Hugging Face hub on a loopback port: listing, metadata and files of data sets, as the real client asks for them.

It can be busy, cut a file off in mid-stream, or send other bytes than it announced.
"""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """The stub's contents and what was asked of it.

    Attributes:
        files: (repository, revision) -> {file name: content}.
        busy: how many of the next requests are answered 429. cut_after: bytes after which the next answer that holds
            a file ends, once; None for never. sent: file name -> content sent in place of the announced one.
        odd: (repository, revision) -> status and body of the answer to every question about it, files included.
        requests: how often each "METHOD path" was asked. ranges: Range headers, in order.
    """

    files: dict[tuple[str, str], dict[str, bytes]]
    busy: int = 0
    cut_after: int | None = None
    sent: dict[str, bytes] = field(default_factory=dict)
    odd: dict[tuple[str, str], tuple[int, bytes]] = field(default_factory=dict)
    requests: Counter[str] = field(default_factory=Counter)
    ranges: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take_cut(self) -> int | None:
        """`cut_after` for one answer: the client asks for several files at the same time."""
        with self.lock:
            cut, self.cut_after = self.cut_after, None
        return cut

    def find(self, repo: str, revision: str) -> dict[str, bytes] | None:
        """Files of a revision; every revision of a repository has the same commit here."""
        if revision == COMMIT:
            return next((files for (name, _), files in self.files.items() if name == repo), None)
        return self.files.get((repo, revision))


@contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    """Serves the hub while the block runs."""

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests[f"{self.command} {path}"] += 1
        if token := self.headers.get("Authorization"):
            self.hub.tokens.add(token)
        if self.hub.busy:
            self.hub.busy -= 1
            self._send(429, b"{}", {"Retry-After": "1"})
            return
        kind, *rest = path.strip("/").split("/")
        if kind == "datasets":
            self._answer_file(rest, with_body)
        elif rest[:1] == ["datasets"]:
            self._answer_api(*rest[1:])
        else:
            self._send(404, b"{}", {})

    def _answer_api(self, owner: str, name: str, what: str, *revision: str) -> None:
        if odd := self.hub.odd.get((f"{owner}/{name}", "/".join(revision))):
            self._send(*odd, {})
            return
        files = self.hub.find(f"{owner}/{name}", "/".join(revision))
        if files is None:
            is_known = any(repo == f"{owner}/{name}" for repo, _ in self.hub.files)
            code = "RevisionNotFound" if is_known else "RepoNotFound"
            self._send(404, b"{}", {"X-Error-Code": code, "X-Error-Message": f"{code}: {owner}/{name}"})
        elif what == "tree":
            self._send_json([{"type": "file", "path": path, **_facts(content)} for path, content in files.items()])
        else:
            siblings = [{"rfilename": path, **_facts(content)} for path, content in files.items()]
            self._send_json({"id": f"{owner}/{name}", "sha": COMMIT, "siblings": siblings})

    def _answer_file(self, parts: list[str], with_body: bool) -> None:
        owner, name, _, commit, *path = parts
        if odd := self.hub.odd.get((f"{owner}/{name}", commit)):
            self._send(*odd, {})
            return
        files = self.hub.find(f"{owner}/{name}", commit) or {}
        announced = files["/".join(path)]
        content = self.hub.sent.get("/".join(path), announced)
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(announced).hexdigest()}"'}
        status, start = 200, 0
        if with_body and (wanted := self.headers.get("Range")):
            self.hub.ranges.append(wanted)
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            status = 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._send(status, content[start:], headers, with_body)

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool = True) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            cut = self.hub.take_cut() if "Content-Range" in headers or "ETag" in headers else None
            self.wfile.write(body[:cut])
            if cut is not None:
                self.close_connection = True


def _facts(content: bytes) -> dict[str, object]:
    digest = hashlib.sha256(content).hexdigest()
    lfs = {"oid": digest, "sha256": digest, "size": len(content), "pointerSize": 130}
    return {"size": len(content), "oid": "0" * 40, "blobId": "0" * 40, "lfs": lfs}
