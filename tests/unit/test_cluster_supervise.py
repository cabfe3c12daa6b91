"""The supervisor with the clock, the cluster and the jobs replaced; the policy and the heartbeat are real."""

import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import head, submit, supervise, tracking_server
from cluster.heartbeat import heartbeat_path, read_heartbeat, write_heartbeat
from cluster.product import CommandError, Run
from cluster.restart_policy import FRUITLESS, Budgets, End, Kind
from cluster.settings import Settings, SettingsError, read_settings

RUN = Run("small", "/st/runs/small", Path("/st"), (), Budgets(max_failures=3, max_losses=-1))
DONE = End(Kind.FINAL, 0, "done")
FAILED = End(Kind.FAILED, 1, "the job failed: exit code 1")
LOST = End(Kind.LOST, 1, "the driver was killed by SIGKILL")


class World:
    """What a supervisor sees; each list is used up one by one."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.now_s = 100.0
        self.slept_s: list[float] = []
        self.jobs: list[End | BaseException | Callable[[], End]] = []
        self.starts: list[Exception | None] = []
        self.steps: Iterator[int | None] = iter(lambda: 0, 1)
        self.last_attempts: list[int] = []
        self.is_head_up = self.is_tracking_up = True
        self.tracking_starts: list[Exception | None] = []
        self.service_looks: list[float] = []
        self.service_error: Exception | None = None
        self.watch: Callable[[str], None] = lambda job_id: None

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds

    def start(self, *_: Any) -> None:
        if self.starts and (error := self.starts.pop(0)):
            raise error
        self.is_head_up = True

    def run_job(self, _settings: Settings, _run: Run, watch: Callable[[str], None], last_attempt: int) -> End:
        self.watch = watch
        self.last_attempts.append(last_attempt)
        job = self.jobs.pop(0)
        if isinstance(job, BaseException):
            raise job
        if isinstance(job, End):
            watch(f"small-{last_attempt + 1}")
            return job
        return job()

    def read_status(self, *_: Any) -> dict[str, Any]:
        self.now_s += 0.25  # a call of the product's command line takes its time
        step = next(self.steps)
        if step is None:
            raise CommandError(1)
        return {"step": step}

    def start_tracking_server(self, *_: Any) -> None:
        if error := self.tracking_starts.pop(0):
            raise error
        self.is_tracking_up = True

    def keep_service(self, *_: Any) -> None:
        self.service_looks.append(self.now_s)
        if self.service_error:
            raise self.service_error

    def heartbeat(self) -> dict[str, Any]:
        found = json.loads(heartbeat_path(self.settings, RUN).read_text())
        assert isinstance(found, dict)
        return found

    def supervise(self) -> int:
        supervisor = supervise.Supervisor(self.settings, RUN, Path("/"), lambda: self.now_s, self.sleep)
        return supervisor.keep_running()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    world = World(read_settings({"RAYJOB_STATE": str(tmp_path)}))
    monkeypatch.setattr(supervise.services, "start", world.start)
    monkeypatch.setattr(supervise.services, "start_tracking_server", world.start_tracking_server)
    monkeypatch.setattr(supervise.submit, "run_job", world.run_job)
    monkeypatch.setattr(supervise.redeploy, "keep", world.keep_service)
    monkeypatch.setattr(supervise.product, "read_status", world.read_status)
    monkeypatch.setattr(head, "running_ports", lambda settings: {"RAY_PORT": 1} if world.is_head_up else {})
    monkeypatch.setattr(
        tracking_server, "running_ports", lambda settings: {"MLFLOW_PORT": 1} if world.is_tracking_up else {}
    )
    return world


def test_lost_job_is_submitted_until_it_is_done(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.jobs, world.steps = [LOST, LOST, DONE], iter([5, 9])
    assert world.supervise() == 0
    assert world.last_attempts == [0, 1, 2]
    assert capsys.readouterr().out.splitlines() == [
        "Restarting in 1 s: the driver was killed by SIGKILL (step 5).",
        "Restarting in 1 s: the driver was killed by SIGKILL (step 9).",
    ]


def test_job_that_fails_the_same_way_twice_is_not_submitted_again(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.jobs, world.steps = [FAILED, FAILED], iter([15, 15])
    assert world.supervise() == 1
    assert capsys.readouterr().err == (
        "error: the job failed: exit code 1; it failed like that before, and has gained no step since (step 15).\n"
    )


@pytest.mark.parametrize(("exit_code", "words"), [(0, ""), (1, "error: why.\n"), (2, "error: why.\n"), (3, "")])
def test_final_end_is_the_command_s(
    world: World, exit_code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    world.jobs = [End(Kind.FINAL, exit_code, "why")]
    assert world.supervise() == exit_code
    assert capsys.readouterr().err == words
    assert world.slept_s == []


def test_wait_counts_from_the_end_of_the_job(world: World) -> None:
    world.jobs = [LOST, LOST, LOST, DONE]
    world.supervise()
    assert world.slept_s == [0.75, 1.75, 3.75]


def test_failure_of_a_job_whose_head_is_gone_is_a_loss(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> End:
        world.is_head_up = False
        return FAILED

    world.jobs = [fail, fail, fail, DONE]
    assert world.supervise() == 0
    assert capsys.readouterr().out.count("the Ray head died") == 3


@pytest.mark.parametrize("error", [submit.HeadLostError("died"), ConnectionError(), RuntimeError("500")])
def test_error_without_a_head_is_a_loss(world: World, error: Exception) -> None:
    def lose() -> End:
        world.is_head_up = False
        raise error

    world.jobs = [lose, lose, lose, DONE]
    assert world.supervise() == 0


@pytest.mark.parametrize("error", [submit.JobError("not taken"), ConnectionError("reset"), RuntimeError("500")])
def test_error_with_a_head_is_a_failure(world: World, error: Exception) -> None:
    world.jobs = [error, error]
    assert world.supervise() == 1


@pytest.mark.parametrize(
    "error",
    [head.HeadError("no room"), SettingsError("port"), OSError("full")],
)
def test_cluster_that_does_not_come_back_twice_ends_the_command(
    world: World, error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    world.jobs, world.starts = [LOST], [None, error, error]
    assert world.supervise() == 1
    assert f"the cluster does not come up again: {error}; it failed like that before" in capsys.readouterr().err


def test_cluster_that_comes_back_at_the_second_try_goes_on(world: World) -> None:
    world.jobs, world.starts = [LOST, DONE], [None, head.HeadError("busy"), None]
    assert world.supervise() == 0


def test_what_cannot_be_started_at_first_is_not_tried_again(world: World) -> None:
    world.starts = [head.HeadError("no room")]
    with pytest.raises(head.HeadError):
        world.supervise()


def test_unreadable_status_is_no_progress(world: World) -> None:
    world.jobs, world.steps = [FAILED, FAILED], iter([3, None])
    assert world.supervise() == 1


def test_interrupt_while_waiting_ends_the_command(world: World) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    world.jobs, world.sleep = [LOST], interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        world.supervise()


def test_interrupt_while_waiting_stops_a_job_that_runs_nevertheless(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    world.jobs, world.sleep = [FAILED], interrupted  # type: ignore[method-assign]
    monkeypatch.setattr(supervise.submit, "stop_left", lambda *_: End(Kind.FINAL, 3, "stopped on request"))
    assert world.supervise() == 3


def test_heartbeat_tells_the_stages(world: World) -> None:
    seen = []

    def look() -> End:
        seen.append(world.heartbeat())
        world.watch("small-4")
        seen.append(world.heartbeat())
        return LOST

    def note(seconds: float) -> None:
        seen.append(world.heartbeat())

    world.jobs, world.sleep = [look, DONE], note  # type: ignore[method-assign]
    world.supervise()
    seen.append(world.heartbeat())
    assert [(one["stage"], one["attempt"], one["job_id"]) for one in seen] == [
        ("start", 0, None),
        ("run", 4, "small-4"),
        ("wait", 4, "small-4"),
        ("end", 5, "small-5"),
    ]
    assert {one["pid"] for one in seen} == {os.getpid()}
    assert all(one["time"].endswith("+00:00") for one in seen)


def test_heartbeat_comes_at_its_interval(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[float] = []
    monkeypatch.setattr(supervise, "write_heartbeat", lambda *_, stage, **__: beats.append(world.now_s))

    def look() -> End:
        for _ in range(9):  # 8 s
            world.watch("small-1")
            world.now_s += 1
        return DONE

    world.jobs = [look]
    world.supervise()
    assert beats == [100, 100, 102, 104, 106, 108, 109]  # the first and the last are start and end


def test_attempts_go_on_after_a_supervisor_that_was_killed(world: World) -> None:
    write_heartbeat(heartbeat_path(world.settings, RUN), attempt=6, job_id="small-6", stage="run")
    world.jobs = [DONE]
    world.supervise()
    assert world.last_attempts == [6]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"pid": 1}'])
def test_torn_heartbeat_is_as_good_as_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "heartbeat.json"
    path.write_text(text)
    assert read_heartbeat(path) is None


def test_heartbeat_that_cannot_be_written_does_not_end_the_run(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(supervise, "write_heartbeat", full)
    world.jobs = [DONE]
    assert world.supervise() == 0
    assert "warning: no heartbeat: No space left on device." in capsys.readouterr().err


def test_dead_tracking_server_is_started_again_while_the_job_runs(world: World) -> None:
    world.tracking_starts = [None]

    def look() -> End:
        world.is_tracking_up = False
        world.watch("small-1")
        assert world.is_tracking_up
        return DONE

    world.jobs = [look]
    assert world.supervise() == 0


def test_tracking_server_that_does_not_start_costs_the_job_nothing(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.tracking_starts = [tracking_server.TrackingServerError("it ended"), None]

    def look() -> End:
        world.is_tracking_up = False
        for _ in range(int(supervise.TRACKING_RETRY_S)):
            world.watch("small-1")
            world.now_s += 1
        assert len(world.tracking_starts) == 1, "tried again too early"
        world.watch("small-1")
        assert world.is_tracking_up
        return DONE

    world.jobs = [look]
    assert world.supervise() == 0
    assert "warning: it ended; trying again in 60 s." in capsys.readouterr().err


@pytest.mark.parametrize("error", [None, ConnectionError("reset"), RuntimeError("503")])
def test_service_is_looked_after_at_its_interval_and_costs_the_job_nothing(
    world: World, error: Exception | None, capsys: pytest.CaptureFixture[str]
) -> None:
    world.service_error = error

    def look() -> End:
        for _ in range(int(2 * supervise.SERVICE_LOOK_S)):
            world.watch("small-1")
            world.now_s += 1
        return DONE

    world.jobs = [look]
    assert world.supervise() == 0
    gaps = [later - earlier for earlier, later in itertools.pairwise(world.service_looks)]
    # A look at what is beside the job comes every LOOK_S seconds, so the interval is kept up to that.
    assert gaps
    assert all(supervise.SERVICE_LOOK_S <= gap <= supervise.SERVICE_LOOK_S + supervise.LOOK_S for gap in gaps)
    assert ("the service was not looked after" in capsys.readouterr().err) == (error is not None)


def test_loss_without_progress_is_not_repeated_for_ever(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.jobs = [LOST] * 20
    assert world.supervise() == 1
    assert len(world.jobs) == 20 - FRUITLESS
    assert "for want of memory" in capsys.readouterr().err
