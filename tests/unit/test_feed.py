"""Windows and micro-batches against plain slicing."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model.loss import IGNORED
from rayjob.corpus.blocks import n_windows
from rayjob.training.feed import StepFeed, Windows
from rayjob.training.schedule import WindowOrder

T = 8


def windows_of(n_tokens: int) -> Windows:
    return Windows(np.arange(n_tokens, dtype=np.uint16), T)


@pytest.mark.parametrize("n_tokens", [9, 10, 16, 17, 18, 100])
def test_every_token_but_the_first_is_a_target_once(n_tokens: int) -> None:
    windows = windows_of(n_tokens)
    _, targets = windows.batch(np.arange(len(windows)), len(windows))
    tail = windows.tail()
    counted = [targets.flatten(), *([tail[1].flatten()] if tail else [])]
    seen = torch.cat(counted)
    assert seen[seen != IGNORED].tolist() == list(range(1, n_tokens))


def test_targets_are_the_inputs_one_token_later() -> None:
    inputs, targets = windows_of(100).batch(np.array([3, 0]), 2)
    assert inputs.tolist() == [list(range(24, 32)), list(range(8))]
    assert targets.tolist() == [list(range(25, 33)), list(range(1, 9))]


@pytest.mark.parametrize(("n_tokens", "expected"), [(0, 0), (1, 0), (8, 0), (9, 1), (16, 1), (17, 2)])
def test_a_window_needs_one_token_more_than_its_length(n_tokens: int, expected: int) -> None:
    assert n_windows(n_tokens, T) == expected


def test_short_micro_batch_is_padded_with_targets_that_do_not_count() -> None:
    inputs, targets = windows_of(100).batch(np.array([1]), 3)
    assert inputs.shape == targets.shape == (3, T)
    assert (targets[1:] == IGNORED).all()


@pytest.mark.parametrize("n_workers", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("n_sequences", [1, 3, 15, 16, 17, 33, 257])
def test_any_corpus_size_gives_all_workers_equally_many_steps(n_sequences: int, n_workers: int) -> None:
    windows = windows_of(n_sequences * T + 1)
    order = WindowOrder(len(windows), 16, seed=7)
    feeds = [StepFeed(windows, order, 2, rank, n_workers, torch.device("cpu")) for rank in range(n_workers)]
    seen: list[int] = []
    for index in range(order.steps_per_epoch):
        batches = [feed.step_batch(index) for feed in feeds]
        assert len({len(batch.micro_batches) for batch in batches}) == 1
        counted = sum(int((targets != IGNORED).sum()) for batch in batches for _, targets in batch.micro_batches)
        assert {batch.n_tokens for batch in batches} == {counted}
        seen += [
            int(inputs[row, 0])
            for batch in batches
            for inputs, targets in batch.micro_batches
            for row in range(2)
            if targets[row, 0] != IGNORED
        ]
    assert sorted(seen) == [T * window for window in range(n_sequences)]


def feed_of(windows: Windows) -> StepFeed:
    return StepFeed(windows, WindowOrder(len(windows), 6, seed=7), 2, 1, 2, torch.device("cpu"))


def test_batches_made_ahead_are_those_made_on_demand() -> None:
    windows = windows_of(40 * T + 1)  # seven steps an epoch, the last one short
    ahead = feed_of(windows)
    for index in [*range(15), 3, 4, 5, 5, 20, 0]:  # in order, and as a resumed run begins
        got, fresh = ahead.step_batch(index), feed_of(windows).step_batch(index)
        assert got.all_window_ids.tolist() == fresh.all_window_ids.tolist()
        assert [ids.tolist() for ids in got.window_ids] == [ids.tolist() for ids in fresh.window_ids]
        assert (got.n_tokens, got.fingerprint) == (fresh.n_tokens, fresh.fingerprint)
        for mine, theirs in zip(got.micro_batches, fresh.micro_batches, strict=True):
            assert all(a.equal(b) for a, b in zip(mine, theirs, strict=True))


def test_next_steps_windows_are_read_while_the_step_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = windows_of(40 * T + 1)
    feed, threads = feed_of(windows), []
    batch = windows.batch
    is_read = threading.Semaphore(0)

    def read(ids: Any, size: int) -> Any:
        threads.append(threading.current_thread().name)
        is_read.release()
        return batch(ids, size)

    monkeypatch.setattr(windows, "batch", read)
    n_micro_batches = len(feed.step_batch(0).micro_batches)
    for _ in range(2 * n_micro_batches):  # of step 0, and of step 1 though nobody has asked for it
        assert is_read.acquire(timeout=60)
    feed.step_batch(1)
    for _ in range(n_micro_batches):
        assert is_read.acquire(timeout=60)
    assert set(threads[:n_micro_batches]) == {"MainThread"}
    assert all(name.startswith("feed") for name in threads[n_micro_batches:]), "step 1 was not read again"


def test_error_of_the_thread_reaches_who_asks_for_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = windows_of(40 * T + 1)
    feed = feed_of(windows)
    batch = windows.batch

    def read(ids: Any, size: int) -> Any:
        if threading.current_thread() is not threading.main_thread():
            raise OSError("the stream is gone")
        return batch(ids, size)

    monkeypatch.setattr(windows, "batch", read)
    feed.step_batch(0)
    with pytest.raises(OSError, match="the stream is gone"):
        feed.step_batch(1)


def test_flat_file_is_made_once_and_holds_the_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    from rayjob.corpus.blocks import Block, Manifest, Row, SplitTotals, write_block
    from rayjob.training.feed import open_windows

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    streams = tmp_path / "tmp" / f"rayjob-{os.getuid()}" / "streams"
    streams.mkdir(parents=True, mode=0o700)
    for name, days in (("unused", 8), ("in-use", 6)):
        (streams / f"{name}.uint16").touch()
        os.utime(streams / f"{name}.uint16", times=2 * (time.time() - 86_400 * days,))
    rows = [Row("a", np.arange(30, dtype=np.uint16)), Row("b", np.arange(30, 50, dtype=np.uint16))]
    blocks: list[Block] = [write_block(tmp_path / "train" / "part-00000.parquet", rows, unit_hash="u", text_bytes=9)]
    train = SplitTotals(2, 50, 6, 2, 9, "", blocks)
    empty = SplitTotals(0, 0, 0, 0, 0, "", [])
    Manifest("abc", {}, "t", "uint16", [], {}, train, empty, {}, {}, []).save(tmp_path)
    windows = open_windows(tmp_path, "train", T)
    assert windows.n_tokens == 50
    inputs, _ = windows.batch(np.array([2]), 1)
    assert inputs.tolist() == [list(range(16, 24))]
    assert sorted(path.name for path in streams.glob("*.uint16")) == ["abc-train.uint16", "in-use.uint16"]
    (tmp_path / "train" / "part-00000.parquet").unlink()
    assert len(open_windows(tmp_path, "train", T)) == len(windows), "the second process of a node reads the flat file"
