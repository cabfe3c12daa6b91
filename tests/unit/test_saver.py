"""Saving in the background: real threads, real files, one worker; the file system is slowed at the write of a file."""

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import model.checkpoint_writer
import rayjob.training.saver
from model.checkpoint import list_checkpoints, load_model, load_trainer_tensors, step_of
from rayjob.training.attempt import begin_attempt
from rayjob.training.recovery import find_sound_checkpoint
from rayjob.training.saver import PeersLostError, SaveFailedError
from tests.saved_run import SavedRun

pytestmark = pytest.mark.usefixtures("one_worker")
WAIT_S = 60.0  # for an event that comes within milliseconds on a machine that is not busy


class Gate:
    """Holds the writes of tensor files until it is opened, or makes them fail."""

    def __init__(self) -> None:
        self.is_open, self.is_reached = threading.Event(), threading.Event()
        self.error: OSError | None = None
        self.n_writes = 0
        self.is_open.set()
        self._write: Callable[..., dict[str, Any]] = model.checkpoint_writer.write_tensors

    def write(self, *arguments: Any) -> dict[str, Any]:
        self.n_writes += 1
        self.is_reached.set()
        assert self.is_open.wait(WAIT_S)
        if self.error:
            raise self.error
        return self._write(*arguments)

    def close(self) -> None:
        self.is_open.clear()
        self.is_reached.clear()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr(model.checkpoint_writer, "write_tensors", gate.write)
    monkeypatch.setattr(rayjob.training.saver, "_RETRY_S", 0.0)
    yield gate
    gate.is_open.set()


@pytest.fixture
def run(tmp_path: Path, small_tokenizer: Path, gate: Gate) -> SavedRun:
    return SavedRun(tmp_path / "runs" / "tiny", small_tokenizer)


def steps(run: SavedRun) -> list[int]:
    return [step_of(folder) for folder in list_checkpoints(run.folder)]


def wait_for_end(run: SavedRun) -> None:
    """As rank 0 of a training does: looks at every step, and takes it up when all know."""
    running = run.saver._running
    assert running
    assert running.ended.wait(WAIT_S)
    assert run.saver.has_ended
    run.saver.take_up()


def test_what_is_saved_is_the_state_of_the_step_though_training_goes_on(run: SavedRun, gate: Gate) -> None:
    run.step()
    wanted = run.tensors()
    gate.close()
    assert run.saver.save(run.state)
    assert gate.is_reached.wait(WAIT_S)
    for _ in range(3):
        run.step()
    assert not run.saver.has_ended
    gate.is_open.set()
    wait_for_end(run)
    (folder,) = list_checkpoints(run.folder)
    found = load_model(folder).state_dict() | load_trainer_tensors(folder)
    for name in run.model.state_dict():
        for tensor in (name, f"exp_avg.{name}", f"exp_avg_sq.{name}"):
            assert found[tensor].equal(wanted[tensor]), tensor
    assert run.reported == [(folder, run.reported[0][1])]
    assert run.reported[0][1].step == 1


def test_the_writing_thread_stands_back_and_saves_where_that_is_forbidden(
    run: SavedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def forbid(_which: int, _who: int, niceness: int) -> None:
        asked.append(niceness)
        raise PermissionError

    monkeypatch.setattr(rayjob.training.saver.os, "getpriority", lambda *_: 15)  # as Ray starts its workers
    monkeypatch.setattr(rayjob.training.saver.os, "setpriority", forbid)
    run.step()
    assert run.saver.save(run.state)
    wait_for_end(run)
    assert steps(run) == [1]
    assert asked == [19]


def test_two_saves_never_overlap_and_an_unscored_one_stays_due(run: SavedRun, gate: Gate) -> None:
    run.step()
    gate.close()
    assert run.saver.save(run.state)
    run.step()
    assert not run.saver.save(run.state)
    gate.is_open.set()
    wait_for_end(run)
    assert steps(run) == [1]
    assert run.saver.save(run.state)
    run.saver.finish()
    assert steps(run) == [1, 2]


def test_a_scored_state_waits_for_the_save_before_it(run: SavedRun, gate: Gate) -> None:
    run.step()
    gate.close()
    run.saver.save(run.state)
    for val_loss, is_taken in [(3.0, True), (2.0, True), (2.5, False)]:
        run.step()
        run.validate(val_loss)
        assert run.saver.save(run.state) == is_taken
        run.state = run.state.after_step(0)
    gate.is_open.set()
    run.saver.finish()
    assert steps(run) == [1, 4], "step 2's state gave its place to the better one of step 4"
    assert [state.val_loss for _, state in run.reported] == [None, 2.0]


def test_the_last_save_waits_for_the_running_one(run: SavedRun, gate: Gate) -> None:
    run.step()
    gate.close()
    run.saver.save(run.state)
    run.step()
    threading.Timer(0.1, gate.is_open.set).start()
    run.saver.finish(run.state)
    assert steps(run) == [1, 2]
    assert not run.saver.is_saving


def test_a_write_that_fails_once_is_tried_again(
    run: SavedRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = model.checkpoint_writer.write_tensors
    failures = [OSError(5, "Input/output error")]

    def fail_once(*arguments: Any) -> dict[str, Any]:
        if failures:
            raise failures.pop()
        return write(*arguments)

    monkeypatch.setattr(model.checkpoint_writer, "write_tensors", fail_once)
    with caplog.at_level(logging.WARNING):
        run.train([None])
    assert steps(run) == [1]
    assert caplog.records == []


def test_failed_saves_are_told_with_the_cause_and_the_third_in_a_row_ends_the_run(
    run: SavedRun, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    run.train([None])
    gate.error = OSError(28, "No space left on device", "shard")
    for n_failures in (1, 2):
        run.step()
        run.saver.save(run.state)
        wait_for_end(run)
        assert "[Errno 28] No space left on device: 'shard'. Training goes on" in caplog.text
        assert f"failed save {n_failures} of at most 3" in caplog.text
    run.step()
    run.saver.save(run.state)
    with pytest.raises(SaveFailedError, match="No space left on device.*3 saves in a row failed"):
        wait_for_end(run)
    assert find_sound_checkpoint(run.folder) == run.folder / "step_00000001"
    assert list(run.folder.glob("*.tmp")) == [], "what a failed save wrote is removed, for there may be no room"


def test_a_success_forgives_the_failures_before_it(run: SavedRun, gate: Gate) -> None:
    for error in [OSError("full"), OSError("full"), None] * 2:
        gate.error = error
        run.step()
        run.saver.save(run.state)
        wait_for_end(run)
    assert steps(run) == [3, 6]


def test_the_last_save_is_tried_until_three_saves_have_failed(run: SavedRun, gate: Gate) -> None:
    run.step()
    gate.error = OSError("full")
    with pytest.raises(SaveFailedError):
        run.saver.finish(run.state)
    assert gate.n_writes == 6, "three saves of two tries"


def test_a_last_save_whose_peers_are_gone_is_no_fault_of_the_storage(
    run: SavedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_mine: object) -> list[object]:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(run.saver, "_gather", fail)
    run.step()
    with pytest.raises(PeersLostError, match="rank 0 has lost the other workers' savers: Connection closed by peer"):
        run.saver.finish(run.state)


def test_a_save_that_hangs_is_told_once(
    run: SavedRun, gate: Gate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rayjob.training.saver, "_SLOW_S", 0.0)
    run.step()
    gate.close()
    run.saver.save(run.state)
    for _ in range(3):
        run.step()
        assert not run.saver.has_ended
    assert [record.getMessage() for record in caplog.records] == [
        "step_00000001 has been being written for 0 s: the storage is slow or hangs. Training goes on."
    ]


def test_a_worker_group_that_was_replaced_commits_nothing(run: SavedRun, gate: Gate, small_tokenizer: Path) -> None:
    """It was stopped in the middle of a save, taken for dead, and goes on when its successor has saved."""
    run.step()
    gate.close()
    run.saver.save(run.state)
    assert gate.is_reached.wait(WAIT_S)
    old, gate.is_open = gate.is_open, threading.Event()
    gate.is_open.set()
    successor = SavedRun(run.folder, small_tokenizer)
    successor.train([None, None, None])
    old.set()
    with pytest.raises(SaveFailedError, match="another worker group has taken over"):
        run.saver.finish(run.state)
    assert steps(successor) == [2, 3]
    assert list(run.folder.glob("*.tmp")) == []


def test_checkpoint_is_announced_after_the_rows_before_it_are_on_disk(tmp_path: Path, small_tokenizer: Path) -> None:
    order: list[str] = []

    def flush() -> None:
        order.append(f"flush {len(list_checkpoints(tmp_path / 'tiny'))}")

    def committed(folder: Path) -> None:
        order.append(f"{folder.name} {len(list_checkpoints(tmp_path / 'tiny'))}")

    run = SavedRun(tmp_path / "tiny", small_tokenizer, flush=flush, committed=committed)
    run.train([None])
    assert order == ["flush 0", "step_00000001 1"]


@pytest.mark.usefixtures("gate")
def test_rows_that_cannot_be_written_hold_the_checkpoint_back(tmp_path: Path, small_tokenizer: Path) -> None:
    def refuse() -> None:
        raise OSError("metrics.csv cannot be written")

    run = SavedRun(tmp_path / "tiny", small_tokenizer, flush=refuse)
    run.step()
    with pytest.raises(SaveFailedError, match=r"metrics\.csv cannot be written"):
        run.saver.finish(run.state)
    assert steps(run) == []


def test_an_attempt_keeps_the_run_id_and_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    first = begin_attempt(tmp_path, 0, None)
    second = begin_attempt(tmp_path, 20, None)
    assert first.run_id == second.run_id
    assert first.id != second.id
    moved = begin_attempt(tmp_path / "moved", 20, first.run_id)
    assert moved.run_id == first.run_id
