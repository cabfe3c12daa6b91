"""A worker node as a child process; Ray itself is replaced by a small script, the signals and notices are real."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import spot, worker
from cluster.settings import REPOSITORY, Settings, read_settings
from tests.unit.test_cluster_spot import GOOGLE, NOBODY, MetadataServer, metadata

__all__ = ["metadata"]  # a fixture

NODE = """
import os, signal, sys
# Not print(), in which the signal may find the process.
signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"drained\\n"), sys.exit(7)))
print("up", flush=True)
signal.pause()
"""
PARENT = f"""
import os, sys
from cluster import worker
from cluster.settings import read_settings
sys.exit(worker.run_node(read_settings(os.environ), [sys.executable, "-c", {NODE!r}], os.environ))
"""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return read_settings({"RAYJOB_STATE": str(tmp_path)})


@pytest.mark.parametrize("shell", ["", 'exec "$@"', '"$@"; exit $?'])
def test_sigterm_reaches_the_node(shell: str) -> None:
    command = [sys.executable, "-c", PARENT]
    launch = ["sh", "-c", shell, "sh", *command] if shell else command
    clouds = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{NOBODY}", "GCE_METADATA_HOST": NOBODY}
    environment = os.environ | clouds | {"PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(launch, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == "drained\n"
    assert process.returncode == (-signal.SIGTERM if "exit" in shell else 7), "a shell dies of it, and tells no code"


def test_notice_of_a_cloud_drains_the_node(
    settings: Settings, metadata: MetadataServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    metadata.answers = {GOOGLE: [(200, "TRUE")]}
    end, drained = tmp_path / "end", []

    def drain(node: spot.Node, notice: spot.Notice) -> None:
        drained.append((node.node_id, notice.source))
        end.touch()

    monkeypatch.setattr(spot, "find_node", lambda _: spot.Node("0a1b", "h:1"))
    monkeypatch.setattr(spot, "drain", drain)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    variables = os.environ | {
        "GCE_METADATA_HOST": metadata.host,
        "AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{NOBODY}",
    }
    try:
        command = ["sh", "-c", 'while [ ! -e "$0" ]; do sleep 0.02; done; exit 5', str(end)]
        assert worker.run_node(settings, command, variables) == 5
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert drained == [("0a1b", "Google Cloud")]


def test_drain_that_fails_is_told_and_ends_nothing(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(_: Settings) -> spot.Node:
        raise spot.SpotError("expected one Ray node on this machine, found none")

    monkeypatch.setattr(spot, "find_node", none)
    worker.drain(settings, spot.Notice("AWS", 119.0))
    assert "error: expected one Ray node on this machine, found none" in capsys.readouterr().err
