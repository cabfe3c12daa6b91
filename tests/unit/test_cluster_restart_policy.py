"""Every decision about another attempt; the policy is pure, so that nothing is faked."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.restart_policy import (
    FIRST_DELAY_S,
    FRUITLESS,
    LONGEST_DELAY_S,
    UNLIMITED,
    Budgets,
    End,
    Finish,
    History,
    Kind,
    Restart,
    backoff_s,
    decide,
)

LOST = End(Kind.LOST, 1, "the head is gone")
FAILED = End(Kind.FAILED, 1, "exit code 1")
ROOMY = Budgets(max_failures=UNLIMITED, max_losses=UNLIMITED)


def decisions(budgets: Budgets, *ends: tuple[End, int | None]) -> list[Restart | Finish]:
    """Returns the decision after each end, up to the one that finishes."""
    history, made = History(), []
    for end, step in ends:
        history, decision = decide(history, budgets, end, step)
        made.append(decision)
        if isinstance(decision, Finish):
            break
    return made


def last(budgets: Budgets, *ends: tuple[End, int | None]) -> Restart | Finish:
    made = decisions(budgets, *ends)
    assert len(made) == len(ends), "finished early"
    return made[-1]


@pytest.mark.parametrize("exit_code", [0, 1, 2, 3])
@pytest.mark.parametrize("step", [None, 0, 7])
def test_final_end_finishes_with_its_own_code_and_reason(exit_code: int, step: int | None) -> None:
    end = End(Kind.FINAL, exit_code, "why")
    assert decide(History(), Budgets(5, 5), end, step) == (History(), Finish(exit_code, "why"))


def test_first_failure_is_tried_again() -> None:
    assert last(ROOMY, (FAILED, 15)) == Restart(FIRST_DELAY_S, "exit code 1 (step 15)")


@pytest.mark.parametrize("step", [0, 15])
def test_second_failure_at_the_same_step_ends_with_its_code_and_the_reason(step: int) -> None:
    decision = last(ROOMY, (FAILED, step), (FAILED, step))
    assert isinstance(decision, Finish)
    assert decision.exit_code == 1
    assert decision.reason.startswith("exit code 1; ")
    assert f"gained no step since (step {step})" in decision.reason


@pytest.mark.parametrize("step", [None, 0, 14, 15])
def test_second_failure_not_beyond_the_first_repeats_even_if_a_loss_lies_between(step: int | None) -> None:
    assert isinstance(last(ROOMY, (FAILED, 15), (LOST, 12), (FAILED, step)), Finish)


def test_failure_after_progress_is_tried_again() -> None:
    assert isinstance(last(ROOMY, (FAILED, 15), (FAILED, 16), (FAILED, 17)), Restart)


def test_progress_made_by_an_attempt_that_was_lost_counts() -> None:
    assert isinstance(last(ROOMY, (FAILED, 15), (LOST, 20), (FAILED, 20)), Restart)
    assert isinstance(last(ROOMY, (FAILED, 15), (LOST, 20), (FAILED, 20), (FAILED, 20)), Finish)


def test_losses_without_progress_are_no_repeated_failure_but_end_in_time_with_a_hint() -> None:
    made = decisions(ROOMY, *[(LOST, 7)] * 20)
    assert len(made) == 1 + FRUITLESS  # the first one has gained seven steps
    assert [type(decision) for decision in made[:-1]] == [Restart] * FRUITLESS
    finish = made[-1]
    assert isinstance(finish, Finish)
    assert finish.exit_code == 1
    assert finish.reason.startswith("the head is gone; 5 attempts in a row have gained no step (step 7). If the system")
    assert "memory" in finish.reason


def test_losses_with_progress_have_no_limit() -> None:
    assert isinstance(last(ROOMY, *[(LOST, step) for step in range(1, 500)]), Restart)
    early = [(LOST, step // 4) for step in range(500)]  # three of four lost before they gain a step
    assert isinstance(last(ROOMY, *early), Restart)


@pytest.mark.parametrize("allowed", [0, 1, 2, 3])
def test_budget_of_failures_is_the_number_of_restarts(allowed: int) -> None:
    made = decisions(Budgets(allowed, 0), *[(FAILED, step) for step in range(1, 10)])
    assert len(made) == allowed + 1
    assert made[-1] == Finish(1, f"exit code 1; failure.max_failures={allowed} allows no more restarts")


@pytest.mark.parametrize("allowed", [0, 1, 2, 3])
def test_budget_of_losses_is_the_number_of_restarts(allowed: int) -> None:
    made = decisions(Budgets(0, allowed), *[(LOST, step) for step in range(1, 10)])
    assert len(made) == allowed + 1
    assert made[-1] == Finish(1, f"the head is gone; failure.max_preemptions={allowed} allows no more restarts")


@pytest.mark.parametrize("order", sorted(set(itertools.permutations("FFLLL"))))
def test_the_two_budgets_do_not_touch_each_other(order: tuple[str, ...]) -> None:
    ends = [(FAILED if letter == "F" else LOST, step) for step, letter in enumerate(order, start=1)]
    assert isinstance(last(Budgets(max_failures=2, max_losses=3), *ends), Restart)


def test_waits_double_up_to_a_bound_and_start_anew_after_progress() -> None:
    made = decisions(ROOMY, *[(LOST, 5)] * 5, *[(LOST, 6)] * 4)
    delays = [decision.delay_s for decision in made if isinstance(decision, Restart)]
    assert delays == [1, 1, 2, 4, 8, 1, 1, 2, 4]
    assert backoff_s(10**9) == LONGEST_DELAY_S


def test_unknown_step_is_no_progress_and_forgets_none() -> None:
    made = decisions(ROOMY, (LOST, 5), (LOST, None), (LOST, None), (LOST, 5), (LOST, 6))
    assert [decision.delay_s for decision in made if isinstance(decision, Restart)] == [1, 1, 2, 4, 1]


@given(st.integers(0, 10_000))
def test_wait_is_never_beyond_its_bounds(ends_without_progress: int) -> None:
    assert FIRST_DELAY_S <= backoff_s(ends_without_progress) <= LONGEST_DELAY_S


@given(
    st.lists(st.tuples(st.sampled_from([FAILED, LOST]), st.none() | st.integers(0, 5)), max_size=40),
    st.integers(-1, 3),
    st.integers(-1, 3),
)
def test_no_command_restarts_beyond_its_budgets_or_a_failure_that_repeats(
    ends: list[tuple[End, int | None]], max_failures: int, max_losses: int
) -> None:
    made = decisions(Budgets(max_failures, max_losses), *ends)
    restarted = [
        (end.kind, step) for (end, step), decision in zip(ends, made, strict=False) if isinstance(decision, Restart)
    ]
    for kind, allowed in ((Kind.FAILED, max_failures), (Kind.LOST, max_losses)):
        assert allowed == UNLIMITED or [one for one, _ in restarted].count(kind) <= allowed
    # The oracle: the highest step known by each failure that was restarted only grows.
    known = list(itertools.accumulate((step or 0 for _, step in restarted), max))
    at_failures = [step for (kind, _), step in zip(restarted, known, strict=True) if kind is Kind.FAILED]
    assert at_failures == sorted(set(at_failures))
