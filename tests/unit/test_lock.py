import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayjob.lock import LockedError, WaitCancelled, exclusive, exclusive_after_wait

HOLD = """
import sys
from pathlib import Path
from rayjob.lock import exclusive
with exclusive(Path(sys.argv[1]) / "prepare.lock", "it"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of `tmp_path` until its input is closed."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_second_prepare_waits_names_the_holder_and_can_be_stopped(
    tmp_path: Path, holder: subprocess.Popen[str], caplog: pytest.LogCaptureFixture
) -> None:
    answers = iter([False, True])
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(WaitCancelled),
        exclusive_after_wait(tmp_path / "prepare.lock", "it", lambda: next(answers)),
    ):
        pytest.fail("the lock is held by another process")
    assert f"process {holder.pid} on " in caplog.text
    assert len(caplog.records) == 1


def test_second_prepare_goes_on_when_the_first_ends(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    def is_cancelled() -> bool:
        assert holder.stdin is not None
        holder.stdin.close()
        return False

    with exclusive_after_wait(tmp_path / "prepare.lock", "it", is_cancelled):
        assert str(os.getpid()) in (tmp_path / "prepare.lock").read_text()


def test_lock_of_a_killed_holder_is_free(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with exclusive_after_wait(tmp_path / "prepare.lock", "it", lambda: pytest.fail("nobody holds the lock")):
        pass


def test_lock_is_free_again_after_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="inside"),
        exclusive_after_wait(tmp_path / "prepare.lock", "it", lambda: False),
    ):
        raise ValueError("inside")
    with exclusive_after_wait(tmp_path / "prepare.lock", "it", lambda: pytest.fail("nobody holds the lock")):
        pass


def test_exclusive_lock_refuses_at_once_and_names_the_holder(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    refused = pytest.raises(LockedError, match=f"run x is in use by process {holder.pid} on ")
    with refused, exclusive(tmp_path / "prepare.lock", "run x"):
        pytest.fail("the lock is held by another process")
