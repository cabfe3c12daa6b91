"""How the one command takes SIGTERM and the notices of clouds: in a process of its own, for signals are real here."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from cluster.settings import REPOSITORY
from cluster.shell_parent import is_command_shell
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


def start(*arguments: str, shell: str = "", **variables: str) -> subprocess.Popen[str]:
    """Starts the command, through a shell line if one is given, in which it is `$@`."""
    line = [sys.executable, "-c", COMMAND, *arguments]
    clouds = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{NOBODY}", "GCE_METADATA_HOST": NOBODY}
    return subprocess.Popen(
        ["sh", "-c", shell, "sh", *line] if shell else line,
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


def test_sigterm_that_only_the_shell_around_it_gets_is_heard() -> None:
    with start(shell='"$@"; true') as shell:
        assert shell.stdout is not None
        assert shell.stdout.readline() == "up\n"
        shell.send_signal(signal.SIGTERM)
        assert shell.communicate()[0] == "saving\nsaved\n"
    assert shell.returncode == -signal.SIGTERM


def test_command_that_was_made_to_outlive_its_shell_does() -> None:
    with start(shell='nohup "$@" 2>/dev/null & echo $!; wait') as shell:
        assert shell.stdout is not None
        command = int(shell.stdout.readline())
        assert shell.stdout.readline() == "up\n"
        shell.send_signal(signal.SIGTERM)
        shell.wait()
        os.kill(command, 0)  # it is still there
        os.kill(command, signal.SIGTERM)
        assert shell.communicate()[0] == "saving\nsaved\n"


@pytest.fixture(autouse=True)
def _hangups_are_heard() -> Iterator[None]:
    """The suite itself may have been started by nohup, which its children would inherit, and understand."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("command", "is_one"),
    [
        (["sh", "-c", "bash run_all.sh"], True),
        (["/bin/bash", "-lc", "cd /x && bash run_all.sh"], True),
        (["-bash"], False),
        (["bash", "--login"], False),
        (["/bin/bash", "script.sh", "-c"], False),
        (["python", "-c", "x"], False),
        ([], False),
    ],
)
def test_shell_of_one_command_is_told_from_one_that_a_person_uses(command: list[str], is_one: bool) -> None:
    assert is_command_shell(command) == is_one


def test_notice_of_a_cloud_acts_like_sigterm(metadata: MetadataServer) -> None:
    metadata.answers = {GOOGLE: [(200, "TRUE")]}
    with start("watch", GCE_METADATA_HOST=metadata.host) as command:
        output, _ = command.communicate(timeout=60)
    assert command.returncode == 3
    assert "Preemption notice from Google Cloud: 30 s left." in output
    assert output.endswith("saving\nsaved\n")
