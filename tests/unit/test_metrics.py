"""metrics.csv and those who follow it."""

import dataclasses
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rayjob.training.follow import MetricsTail, follow
from rayjob.training.metrics import (
    METRICS_FILE,
    SPENT_FILE,
    MetricsRow,
    MetricsWriter,
    Spent,
    cut_metrics,
    read_metrics,
    read_spent,
)


def row(step: int, loss: float = 0.1 + 0.2) -> MetricsRow:
    return MetricsRow(step, 0, 64 * step, loss, 1.0, 1e-3, 10.0, None, 0.1, None, None, None, 0.0, 1.0, 2.0)


def test_values_come_back_bit_for_bit(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, 0)
    rows = [row(1, 1 / 3), row(2, 5e-324), row(3, float("nan"))]
    for each in rows:
        writer.write(each)
    writer.close()
    assert [repr(each) for each in read_metrics(tmp_path)] == [repr(each) for each in rows]


def test_rows_beyond_the_checkpoint_and_a_torn_row_are_cut_off(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, 0)
    for step in range(1, 6):
        writer.write(row(step))
    writer.close()
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write("6,0,384,0.3")  # killed in the middle of a write
    resumed = MetricsWriter(tmp_path, 3)
    resumed.write(row(4))
    resumed.close()
    assert [each.step for each in read_metrics(tmp_path)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "damage",
    [
        lambda row: b"\0" * len(row[:40]) + row[40:],
        lambda row: row.replace(b"2,0,128", b"2,0;128"),
        lambda row: b"\xb2" + row[1:],
        lambda row: b"2\n",
    ],
    ids=["zeros", "comma", "byte", "short"],
)
def test_damaged_row_is_dropped_with_a_warning_and_the_others_stay(
    tmp_path: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    writer = MetricsWriter(tmp_path, 0)
    for step in range(1, 5):
        writer.write(row(step))
    writer.close()
    path = tmp_path / METRICS_FILE
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], damage(lines[2]), *lines[3:]]))
    assert [each.step for each in MetricsTail(tmp_path, 0).new_rows()] == [1, 3, 4]
    MetricsWriter(tmp_path, 3).close()
    assert [each.step for each in read_metrics(tmp_path)] == [1, 3]
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} had 1 damaged rows; they were dropped.",
        f"{path} lacks 1 of its 3 rows, the first of step 2. Weights and later rows do not depend on them.",
    ]


def test_a_step_that_stands_twice_is_left_once_and_rows_that_are_gone_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / METRICS_FILE
    cut_metrics(tmp_path, 0)
    path.write_text(path.read_text() + "".join(row(step).to_csv() for step in (1, 2, 2, -1, 3, 2)))
    cut_metrics(tmp_path, 3)
    assert [each.step for each in read_metrics(tmp_path)] == [1, 2, 3]
    assert not caplog.records
    path.unlink()
    cut_metrics(tmp_path, 3)
    assert f"{path} lacks 3 of its 3 rows, the first of step 1." in caplog.text


def test_a_row_whose_write_failed_half_way_is_written_again_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite, room = os.pwrite, [10, 0]  # the disk takes ten bytes, then none

    def pwrite_until_full(descriptor: int, data: bytes, offset: int) -> int:
        if not room:
            return pwrite(descriptor, data, offset)
        taken = room.pop(0)
        if taken == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, data[:taken], offset)

    writer = MetricsWriter(tmp_path, 0)
    monkeypatch.setattr(os, "pwrite", pwrite_until_full)
    with pytest.raises(OSError, match="No space"):
        writer.write(row(1))
    assert list(read_metrics(tmp_path)) == []
    for step in (1, 2):
        writer.write(row(step))
    writer.sync()
    assert list(read_metrics(tmp_path)) == [row(1), row(2)]


def test_tail_gives_each_step_once_across_a_restart(tmp_path: Path) -> None:
    tail = MetricsTail(tmp_path, 0)
    assert tail.new_rows() == []
    writer = MetricsWriter(tmp_path, 0)
    for step in range(1, 6):
        writer.write(row(step))
    assert [each.step for each in tail.new_rows()] == [1, 2, 3, 4, 5]
    writer.close()
    resumed = MetricsWriter(tmp_path, 3)
    for step in range(4, 8):
        resumed.write(row(step))
    resumed.close()
    assert [each.step for each in tail.new_rows()] == [6, 7]


def test_follow_reads_the_last_rows_after_the_end(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, 0)
    writer.write(row(1))
    writer.close()
    ended = threading.Event()
    ended.set()
    assert [each.step for rows in follow(MetricsTail(tmp_path, 0), ended) for each in rows] == [1]


def test_lost_steps_were_paid_for(tmp_path: Path) -> None:
    assert read_spent(tmp_path) == Spent(0.0, 0.0)
    writer = MetricsWriter(tmp_path, 0)
    for step in range(1, 4):
        writer.write(dataclasses.replace(row(step), elapsed_s=10.0 * step, cost_usd=0.5 * step))
    writer.close()
    assert read_spent(tmp_path) == Spent(30.0, 1.5)
    for _ in range(2):  # a start that was killed before its first row, and the next one
        MetricsWriter(tmp_path, 1).close()
        assert read_spent(tmp_path) == Spent(30.0, 1.5)
    (tmp_path / SPENT_FILE).write_bytes(b"")
    assert read_spent(tmp_path) == Spent(10.0, 0.5)
