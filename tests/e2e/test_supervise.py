"""The one command on a machine where everything is killed, one after the other, without a warning.

Real: the scripts, Ray, the job, MLflow, Serve and every SIGKILL. Nothing is faked; corpus and model are tiny.
"""

import json
import signal
import subprocess
from collections.abc import Callable, Iterator

import pytest

from cluster import head, processes
from cluster.settings import read_settings
from tests.e2e.test_run_all import Machine, last_json, machine_in

# The first test may have to install everything.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

STEPS = 600  # more than are made between a line of the log and the kill that follows it


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with machine_in(tmp_path_factory.mktemp("supervise")) as machine:
        yield machine


def read_until(run: subprocess.Popen[str], is_it: Callable[[str], bool]) -> str:
    """Returns the output of a running command up to the first line that `is_it`."""
    assert run.stdout is not None
    lines: list[str] = []
    for line in run.stdout:
        lines.append(line)
        if is_it(line):
            return "".join(lines)
    pytest.fail("the command ended early:\n" + "".join(lines))


def is_step(line: str) -> bool:
    return line.startswith("step ")


def is_save(line: str) -> bool:
    return "saved step_" in line


def kill_driver(machine: Machine) -> None:
    drivers = [one for one in machine.left_processes() if " -m rayjob run " in one.command]
    assert len(drivers) == 1
    processes.send(drivers, signal.SIGKILL)


def kill_head(machine: Machine) -> None:
    """Kills every process of the head and all that runs on it."""
    settings = read_settings(machine.variables)
    recorded, _ = processes.load_record(head.record_path(settings))
    processes.send(processes.find_ours(settings.marker("head"), recorded), signal.SIGKILL)


def test_run_goes_on_after_its_supervisor_its_driver_and_its_head_are_killed(machine: Machine) -> None:
    command = ("run_all.sh", *machine.arguments("killed", STEPS))
    first = machine.start(*command)
    read_until(first, lambda line: line.startswith("Submitted job killed-1"))
    first.kill()
    first.communicate()

    run = machine.start(*command)
    output = read_until(run, is_save)  # a run without a checkpoint would start anew, and say nothing of resuming
    assert "Job killed-1 of this run is at work already" in output
    kill_driver(machine)
    output = read_until(run, lambda line: "resuming from" in line)
    assert "the driver was killed by SIGKILL" in output
    assert "Submitted job killed-2" in output
    read_until(run, is_step)
    kill_head(machine)
    output = run.communicate()[0]
    assert run.returncode == 0, output
    assert "the Ray head died" in output
    assert "Submitted job killed-3" in output

    status = last_json(output)
    assert (status["stage"], status["step"]) == ("done", STEPS)
    assert machine.steps_of("killed") == list(range(1, STEPS + 1))
    (heartbeat,) = (machine.folder / "state").glob("heartbeat-killed-*.json")
    last_look = json.loads(heartbeat.read_text())
    assert (last_look["stage"], last_look["attempt"], last_look["job_id"]) == ("end", 3, "killed-3")


def test_job_that_fails_the_same_way_twice_is_not_submitted_a_third_time(machine: Machine) -> None:
    # A folder where the job writes a file: no fault of the config, and there again at every attempt.
    (machine.folder / "store" / "runs" / "broken" / "config.yaml").mkdir(parents=True)
    exit_code, output = machine.run_all("broken", 20)
    assert exit_code == 1, output
    assert "Submitted job broken-2" in output
    assert "broken-3" not in output
    assert "it failed like that before, and has gained no step since (step 0)" in output
