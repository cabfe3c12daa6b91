"""Runs a function over items as Ray Data tasks, with progress lines, cancellation and plain errors.

Every item is one row of a data set, and every Ray block of it a task: a few items each where there are many, as a
task costs the driver 10 ms. Tasks rather than actors: a pool of actors larger than the free CPUs waits for ever
without a word. A task asks for half a CPU, so the work goes on even where one core is left, and there are as many at
a time as CPUs: more would only start more processes and fill more memory. Results come in any order.
"""

import errno
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
import ray.data

from rayjob.corpus.errors import CorpusError, PrepareCancelled

logger = logging.getLogger(__name__)

CPUS_PER_TASK = 0.5
ITEMS_PER_TASK = 4
LEAST_ROUNDS = 4  # of tasks on all CPUs, so that none is long without work at the end
LOG_INTERVAL_S = 5.0
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def run_tasks(
    function: Callable[[dict[str, Any]], dict[str, Any]],
    items: Sequence[str],
    *,
    is_cancelled: Callable[[], bool],
    max_tasks: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Yields function({"item": item}), a JSON object, of each item as it comes.

    Args:
        items: must not be empty.
        max_tasks: most tasks at a time; None for the number of the cluster's CPUs.

    Raises:
        CorpusError: what tasks found wrong with the corpus, all of it after the last task; at once where a task's
            storage is full or cannot be written.
        PrepareCancelled: the caller asked to stop; what tasks have written stays.
    """
    if not ray.is_initialized():
        raise RuntimeError("prepare needs Ray: call ray.init() first.")
    size = max_tasks or max(1, int(ray.cluster_resources().get("CPU", 1)))  # type: ignore[no-untyped-call]
    n_tasks = min(len(items), max(LEAST_ROUNDS * size, -(-len(items) // ITEMS_PER_TASK)))
    with _quiet_ray_data():
        outcomes = (
            ray.data.from_items([{"item": item} for item in items], override_num_blocks=n_tasks)
            .map(
                _tell_problems(function),
                num_cpus=CPUS_PER_TASK,
                compute=ray.data.TaskPoolStrategy(size=min(size, n_tasks)),
            )
            .iter_rows()
        )
        found: list[str] = []
        for outcome in outcomes:
            result, problems, is_last = json.loads(outcome["outcome"])
            found += problems
            if is_last:
                raise CorpusError(problems)
            if not problems:
                yield result
            if is_cancelled():
                raise PrepareCancelled("Stopped in mid-work; what is finished stays, run the same command again.")
        if found:
            raise CorpusError(sorted(found))


def _tell_problems(function: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[dict[str, Any]], dict[str, str]]:
    """A function with, as JSON: the result of `function`, or what a person has to do about its failure and whether
    others will fail of the same.

    Problems travel as results: raised, Ray Data would print pages of traces, and it changes errors, of an OSError
    even the name of the file.
    """

    def call(item: dict[str, Any]) -> dict[str, str]:
        result: dict[str, Any] = {}
        problems: list[str] = []
        is_last = False
        try:
            result = function(item)
        except CorpusError as error:
            problems = error.problems
        except OSError as error:
            problems, is_last = storage_error(error).problems, True
        return {"outcome": json.dumps([result, problems, is_last])}

    call.__name__ = getattr(function, "func", function).__name__  # names the tasks, where Ray lists them
    return call


def storage_error(error: OSError) -> CorpusError:
    """The error of a write that failed, with what to do."""
    remedy = "free space there" if error.errno in FULL else "make it writable"
    return CorpusError(
        [
            f"{error.filename or 'the storage'} cannot be written ({error.strerror or error}): {remedy} or choose "
            "another `storage`, then run the same command again; what is finished stays."
        ]
    )


@contextmanager
def _quiet_ray_data() -> Iterator[None]:
    """No progress bars and plans beside our own lines, and a task's own error instead of Ray Data's wrapper around it.

    A data set keeps the settings that it was made with, so it must be made inside.
    """
    context = ray.data.DataContext.get_current()
    before = context.enable_progress_bars, context.raise_original_map_exception
    context.enable_progress_bars, context.raise_original_map_exception = False, True
    log = logging.getLogger("ray.data")
    level = log.level
    log.setLevel(max(level, logging.WARNING))
    try:
        yield
    finally:
        context.enable_progress_bars, context.raise_original_map_exception = before
        log.setLevel(level)


class Progress:
    """Logs what is done, rates and time to go, at most every LOG_INTERVAL_S."""

    def __init__(self, stage: str, total: int, unit: str) -> None:
        self._stage, self._total, self._unit = stage, total, unit
        self._done = self._bytes = 0
        self._started_at_s = self._logged_at_s = time.monotonic()

    def add(self, done: int, n_bytes: int) -> None:
        """Counts finished work: `done` of the total's unit, and the bytes of its text."""
        self._done += done
        self._bytes += n_bytes
        now_s = time.monotonic()
        if now_s - self._logged_at_s >= LOG_INTERVAL_S or self._done == self._total:
            self._logged_at_s = now_s
            self._log(max(now_s - self._started_at_s, 1e-9))

    def _log(self, elapsed_s: float) -> None:
        rate = self._done / elapsed_s
        logger.info(
            "%s %s/%s %s | %.1f MB | %s %s/s | %.2f MB/s | eta %.0fs",
            self._stage,
            f"{self._done:,}",
            f"{self._total:,}",
            self._unit,
            self._bytes / 1e6,
            f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}",
            self._unit,
            self._bytes / 1e6 / elapsed_s,
            (self._total - self._done) / max(rate, 1e-9),
        )
