import errno
import functools
import json
from typing import Any

import pytest

from rayjob.corpus.errors import CorpusError
from rayjob.corpus.tasks import _tell_problems


def _write(item: dict[str, Any], folder: str) -> dict[str, Any]:
    if item["item"] == "full":
        raise OSError(errno.ENOSPC, "No space left on device", f"{folder}/a.parquet")
    if item["item"] == "bad":
        raise CorpusError(["a.parquet is bad.", "So is b.parquet."])
    return {"bytes": len(item["item"])}


@pytest.mark.parametrize(
    ("item", "result", "told"),
    [
        ("text", {"bytes": 4}, ""),
        ("bad", {}, "a.parquet is bad. So is b.parquet."),
        ("full", {}, "/data/a.parquet cannot be written (No space left on device): free space there"),
    ],
)
def test_problem_of_a_task_comes_as_a_result_that_names_its_file(item: str, result: Any, told: str) -> None:
    call = _tell_problems(functools.partial(_write, folder="/data"))
    outcome, problems, is_last = json.loads(call({"item": item})["outcome"])
    assert outcome == result
    assert is_last == (item == "full")
    assert " ".join(problems).startswith(told)
    assert bool(problems) == bool(told)


def test_bug_in_a_task_is_raised_as_it_is_and_tasks_keep_their_name() -> None:
    call = _tell_problems(functools.partial(_write, folder="/data"))
    with pytest.raises(KeyError, match="item"):
        call({})
    assert call.__name__ == "_write"
