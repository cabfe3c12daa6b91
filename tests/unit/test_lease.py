"""Leases between real processes. A file system without locks is one whose flock fails as theirs does."""

import dataclasses
import errno
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from rayjob import lease
from rayjob.lease import Fence, Holder, LeaseLostError, hold_run, reserve
from rayjob.lock import LockedError

# Holds the run and writes a line at each turn, as a worker does: never without asking the fence.
HOLD = """
import errno, fcntl, sys, time
from pathlib import Path
if sys.argv[2] == "no flock":
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")
    fcntl.flock = refuse
from rayjob import lease
lease.BEAT_S = 0.05
with lease.hold_run(Path(sys.argv[1]), "run x") as fence:
    print("held", flush=True)
    while True:
        fence.check()
        with (Path(sys.argv[1]) / "written").open("a") as file:
            file.write("row\\n")
        time.sleep(0.01)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts another process that holds the run `tmp_path`."""
    processes: list[subprocess.Popen[str]] = []

    def hold(flock: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        command = [sys.executable, "-c", HOLD, str(tmp_path), flock]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    yield hold
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def _no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(lease, "_POLL_S", 0.01)


def newest(run_folder: Path) -> Path:
    return max((run_folder / "lease").iterdir())


def leave_behind(run_folder: Path, **changes: object) -> Path:
    """Writes the lease of a holder on a machine that nothing is known of; returns its file."""
    path = run_folder / "lease" / "00000004.json"
    path.parent.mkdir()
    holder = dataclasses.replace(Holder(7, "1", "another boot", "pod-a"), **changes)  # type: ignore[arg-type]
    path.write_text(json.dumps(dataclasses.asdict(holder) | {"state": "beat 3"}))
    return path


def test_second_driver_is_refused_at_once_by_the_kernel_s_lock(
    tmp_path: Path, start: Callable[[str], subprocess.Popen[str]]
) -> None:
    holder = start("flock")
    holder.send_signal(signal.SIGSTOP)  # stopped, but not dead: it may go on at any time
    with pytest.raises(LockedError, match=f"run x is in use by process {holder.pid} on "), hold_run(tmp_path, "run x"):
        pytest.fail("the run is held by another process")


def test_driver_is_refused_before_another_has_more_than_begun(tmp_path: Path) -> None:
    with (
        reserve(tmp_path, "run x"),
        pytest.raises(LockedError, match=f"run x is in use by process {os.getpid()} on "),
        reserve(tmp_path, "run x"),
    ):
        pytest.fail("another has begun")
    with reserve(tmp_path, "run x"), hold_run(tmp_path, "run x") as fence:
        assert fence.attempt == 1


@pytest.mark.usefixtures("_no_flock")
def test_second_driver_is_refused_without_locks_once_the_first_gave_a_sign_of_life(
    tmp_path: Path, start: Callable[[str], subprocess.Popen[str]]
) -> None:
    holder = start("no flock")
    begun_at_s = time.monotonic()
    with pytest.raises(LockedError, match=f"run x is in use by process {holder.pid} on "), hold_run(tmp_path, "run x"):
        pytest.fail("the run is held by another process")
    assert time.monotonic() - begun_at_s < lease.SILENT_S, "it need not wait until the end"
    assert holder.poll() is None


@pytest.mark.parametrize("flock", ["flock", "no flock"])
def test_killed_driver_is_passed_over_at_once(
    tmp_path: Path, start: Callable[[str], subprocess.Popen[str]], flock: str, request: pytest.FixtureRequest
) -> None:
    if flock == "no flock":
        request.getfixturevalue("_no_flock")
    holder = start(flock)
    holder.kill()
    holder.wait()
    begun_at_s = time.monotonic()
    with hold_run(tmp_path, "run x") as fence:
        assert fence.attempt == 2
    assert time.monotonic() - begun_at_s < lease.SILENT_S


@pytest.mark.usefixtures("_no_flock")
def test_stopped_driver_that_was_passed_over_writes_no_more_and_ends_when_it_goes_on(
    tmp_path: Path, start: Callable[[str], subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "SILENT_S", 1.0)  # twenty of its beats
    zombie = start("no flock")
    while not (tmp_path / "written").exists():
        assert zombie.poll() is None
    zombie.send_signal(signal.SIGSTOP)
    with hold_run(tmp_path, "run x") as fence:
        written = (tmp_path / "written").stat().st_size
        zombie.send_signal(signal.SIGCONT)
        assert zombie.wait(timeout=60) == 1
        # It may have stood between its question and its write; the next row asks again.
        assert (tmp_path / "written").stat().st_size <= written + len("row\n")
        fence.check()
    assert zombie.stderr is not None
    assert "attempt 1 has lost" in zombie.stderr.read()
    assert [path.name for path in (tmp_path / "lease").iterdir()] == ["00000002.json"]


@pytest.mark.usefixtures("_no_flock")
def test_driver_on_another_machine_lives_while_its_lease_changes(tmp_path: Path) -> None:
    path = leave_behind(tmp_path)
    changing = threading.Timer(0.1, lambda: path.write_text(path.read_text().replace("beat 3", "beat 4")))
    changing.start()
    with pytest.raises(LockedError, match="in use by process 7 on pod-a"), hold_run(tmp_path, "run x"):
        pytest.fail("its holder lives")
    changing.join()
    assert newest(tmp_path) == path


@pytest.mark.usefixtures("_no_flock")
@pytest.mark.parametrize("shift_s", [-3600, 0, 3600])
def test_no_clock_of_day_decides_who_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shift_s: int) -> None:
    """A clock set back or forward by an hour, here or there: nothing changes in how long silence must last."""
    monkeypatch.setattr(lease, "SILENT_S", 0.3)
    monkeypatch.setattr(lease, "time", SimpleNamespace(monotonic=time.monotonic, sleep=time.sleep))  # nothing else
    path = leave_behind(tmp_path)
    stamp = path.stat().st_mtime + shift_s
    os.utime(path, (stamp, stamp))
    begun_at_s = time.monotonic()
    with hold_run(tmp_path, "run x") as fence:
        assert time.monotonic() - begun_at_s >= 0.3
        assert fence.attempt == 5


def test_released_lease_is_free_at_once_and_attempts_count_on(tmp_path: Path) -> None:
    for attempt in (1, 2, 3):
        with hold_run(tmp_path, "run x") as fence:
            assert fence.attempt == attempt
    assert json.loads(newest(tmp_path).read_text())["state"] == "released"


@pytest.mark.usefixtures("_no_flock")
def test_of_several_drivers_at_the_same_instant_one_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "BEAT_S", 0.02)
    refused, won, over = threading.Semaphore(0), [], threading.Event()

    def drive() -> None:
        try:
            with hold_run(tmp_path, "run x", on_loss=lambda error: pytest.fail(str(error))) as fence:
                won.append(fence.attempt)
                over.wait(30)
        except LockedError:
            refused.release()

    drivers = [threading.Thread(target=drive) for _ in range(8)]
    for driver in drivers:
        driver.start()
    assert all(refused.acquire(timeout=30) for _ in range(7))
    over.set()
    for driver in drivers:
        driver.join()
    assert won == [1]


def test_fence_holds_as_long_as_its_lease(tmp_path: Path) -> None:
    fence = Fence(tmp_path / "run" / "lease" / "00000003.json")
    fence.path.parent.mkdir(parents=True)
    fence.path.touch()
    fence.check()
    fence.path.unlink()
    with pytest.raises(LeaseLostError, match=f"attempt 3 has lost {tmp_path / 'run'}: another driver took it over"):
        fence.check()


def test_storage_that_takes_no_beat_is_told_and_costs_no_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lease, "BEAT_S", 0.01)
    failed = threading.Event()

    def full(*_: object) -> None:
        failed.set()
        raise OSError(errno.ENOSPC, "No space left on device")

    with caplog.at_level(logging.WARNING), hold_run(tmp_path, "run x") as fence:
        monkeypatch.setattr(lease, "_write", full)
        assert failed.wait(30)
        fence.check()
    assert "could not be renewed: [Errno 28] No space left on device" in caplog.text
