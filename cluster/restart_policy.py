"""Whether a job that has ended is worth another attempt. Pure: no clock, no Ray, no files.

1. A job that is done, was stopped on request or refuses what it was given ends the command with its exit code.
2. A lost driver or head is not the job's fault: it counts against the budget of losses, and any number is allowed
   that way. But what is lost again and again without a step gained is killed by itself: FRUITLESS in a row end it.
3. A failure counts against the budget of failures; a second one without a step gained in between would only repeat.
4. Every restart waits twice as long as the one before, up to a bound; a step gained makes the wait short again.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 60.0
UNLIMITED = -1
FRUITLESS = 5  # losses and failures in a row that gained no step; with their waits about half a minute and five starts


class Kind(enum.Enum):
    """What an end of a job means for the next attempt."""

    FINAL = "final"  # there is none
    FAILED = "failed"  # it may fail again
    LOST = "lost"  # taken from outside: the driver was killed, or the head is gone


@dataclass(frozen=True, slots=True)
class End:
    """How one attempt ended; `exit_code` is what the command returns if there is no other."""

    kind: Kind
    exit_code: int
    reason: str


@dataclass(frozen=True, slots=True)
class Budgets:
    """How many restarts are allowed after failures and after losses; UNLIMITED for any number."""

    max_failures: int
    max_losses: int


@dataclass(frozen=True, slots=True)
class History:
    """What the decisions so far have left to remember."""

    failures: int = 0
    losses: int = 0
    best_step: int = 0  # the highest step that any attempt is known to have reached
    failed_at: int | None = None  # best_step at the last failure
    ends_without_progress: int = 0  # in a row


@dataclass(frozen=True, slots=True)
class Restart:
    """Try again, `delay_s` after the end."""

    delay_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Give the exit code back."""

    exit_code: int
    reason: str


def decide(history: History, budgets: Budgets, end: End, step: int | None) -> tuple[History, Restart | Finish]:
    """Returns what to remember and what to do after an end.

    Args:
        history: what the decision before returned; History() at first.
        budgets: of this command, whose counts begin at 0.
        end: how the attempt ended.
        step: the run's step now, None if it could not be read, which counts as no progress.
    """
    if end.kind is Kind.FINAL:
        return history, Finish(end.exit_code, end.reason)
    now = count(history, end, step)
    if end.kind is Kind.FAILED and now.best_step == history.failed_at:
        reason = f"{end.reason}; it failed like that before, and has gained no step since (step {now.best_step})"
        return now, Finish(end.exit_code, reason)
    if over := budget_overdrawn(now, budgets, end.kind):
        return now, Finish(end.exit_code, f"{end.reason}; {over}")
    if now.ends_without_progress >= FRUITLESS:
        return now, Finish(end.exit_code, f"{end.reason}; {fruitless(now)}")
    return now, Restart(backoff_s(now.ends_without_progress), f"{end.reason} (step {now.best_step})")


def count(history: History, end: End, step: int | None) -> History:
    """Returns the history with one more end."""
    best_step = max(history.best_step, step or 0)
    is_failure = end.kind is Kind.FAILED
    return replace(
        history,
        failures=history.failures + is_failure,
        losses=history.losses + (end.kind is Kind.LOST),
        best_step=best_step,
        failed_at=best_step if is_failure else history.failed_at,
        ends_without_progress=0 if best_step > history.best_step else history.ends_without_progress + 1,
    )


def budget_overdrawn(history: History, budgets: Budgets, kind: Kind) -> str:
    """Returns which budget the last end, one of this kind, has overdrawn, in words; empty if none."""
    if kind is Kind.FAILED:
        key, used, allowed = "failure.max_failures", history.failures, budgets.max_failures
    else:
        key, used, allowed = "failure.max_preemptions", history.losses, budgets.max_losses
    return "" if allowed == UNLIMITED or used <= allowed else f"{key}={allowed} allows no more restarts"


def fruitless(history: History) -> str:
    """Returns why another attempt would be as useless as the last ones, and what to look for."""
    return (
        f"{history.ends_without_progress} attempts in a row have gained no step (step {history.best_step}). If the "
        "system kills it for want of memory (dmesg says so), lower train.micro_batch_size or take a larger machine; "
        "if it is taken away before its first save, lower checkpoint.interval_s"
    )


def backoff_s(ends_without_progress: int) -> float:
    """Returns how long after an end the next attempt begins, given the ends in a row that gained nothing."""
    doublings = min(max(0, ends_without_progress - 1), 10)  # bounded, for 2.0**n of a large n overflows
    return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0**doublings)
