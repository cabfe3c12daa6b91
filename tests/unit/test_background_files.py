"""Small files written in order by a thread, whatever the storage does."""

import errno
import logging
import threading
from pathlib import Path

import pytest

import rayjob.training.background_files
from rayjob.training.background_files import BackgroundFiles


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rayjob.training.background_files, "_RETRY_S", 0.01)


def test_writes_are_done_in_order() -> None:
    files, done = BackgroundFiles(), list[int]()
    for i in range(100):
        files.submit(lambda i=i: done.append(i))
    files.flush()
    assert done == list(range(100))


def test_a_write_that_hangs_delays_nobody_who_submits() -> None:
    files, is_open, done = BackgroundFiles(), threading.Event(), list[int]()
    files.submit(lambda: is_open.wait(60) or None)
    for i in range(100):
        files.submit(lambda i=i: done.append(i))
    assert done == []
    is_open.set()
    files.flush()
    assert len(done) == 100


def test_a_failing_write_is_tried_until_it_succeeds_and_told_once(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    files, path, n_tries = BackgroundFiles(), tmp_path / "metrics.csv", list[int]()

    def write() -> None:
        n_tries.append(1)
        if not path.exists():
            raise OSError(errno.ENOSPC, "No space left on device")

    files.submit(write)
    with pytest.raises(OSError, match="No space left on device"):
        files.flush()
    while len(n_tries) < 3:
        threading.Event().wait(0.01)
    path.touch()
    with caplog.at_level(logging.WARNING):
        while True:
            try:
                files.flush()
            except OSError:
                continue
            break
    assert [record.getMessage() for record in caplog.records] == [
        "[Errno 28] No space left on device The rows of metrics.csv wait in memory; training goes on.",
        "the run folder can be written again.",
    ]


def test_an_error_that_no_repetition_mends_ends_it_and_is_raised_from_then_on() -> None:
    files, done = BackgroundFiles(), list[int]()

    def lost() -> None:
        raise RuntimeError("another driver has the run")

    files.submit(lost)
    with pytest.raises(RuntimeError, match="another driver"):
        files.flush()
    with pytest.raises(RuntimeError, match="another driver"):
        files.submit(lambda: done.append(1))
    assert done == []
