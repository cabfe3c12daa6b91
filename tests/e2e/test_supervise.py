"""The one command on a machine where everything is killed, one after the other, without a warning.

Real: the scripts, Ray, the job, MLflow, Serve and every SIGKILL. Nothing is faked; corpus and model are tiny.
"""

import itertools
import json
import signal
import statistics
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator

import psutil
import pytest

from rayjob.training.metrics import read_metrics
from tests import kills
from tests.e2e.test_run_all import Machine, handles, last_json, machine_in

# The first test may have to install everything.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

STEPS = 1000  # more than are made between a line of the log and the kill that follows it
SETTINGS = ["train.eval_interval=100", "train.epochs=3", "checkpoint.interval_steps=50"]


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


def is_answering(machine: Machine) -> bool:
    try:
        with urllib.request.urlopen(machine.url("SERVE_PORT", "/health"), timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


@pytest.fixture(scope="module")
def outage(machine: Machine) -> tuple[float, float]:
    """A run that nothing happens to, but to its MLflow server; returns from when to when that did not answer.

    The server is stopped, so that it takes requests and never answers, goes on, and is then killed.
    """
    uri = f"tracking.mlflow_uri=http://127.0.0.1:{machine.variables['MLFLOW_PORT']}"
    run = machine.start("run_all.sh", *machine.arguments("undisturbed", STEPS), *SETTINGS, uri)
    output = read_until(run, is_step)
    parts = machine.parts("undisturbed")
    server = handles(machine.processes_of("mlflow"))
    begin_s, first = time.time(), kills.last_step(parts.run_folder)
    for process in server:
        process.send_signal(signal.SIGSTOP)
    # Ten times the half second after which rows are sent, and a few hundred steps.
    kills.wait_until(lambda: time.time() > begin_s + 5 and kills.last_step(parts.run_folder) > first + 200, "steps")
    end_s = time.time()
    for process in server:
        process.send_signal(signal.SIGCONT)
    assert kills.last_step(parts.run_folder) < STEPS, "the outage was to be in the middle"
    kills.kill(server)
    output += run.communicate()[0]
    assert run.returncode == 0, output
    assert "The MLflow server is gone: starting it again." in output
    return begin_s, end_s


def test_outage_of_mlflow_delays_no_step_and_loses_no_metric(machine: Machine, outage: tuple[float, float]) -> None:
    from mlflow import MlflowClient

    rows = list(read_metrics(machine.parts("undisturbed").run_folder))
    assert [row.step for row in rows] == list(range(1, STEPS + 1))
    step_s = {b.wall_time: b.wall_time - a.wall_time for a, b in itertools.pairwise(rows) if b.val_loss is None}
    median_s = statistics.median(step_s.values())
    during = sorted(seconds for ended_s, seconds in step_s.items() if outage[0] < ended_s < outage[1])
    # The median, for others on the machine hold up single steps of a few milliseconds at any time, outage or not; one
    # that waited for the tracker would take as long as the outage.
    assert statistics.median(during) < 2 * median_s
    assert during[-1] < (outage[1] - outage[0]) / 2

    client = MlflowClient(f"http://127.0.0.1:{machine.variables['MLFLOW_PORT']}")
    experiment = client.get_experiment_by_name("pretraining")
    (run,) = client.search_runs([experiment.experiment_id], "tags.mlflow.runName = 'undisturbed'")
    assert run.info.status == "FINISHED"
    for key, values in (("train/loss", [row.loss for row in rows]), ("train/lr", [row.lr for row in rows])):
        history = client.get_metric_history(run.info.run_id, key)
        assert [(one.step, one.value) for one in history] == list(enumerate(values, start=1)), key


def test_run_ends_as_the_undisturbed_one_after_everything_was_killed_under_the_same_command(
    machine: Machine, outage: tuple[float, float]
) -> None:
    """bf16. The supervisor, the driver, the raylet, then all at once; the service of an earlier run comes back too."""
    assert is_answering(machine)

    command = ("run_all.sh", *machine.arguments("killed", STEPS), *SETTINGS)
    parts = machine.parts("killed")
    first = machine.start(*command)
    read_until(first, lambda line: line.startswith("Submitted job killed-1"))
    first.kill()
    first.communicate()

    run = machine.start(*command)
    output = read_until(run, is_save)  # a run without a checkpoint would start anew, and say nothing of resuming
    assert "Job killed-1 of this run is at work already" in output
    parts.kill("driver")
    output = read_until(run, lambda line: "resuming from" in line)
    assert "the driver was killed by SIGKILL" in output
    assert "Submitted job killed-2" in output

    read_until(run, is_step)
    parts.kill("raylet")
    output = read_until(run, lambda line: "resuming from" in line)
    assert "the Ray head died" in output
    assert "Bringing back the service that the last head ran" in output
    assert "Submitted job killed-3" in output
    kills.wait_until(lambda: is_answering(machine), "the service of the run before")

    kills.kill([psutil.Process(run.pid), *parts.members()])
    run.communicate()
    assert 0 < kills.last_step(parts.run_folder) < STEPS, "it was to be killed before its end"

    exit_code, output = machine.call(*command)
    assert exit_code == 0, output
    assert "Submitted job killed-4" in output
    status = last_json(output)
    assert (status["stage"], status["step"]) == ("done", STEPS)
    assert kills.differences(machine.parts("undisturbed").run_folder, parts.run_folder) == []
    (heartbeat,) = (machine.folder / "state").glob("heartbeat-killed-*.json")
    last_look = json.loads(heartbeat.read_text())
    assert (last_look["stage"], last_look["attempt"], last_look["job_id"]) == ("end", 4, "killed-4")


def test_job_that_fails_the_same_way_twice_is_not_submitted_a_third_time(machine: Machine) -> None:
    # A folder where the job writes a file: no fault of the config, and there again at every attempt.
    (machine.folder / "store" / "runs" / "broken" / "config.yaml").mkdir(parents=True)
    exit_code, output = machine.run_all("broken", 20)
    assert exit_code == 1, output
    assert "Submitted job broken-2" in output
    assert "broken-3" not in output
    assert "it failed like that before, and has gained no step since (step 0)" in output
