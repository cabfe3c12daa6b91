"""Real processes: short-lived sleeps of our own."""

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import processes
from cluster.settings import MARKER, REPOSITORY

SLEEP = "import time; time.sleep(600)"


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[str]:
    """A marker of this test alone; what carries it is killed at the end."""
    yield str(tmp_path)
    for process in processes.find_ours(str(tmp_path)):
        os.kill(process.pid, signal.SIGKILL)


def start(code: str = SLEEP, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def look(pid: int) -> processes.Process:
    found = processes.look(pid)
    assert found is not None
    return found


def test_marked_process_and_its_unmarked_children_are_ours(marker: str) -> None:
    spawn = (
        f"import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', '{SLEEP}'], env={{}}, start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "child.wait()"
    )
    parent = start(spawn, **{MARKER: marker})
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert {process.pid for process in processes.find_ours(marker)} == {parent.pid, child}


def test_stranger_is_not_ours(marker: str) -> None:
    with start() as stranger:
        try:
            assert processes.find_ours(marker) == []
        finally:
            stranger.kill()


def test_caller_is_never_ours_even_if_marked(marker: str) -> None:
    code = f"from cluster import processes; print(processes.find_ours({marker!r}))"
    with start(code, **{MARKER: marker}) as caller:
        assert caller.communicate()[0].strip() == "[]"


def test_recorded_process_is_ours_without_a_marker(marker: str) -> None:
    with start() as process:
        try:
            assert [one.pid for one in processes.find_ours(marker, [look(process.pid)])] == [process.pid]
        finally:
            process.kill()


def test_reused_process_id_is_not_the_recorded_process(marker: str) -> None:
    with start() as process:
        try:
            seen = look(process.pid)
            for other in (
                dataclasses.replace(seen, started_ticks=seen.started_ticks - 1),
                dataclasses.replace(seen, boot="an earlier boot"),
            ):
                assert not processes.is_alive(other)
                assert processes.find_ours(marker, [other]) == []
                processes.send([other], signal.SIGKILL)
            assert process.poll() is None
        finally:
            process.kill()


def test_stubborn_process_is_killed_after_its_grace(marker: str) -> None:
    code = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); {SLEEP}"
    with start(code, **{MARKER: marker}) as process:
        assert process.stdout is not None
        process.stdout.readline()
        processes.end(processes.find_ours(marker), grace_s=0.1)
        assert process.wait() == -signal.SIGKILL


def test_zombie_counts_as_gone() -> None:
    process = start("pass")
    seen = processes.look(process.pid)
    # Waits for its end without reaping it.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert processes.look(process.pid) is None
    assert seen is None or not processes.is_alive(seen)
    process.communicate()


def test_record_round_trips(tmp_path: Path) -> None:
    myself = look(os.getpid())
    path = tmp_path / "head.json"
    processes.save_record(path, [myself], ports={"RAY_PORT": 1})
    assert processes.load_record(path) == ([myself], {"ports": {"RAY_PORT": 1}})


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"processes": [{"pid": 1}]}', '{"processes": 3}'])
def test_damaged_record_is_no_record(tmp_path: Path, text: str) -> None:
    path = tmp_path / "head.json"
    path.write_text(text)
    assert processes.load_record(path) == ([], {})
