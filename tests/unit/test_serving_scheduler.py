"""Line, slots and budget of the scheduler, on plain numbers."""

import random
from dataclasses import dataclass

import pytest

from serving.engine.scheduler import Scheduler


@dataclass(eq=False)
class Job:
    num_prompt_tokens: int = 4
    wants_scores: bool = False
    is_gone: bool = False


def scheduler_of(num_slots: int = 4, max_waiting: int = 100, chunk_tokens: int = 8) -> Scheduler[Job]:
    return Scheduler(num_slots=num_slots, max_waiting=max_waiting, chunk_tokens=chunk_tokens)


def gone(job: Job) -> bool:
    return job.is_gone


def prefill(scheduler: Scheduler[Job], budget: int = 10**6) -> list[tuple[Job, int, int, int]]:
    """Completes chunks until the budget is used up; returns (job, row, start, end) of each."""
    done = []
    while chunks := scheduler.next_chunks(budget, most=100):
        assert all(chunk.is_last for chunk in chunks[:-1])
        for chunk in chunks:
            budget -= chunk.num_tokens
            done.append((chunk.sequence, chunk.row, chunk.start, chunk.end))
            scheduler.complete(chunk)
    return done


def test_the_oldest_come_first_and_only_as_many_as_there_are_slots() -> None:
    scheduler, jobs = scheduler_of(num_slots=3), [Job() for _ in range(5)]
    scheduler.add(jobs)
    assert prefill(scheduler) == [(jobs[0], 0, 0, 4), (jobs[1], 1, 0, 4), (jobs[2], 2, 0, 4)]
    assert scheduler.running == jobs[:3]
    assert (scheduler.num_running, scheduler.num_waiting) == (3, 2)


@pytest.mark.parametrize("budget", [8, 11, 30])
def test_borders_of_chunks_depend_on_the_prompt_alone(budget: int) -> None:
    scheduler, job = scheduler_of(), Job(21)
    scheduler.add([Job(5), job, Job(7)])
    chunks = []
    while turn := prefill(scheduler, budget):
        chunks += turn
    assert [(start, end) for of, _, start, end in chunks if of is job] == [(0, 8), (8, 16), (16, 21)]


def test_a_turn_stays_within_its_budget() -> None:
    scheduler = scheduler_of(num_slots=100)
    scheduler.add([Job(3) for _ in range(10)] + [Job(30)])
    turns = []
    while turn := prefill(scheduler, 8):
        turns.append(sum(end - start for _, _, start, end in turn))
    assert turns == [6, 6, 6, 6, 6, 8, 8, 8, 6]


def test_room_counts_slots_and_line() -> None:
    scheduler = scheduler_of(num_slots=2, max_waiting=3)
    assert scheduler.has_room(5)
    assert not scheduler.has_room(6)
    scheduler.add([Job() for _ in range(4)] + [Job(wants_scores=True)])
    assert not scheduler.has_room(1)
    prefill(scheduler)
    assert not scheduler.has_room(1)
    scheduler.running[0].is_gone = True
    scheduler.drop_running(gone)
    assert scheduler.has_room(1)


def test_those_who_leave_the_line_make_room() -> None:
    scheduler, jobs = scheduler_of(num_slots=1), [Job() for _ in range(4)]
    scoring = [Job(wants_scores=True) for _ in range(2)]
    scheduler.add(jobs + scoring)
    prefill(scheduler)
    jobs[2].is_gone = scoring[0].is_gone = True
    scheduler.drop_waiting(gone)
    assert list(scheduler.waiting) == [jobs[1], jobs[3]]
    assert list(scheduler.scoring) == [scoring[1]]


def test_scores_come_first_one_prompt_at_a_time_and_need_no_slot() -> None:
    scheduler = scheduler_of(num_slots=1)
    first, second, plain = Job(wants_scores=True), Job(wants_scores=True), Job()
    scheduler.add([first, second, plain])
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)
    prefill(scheduler)
    assert scheduler.running == [plain]
    scheduler.complete_scoring(first, decodes=True)
    scheduler.complete_scoring(second, decodes=False)
    assert list(scheduler.waiting) == [first]
    assert not scheduler.scoring


def test_rows_stay_together_and_hold_their_own_sequences_whoever_leaves() -> None:
    """The cache is played by a list: a computed chunk writes its job into a row, a move copies a row."""
    rng = random.Random(0)
    for _ in range(200):
        num_slots = rng.choice([1, 2, 5, 16])
        scheduler = scheduler_of(num_slots=num_slots, chunk_tokens=4)
        rows: list[Job | None] = [None] * num_slots
        for _ in range(30):
            scheduler.add([Job(rng.randint(1, 20)) for _ in range(rng.randrange(4))])
            for job, row, start, _ in prefill(scheduler, 4 * rng.randint(1, 4)):
                assert start == 0 or rows[row] is job
                rows[row] = job
            begun = scheduler.next_chunks(4, most=1)[:1]  # at times of a job whose earlier chunks are in its row
            held = [*scheduler.running, *(chunk.sequence for chunk in begun)]
            for job in rng.sample(held, rng.randrange(len(held) + 1)) if rng.random() < 0.7 else []:
                job.is_gone = True
            for source, target in scheduler.drop_running(gone):
                rows[target] = rows[source]
            assert rows[: len(scheduler.running)] == scheduler.running
            assert not any(map(gone, scheduler.running))


def test_a_faulty_step_frees_all_slots() -> None:
    scheduler, jobs = scheduler_of(), [Job(), Job(), Job(20), Job()]
    scheduler.add(jobs)
    prefill(scheduler, 20)
    assert scheduler.clear_running() == jobs[:3]
    assert prefill(scheduler) == [(jobs[3], 0, 0, 4)]


def test_prompts_are_packed_up_to_the_budget_and_one_at_a_time_on_request() -> None:
    scheduler, jobs = scheduler_of(num_slots=3), [Job(3), Job(4), Job(2), Job(1)]
    scheduler.add(jobs)
    assert [chunk.sequence for chunk in scheduler.next_chunks(8, most=10)] == jobs[:2]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 2)
    [first] = scheduler.next_chunks(8, most=1)
    first.sequence.is_gone = True
    assert scheduler.drop_running(gone) == []
    assert [(chunk.sequence, chunk.row) for chunk in scheduler.next_chunks(8, most=10)] == [
        (jobs[1], 0),
        (jobs[2], 1),
        (jobs[3], 2),
    ]
