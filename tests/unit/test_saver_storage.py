"""Storage that is full, read-only, limited or hangs, for real: training goes on and the next save succeeds."""

import logging
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

import rayjob.training.background_files
import rayjob.training.saver
from model.checkpoint import list_checkpoints, step_of
from rayjob.training.background_files import BackgroundFiles
from rayjob.training.metrics import MetricsRow, MetricsWriter, read_metrics
from rayjob.training.recovery import find_sound_checkpoint
from tests.mounts import fill, frozen, mounted_image, mounted_memory, set_read_only
from tests.saved_run import SavedRun

pytestmark = pytest.mark.usefixtures("one_worker")
WAIT_S = 60.0  # for events that come within a second


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rayjob.training.saver, "_RETRY_S", 0.0)
    monkeypatch.setattr(rayjob.training.background_files, "_RETRY_S", 0.01)


class Training:
    """A worker that writes its rows and saves as rank 0 does."""

    def __init__(self, folder: Path, tokenizer_folder: Path) -> None:
        self._files = BackgroundFiles()
        self.run = SavedRun(folder, tokenizer_folder, flush=self.flush)
        self._metrics = MetricsWriter(folder, 0)

    def step(self) -> None:
        loss = self.run.step()
        row = MetricsRow(self.run.state.step, 0, 8, loss, 1.0, 1e-3, 1.0, None, 0.0, None, None, None, 0.0, 1.0, 1.0)
        self._files.submit(partial(self._metrics.write, row))

    def flush(self) -> None:
        self._files.submit(self._metrics.sync)
        self._files.flush()

    def save(self) -> None:
        """Saves in the background while steps go on."""
        assert self.run.saver.save(self.run.state)
        deadline = time.monotonic() + WAIT_S
        while not self.run.saver.has_ended:
            self.step()
            assert time.monotonic() < deadline
        self.run.saver.take_up()

    def assert_whole(self, *saved: int) -> None:
        self.flush()
        folder = self.run.folder
        assert [row.step for row in read_metrics(folder)] == list(range(1, self.run.state.step + 1))
        assert [step_of(found) for found in list_checkpoints(folder)] == list(saved)
        assert find_sound_checkpoint(folder) == list_checkpoints(folder)[-1]
        assert list(folder.glob("*.tmp")) == []


def train_through(
    folder: Path, tokenizer_folder: Path, outage: Callable[[], Iterator[None]], caplog: pytest.LogCaptureFixture
) -> None:
    """Saves before, during and after an outage."""
    training = Training(folder, tokenizer_folder)
    training.step()
    training.save()
    before = training.run.state.step
    with contextmanager(outage)():
        training.step()
        training.save()
        assert training.run.state.step > before + 1, "steps went on while the save failed"
    training.step()
    last = training.run.state.step
    with caplog.at_level(logging.ERROR):
        training.save()
    training.assert_whole(1, last)


def test_full_disk(tmp_path: Path, small_tokenizer: Path, caplog: pytest.LogCaptureFixture) -> None:
    with mounted_memory(tmp_path / "disk", "4m") as disk:

        def outage() -> Iterator[None]:
            filler = fill(disk)
            yield
            filler.unlink()

        train_through(disk / "tiny", small_tokenizer, outage, caplog)
        assert "could not be saved: rank 0: [Errno 28] No space left on device" in caplog.text
        assert "failed save 1 of at most 3" in caplog.text


def test_read_only_storage(tmp_path: Path, small_tokenizer: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without metrics.csv: the kernel makes nothing read-only in which a file is open for writing."""
    with mounted_memory(tmp_path / "disk", "4m") as disk:
        run = SavedRun(disk / "tiny", small_tokenizer)
        run.train([None])
        set_read_only(disk, True)
        run.step()
        assert run.saver.save(run.state)
        run.saver.finish()
        assert "could not be saved: rank 0: [Errno 30] Read-only file system" in caplog.text
        set_read_only(disk, False)
        run.train([None])
        assert [step_of(found) for found in list_checkpoints(run.folder)] == [1, 3]


def test_file_size_limit(tmp_path: Path, small_tokenizer: Path, caplog: pytest.LogCaptureFixture) -> None:
    def outage() -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    train_through(tmp_path / "tiny", small_tokenizer, outage, caplog)
    assert "could not be saved: rank 0: [Errno 27] File too large" in caplog.text


def test_hanging_storage_delays_no_step(
    tmp_path: Path, small_tokenizer: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rayjob.training.saver, "_SLOW_S", 0.2)
    with mounted_image(tmp_path / "disk", 32 << 20) as disk:
        training = Training(disk / "tiny", small_tokenizer)
        training.step()
        training.save()
        with frozen(disk):
            training.step()
            saved = training.run.state.step
            assert training.run.saver.save(training.run.state)
            durations_s = []
            deadline = time.monotonic() + WAIT_S
            while "the storage is slow or hangs" not in caplog.text or len(durations_s) < 200:
                began_s = time.monotonic()
                training.step()
                assert not training.run.saver.has_ended, "nothing can be written"
                durations_s.append(time.monotonic() - began_s)
                assert time.monotonic() < deadline
        assert max(durations_s) < 5.0, "steps of a millisecond, on a machine that may be busy"
        training.run.saver.finish()
        training.assert_whole(1, saved)
