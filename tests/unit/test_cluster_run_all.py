"""How the one command takes SIGTERM and the notices of clouds: in a process of its own, for signals are real here."""

import os
import signal
import subprocess
import sys

from cluster.settings import REPOSITORY
from tests.unit.test_cluster_spot import GOOGLE, NOBODY, MetadataServer, metadata

__all__ = ["metadata"]  # a fixture

COMMAND = """
import signal, sys, threading, time
from cluster import run_all
run_all.prepare_process()
try:
    if "watch" in sys.argv:
        run_all.watch_for_preemption()
    print("up", flush=True)
    signal.pause()
except KeyboardInterrupt:
    print("saving", flush=True)
    for line in sys.stdin:  # until it is closed
        pass
    print("saved", flush=True)
    sys.exit(3)
"""


def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    clouds = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{NOBODY}", "GCE_METADATA_HOST": NOBODY}
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments],
        env=os.environ | clouds | {"PYTHONPATH": str(REPOSITORY)} | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_sigterm_is_heard_once_and_more_of_them_do_not_cut_the_saving_short() -> None:
    with start() as command:
        assert command.stdout is not None
        assert command.stdout.readline() == "up\n"
        command.send_signal(signal.SIGTERM)
        assert command.stdout.readline() == "saving\n"
        for _ in range(3):
            command.send_signal(signal.SIGTERM)
        assert command.communicate()[0] == "saved\n"
    assert command.returncode == 3


def test_notice_of_a_cloud_acts_like_sigterm(metadata: MetadataServer) -> None:
    metadata.answers = {GOOGLE: [(200, "TRUE")]}
    with start("watch", GCE_METADATA_HOST=metadata.host) as command:
        output, _ = command.communicate(timeout=60)
    assert command.returncode == 3
    assert "Preemption notice from Google Cloud: 30 s left." in output
    assert output.endswith("saving\nsaved\n")
