import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import locks
from cluster.settings import REPOSITORY

HOLD = """
import sys
from pathlib import Path
from cluster import locks
with locks.hold(Path(sys.argv[1]), wait=True, purpose="the other"):
    print("held", flush=True)
    sys.stdin.read()
"""


def start_holder(path: Path) -> subprocess.Popen[str]:
    """Returns another process that holds the lock until its input is closed."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def test_second_holder_is_refused_and_the_first_one_named(tmp_path: Path) -> None:
    holder = start_holder(tmp_path / "lock")
    expected = pytest.raises(locks.BusyError, match=f"run_all is at work already, as process {holder.pid}")
    with expected, locks.hold(tmp_path / "lock", wait=False, purpose="run_all"):
        pass
    holder.communicate()


def test_lock_of_a_killed_holder_is_free(tmp_path: Path) -> None:
    holder = start_holder(tmp_path / "lock")
    holder.kill()
    holder.communicate()
    with locks.hold(tmp_path / "lock", wait=False, purpose="run_all"):
        assert (tmp_path / "lock").read_text() == str(os.getpid())


def test_waiting_ends_when_the_holder_does(tmp_path: Path) -> None:
    holder = start_holder(tmp_path / "lock")
    waiter = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "lock")],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert waiter.stdout is not None
    assert waiter.stdout.readline() == f"Waiting for process {holder.pid} (the other).\n"
    holder.communicate()
    assert waiter.communicate()[0] == "held\n"


def test_lock_is_free_again_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), locks.hold(tmp_path / "lock", wait=False, purpose="a"):
        1 / 0  # noqa: B018
    with locks.hold(tmp_path / "lock", wait=False, purpose="b"):
        pass


def test_holder_is_known_while_it_holds_and_an_id_left_behind_is_nobody(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder = start_holder(path)
    assert locks.holder_of(path) == holder.pid
    other = start_holder(tmp_path / "other")
    path.write_text(str(other.pid))  # what a holder before it may have left
    assert locks.holder_of(path) is None
    for process in (holder, other):
        process.communicate()
    assert locks.holder_of(path) is None
