"""Preemption notices from stand-ins of the metadata servers on loopback; Ray's command is only looked at."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from cluster import processes, spot
from cluster.settings import read_settings

NOW = datetime(2030, 1, 2, 3, 4, 0, tzinfo=UTC)
ACTION = {"action": "terminate", "time": "2030-01-02T03:06:00Z"}
NOBODY = "127.0.0.1:9"  # the discard port, on which nothing listens


class MetadataServer:
    """Answers each path with the next of its (status, text), its last one for ever; notes what it was asked."""

    def __init__(self) -> None:
        self.answers: dict[str, list[tuple[int, str]]] = {}
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        self.is_asked = threading.Event()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                stub.asked.append((self.command, self.path, {k.lower(): v for k, v in self.headers.items()}))
                stub.is_asked.set()
                answers = stub.answers.get(self.path, [(404, "")])
                status, text = answers.pop(0) if len(answers) > 1 else answers[0]
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            do_GET = do_PUT = answer

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self.server.server_port}"
        self.url = f"http://{self.host}"


AWS_TOKEN, AWS_ACTION = "/latest/api/token", "/latest/meta-data/spot/instance-action"
GOOGLE = "/computeMetadata/v1/instance/preempted"
GOOGLE_WAIT = f"{GOOGLE}?wait_for_change=true&timeout_sec=30"


@pytest.fixture
def metadata() -> Iterator[MetadataServer]:
    stub = MetadataServer()
    thread = threading.Thread(target=stub.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield stub
    stub.server.shutdown()
    stub.server.server_close()
    thread.join()


def test_aws_notice_is_asked_for_with_a_token_and_tells_the_time_left(metadata: MetadataServer) -> None:
    metadata.answers = {AWS_TOKEN: [(200, "secret")], AWS_ACTION: [(200, json.dumps(ACTION))]}
    notice = spot.aws_notice(metadata.url, lambda: NOW)
    assert notice == spot.Notice("AWS (terminate at 2030-01-02T03:06:00Z)", 120)
    (put, path, headers), (get, _, authorised) = metadata.asked
    assert (put, path, headers["x-aws-ec2-metadata-token-ttl-seconds"]) == ("PUT", AWS_TOKEN, "60")
    assert (get, authorised["x-aws-ec2-metadata-token"]) == ("GET", "secret")


def test_aws_time_without_a_zone_is_utc(metadata: MetadataServer) -> None:
    action = ACTION | {"time": "2030-01-02T03:06:00"}
    metadata.answers = {AWS_TOKEN: [(200, "secret")], AWS_ACTION: [(200, json.dumps(action))]}
    notice = spot.aws_notice(metadata.url, lambda: NOW)
    assert notice is not None
    assert notice.grace_s == 120


@pytest.mark.parametrize("ask", [spot.aws_notice, spot.google_notice])
def test_server_of_another_protocol_is_an_error_that_the_watch_outlives(
    ask: Callable[[str], spot.Notice | None],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(OSError, match="does not answer as a web server does"):
            ask(f"http://127.0.0.1:{server.getsockname()[1]}")
        thread.join()


def test_aws_has_no_notice_while_it_answers_404(metadata: MetadataServer) -> None:
    metadata.answers = {AWS_TOKEN: [(200, "secret")]}
    assert spot.aws_notice(metadata.url) is None


@pytest.mark.parametrize("text", ["", "<html>", "[]", "{}", '{"time": "soon"}'])
def test_aws_server_that_is_none_is_not_believed(metadata: MetadataServer, text: str) -> None:
    metadata.answers = {AWS_TOKEN: [(200, "secret")], AWS_ACTION: [(200, text)]}
    with pytest.raises(ValueError):  # noqa: PT011 - of the parsers of JSON, of dates, and ours
        spot.aws_notice(metadata.url)


@pytest.mark.parametrize(
    ("answers", "is_noticed"),
    [
        ({GOOGLE: [(200, "TRUE")]}, True),
        ({GOOGLE: [(200, "FALSE")], GOOGLE_WAIT: [(200, "TRUE")]}, True),
        ({GOOGLE: [(200, "FALSE")], GOOGLE_WAIT: [(200, "FALSE")]}, False),
    ],
)
def test_google_is_asked_at_once_and_then_for_a_change(
    metadata: MetadataServer, answers: dict[str, list[tuple[int, str]]], is_noticed: bool
) -> None:
    metadata.answers = answers
    notice = spot.google_notice(metadata.url)
    assert notice == (spot.Notice("Google Cloud", 30) if is_noticed else None)
    assert [path for _, path, _ in metadata.asked] == list(answers)
    assert all(headers["metadata-flavor"] == "Google" for _, _, headers in metadata.asked)


@pytest.mark.parametrize("ask", [spot.aws_notice, spot.google_notice])
def test_no_server_is_an_error_of_the_system_whatever_proxy_is_set(
    ask: Callable[[str], spot.Notice | None], metadata: MetadataServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", metadata.url)
    with pytest.raises(OSError, match="refused"):
        ask(f"http://{NOBODY}")
    assert metadata.asked == []


class Pauses(threading.Event):
    """Notes the pauses in place of waiting, and sets itself after the last of a few."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count, self.pauses_s = count, list[float | None]()

    def wait(self, timeout: float | None = None) -> bool:
        self.pauses_s.append(timeout)
        if len(self.pauses_s) == self.count:
            self.set()
        return self.is_set()


def asking(*answers: spot.Notice | Exception | None) -> Callable[[], spot.Notice | None]:
    left = iter(answers)

    def ask() -> spot.Notice | None:
        answer = next(left)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return ask


def test_watch_asks_seldom_where_there_is_no_server_and_often_once_there_was_one(
    capfd: pytest.CaptureFixture[str],
) -> None:
    notices: SimpleQueue[spot.Notice] = SimpleQueue()
    pauses = Pauses(5)
    faults = OSError("refused"), ValueError("html"), RecursionError("nested JSON")
    spot.watch(asking(*faults, None, OSError("missed")), notices.put, pauses)
    seldom, often = spot.UNREACHABLE_POLL_S, spot.POLL_S
    assert pauses.pauses_s == [seldom, seldom, seldom, often, often]
    assert notices.empty()
    assert capfd.readouterr() == ("", "")


def test_watch_ends_with_the_first_notice() -> None:
    notices: SimpleQueue[spot.Notice] = SimpleQueue()
    notice = spot.Notice("AWS", 120)
    spot.watch(asking(None, notice), notices.put, Pauses(9))
    assert notices.get_nowait() == notice


@pytest.mark.parametrize("seconds", ["inf", "nan", "0", "-1", "soon"])
def test_time_that_is_none_is_refused_at_once(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        spot.main(["--grace-s", seconds])
    assert ended.value.code == 2
    assert f"expected seconds above 0, got {seconds!r}" in capsys.readouterr().err


def test_addresses_of_the_metadata_servers_can_be_set() -> None:
    assert spot.metadata_servers({}) == ("http://169.254.169.254", "http://metadata.google.internal")
    variables = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://h:1/", "GCE_METADATA_HOST": "h:2"}
    assert spot.metadata_servers(variables) == ("http://h:1", "http://h:2")


RAYLET = "/x/raylet/raylet --node_id={} --python_worker_command=python w.py --gcs-address={} --session-name=s"


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[str, dict[str, str]]]:
    """Processes by id, as (command, environment)."""
    found: dict[int, tuple[str, dict[str, str]]] = {}

    def all_processes() -> dict[int, processes.Process]:
        return {pid: processes.Process(pid, 1, "boot", 1, 1, command) for pid, (command, _) in found.items()}

    monkeypatch.setattr(processes, "all_processes", all_processes)
    monkeypatch.setattr(processes, "environment_of", lambda pid: found[pid][1])
    return found


def test_node_is_read_from_its_raylet(running: dict[int, tuple[str, dict[str, str]]], tmp_path: Path) -> None:
    running[1] = (RAYLET.format("0a1b", "10.0.0.5:6379"), {"RAY_AUTH_MODE": "token", "HOME": "/h"})
    running[2] = ("grep raylet/raylet --node_id=ff --gcs-address=h:1", {})
    settings = read_settings({"RAYJOB_STATE": str(tmp_path)})
    assert spot.find_node(settings) == spot.Node("0a1b", "10.0.0.5:6379", (("RAY_AUTH_MODE", "token"),))


def test_node_of_this_folder_is_preferred(running: dict[int, tuple[str, dict[str, str]]], tmp_path: Path) -> None:
    settings = read_settings({"RAYJOB_STATE": str(tmp_path)})
    running[1] = (RAYLET.format("aa", "h:1"), {})
    running[2] = (RAYLET.format("bb", "h:2"), {processes.MARKER: settings.marker("head")})
    assert spot.find_node(settings).node_id == "bb"


@pytest.mark.parametrize(("node_ids", "found"), [([], "none"), (["aa", "bb"], "aa, bb")])
def test_no_node_or_several_are_refused(
    running: dict[int, tuple[str, dict[str, str]]], node_ids: list[str], found: str, tmp_path: Path
) -> None:
    running.update({pid: (RAYLET.format(node_id, "h:1"), {}) for pid, node_id in enumerate(node_ids)})
    with pytest.raises(spot.SpotError, match=f"found {found}: start one"):
        spot.find_node(read_settings({"RAYJOB_STATE": str(tmp_path)}))


@pytest.mark.parametrize(("grace_s", "deadline"), [(119.9, "119"), (0.2, "1"), (-5, "1")])
def test_drain_names_the_preemption_and_the_seconds_left(
    grace_s: float, deadline: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def run(command: list[str], **options: Any) -> Any:
        calls.append((command, options))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(spot.subprocess, "run", run)
    spot.drain(spot.Node("0a1b", "h:1", (("RAY_AUTH_MODE", "token"),)), spot.Notice("SIGTERM", grace_s))
    ((command, options),) = calls
    assert command[3:] == [
        *("drain-node", "--address", "h:1", "--node-id", "0a1b", "--reason", "DRAIN_NODE_REASON_PREEMPTION"),
        *("--reason-message", "preemption notice from SIGTERM", "--deadline-remaining-seconds", deadline),
    ]
    assert options["env"]["RAY_AUTH_MODE"] == "token"
    assert options["timeout"] == spot.DRAIN_TIMEOUT_S


def test_refused_drain_tells_why(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = SimpleNamespace(returncode=1, stderr="not accepted: unknown node\n", stdout="")
    monkeypatch.setattr(spot.subprocess, "run", lambda *_, **__: answer)
    with pytest.raises(spot.SpotError, match="not drained: not accepted: unknown node$"):
        spot.drain(spot.Node("0a1b", "h:1"), spot.Notice("SIGTERM", 4))


def test_head_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, 30)

    monkeypatch.setattr(spot.subprocess, "run", run)
    with pytest.raises(spot.SpotError, match="h:1 did not answer within 30 s"):
        spot.drain(spot.Node("0a1b", "h:1"), spot.Notice("SIGTERM", 4))


WAIT = """
import os
from cluster import spot
print("waiting", flush=True)
print(spot.await_notice(os.environ, 7))
"""


def waiting(aws: str, google: str) -> subprocess.Popen[str]:
    """Starts a process that waits for a notice, since only a main thread takes signals."""
    variables = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{aws}", "GCE_METADATA_HOST": google}
    return subprocess.Popen([sys.executable, "-c", WAIT], env=os.environ | variables, stdout=subprocess.PIPE, text=True)


def test_notice_of_a_cloud_ends_the_wait(metadata: MetadataServer) -> None:
    metadata.answers = {GOOGLE: [(200, "FALSE")], GOOGLE_WAIT: [(200, "TRUE")]}
    output, _ = waiting(NOBODY, metadata.host).communicate(timeout=30)
    assert output == "waiting\nNotice(source='Google Cloud', grace_s=30.0)\n"


def test_sigterm_ends_the_wait_where_there_is_no_cloud(metadata: MetadataServer) -> None:
    metadata.answers = {AWS_TOKEN: [(200, "secret")]}  # its first call says that the handler stands
    process = waiting(metadata.host, NOBODY)
    assert metadata.is_asked.wait(30)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert output == "waiting\nNotice(source='SIGTERM', grace_s=7)\n"
