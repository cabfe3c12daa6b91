"""Ends that a retry would only repeat, as they stand in the run folder."""

from pathlib import Path

import pytest
import ray.exceptions
import torch.distributed as dist

from rayjob.training.failure import (
    RunFailedError,
    forget_failure,
    forget_passed_errors,
    has_failed,
    is_of_another_worker,
    raise_failure,
    remembered_errors,
    write_bad_numbers,
)


def fail(folder: Path, error: Exception, *, group: str, rank: int = 0, step: int = 14) -> None:
    with pytest.raises(type(error)), remembered_errors(folder, group, rank, step=lambda: step):
        raise error


def test_same_exception_at_the_same_step_in_another_group_fails_the_run_with_the_reason(tmp_path: Path) -> None:
    fail(tmp_path, ValueError("no such token 99 at 0x7f00"), group="a", rank=1)
    assert not has_failed(tmp_path)
    fail(tmp_path, ValueError("no such token 99 at 0x7fab"), group="b")
    with pytest.raises(RunFailedError, match=r"ValueError: no such token 99 .*rank 0, after step 14.*second time"):
        raise_failure(tmp_path)
    forget_failure(tmp_path)
    raise_failure(tmp_path)
    fail(tmp_path, ValueError("no such token 99 at 0x7fab"), group="c")
    assert has_failed(tmp_path), "another driver remembers it too"


@pytest.mark.parametrize(
    ("error", "changes"),
    [
        (ValueError("a"), {"step": 15}),
        (ValueError("b"), {}),
        (KeyError("a"), {}),
        (ValueError("a"), {"group": "first", "rank": 1}),
    ],
)
def test_another_step_text_type_or_the_same_group_is_not_a_repetition(
    tmp_path: Path, error: Exception, changes: dict[str, object]
) -> None:
    fail(tmp_path, ValueError("a"), group="first")
    fail(tmp_path, error, **{"group": "second", **changes})  # type: ignore[arg-type]
    assert not has_failed(tmp_path)


def test_error_of_one_rank_does_not_hide_what_another_rank_repeats(tmp_path: Path) -> None:
    fail(tmp_path, ValueError("a"), group="first", rank=1)
    fail(tmp_path, KeyError("other"), group="second", rank=0)
    fail(tmp_path, ValueError("a"), group="second", rank=1)
    assert has_failed(tmp_path)


@pytest.mark.parametrize(
    "error",
    [
        dist.DistBackendError("NCCL error"),
        ray.exceptions.RayActorError(),
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"),
        RuntimeError("Timed out waiting 5000ms for recv operation to complete"),
    ],
)
def test_exceptions_that_another_workers_end_causes_are_not_remembered(tmp_path: Path, error: Exception) -> None:
    assert is_of_another_worker(error)
    for group in "abc":
        fail(tmp_path, error, group=group)
    assert not has_failed(tmp_path)
    assert not is_of_another_worker(RuntimeError("CUDA out of memory"))


def test_damaged_record_hides_neither_a_repetition_nor_that_the_run_has_failed(tmp_path: Path) -> None:
    fail(tmp_path, ValueError("a"), group="first")
    (damaged,) = (tmp_path / "errors").glob("rank-*.json")
    damaged.with_name("rank-00007.json").write_bytes(b"\0")
    fail(tmp_path, ValueError("a"), group="second")
    assert has_failed(tmp_path)
    forget_passed_errors(tmp_path, 99)
    assert list((tmp_path / "errors").iterdir()) == []
    (tmp_path / "failure.json").write_bytes(b"")
    with pytest.raises(RunFailedError, match="reason was lost"):
        raise_failure(tmp_path)


def test_error_of_a_step_that_is_passed_is_forgotten(tmp_path: Path) -> None:
    fail(tmp_path, ValueError("a"), group="first", step=14)
    forget_passed_errors(tmp_path, 14)
    fail(tmp_path, KeyError("b"), group="first", rank=1, step=20)
    forget_passed_errors(tmp_path, 15)
    fail(tmp_path, ValueError("a"), group="second", step=14)
    assert not has_failed(tmp_path)
    fail(tmp_path, KeyError("b"), group="second", step=20)
    assert has_failed(tmp_path)


def test_bad_numbers_say_how_to_look_at_their_windows(tmp_path: Path) -> None:
    write_bad_numbers(tmp_path, "5 bad steps in a row", [3, 17])
    with pytest.raises(RunFailedError, match=r"^5 bad steps in a row\. .*show-window --config … 3 17`\.$"):
        raise_failure(tmp_path)
