"""Random kill -9 of every part of one run under the one command; the last line is the verdict as JSON.

    python tests/bench/bench_soak.py FOLDER [--kills 50] [--seed 0] [--kinds head,driver,…] [--limit-s 900]

1. The run is made once undisturbed.
2. The same run, under another name: a kind and a moment are drawn for each kill, made sure of, and the command is given
   again whenever it has ended. `everything` is the supervisor, the head with all that runs on it, and MLflow's server.
3. The finished runs are compared bit for bit: all of metrics.csv but times, rates and costs; weights; optimizer.

A soak that reaches its limit stops as one does by Ctrl-C; the same call goes on from there. It uses the environment in
.venv, and ports and a state folder of its own.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil

from cluster.settings import DEFAULT_PORTS, REPOSITORY
from rayjob.training.attempt import STARTS_FILE
from tests import kills
from tests.e2e.test_run_all import Machine, free_ports, handles, write_books

# Weights: what is restarted quickly is killed more often.
KINDS = {"worker": 8, "rank 0": 8, "all workers": 7, "controller": 5, "driver": 6, "raylet": 4, "gcs": 3, "head": 3}
KINDS |= {"supervisor": 3, "everything": 3}
MOMENTS = ("step", "save", "validation", "at once")
EVAL_INTERVAL = 40
STEPS_PER_KILL = 60  # more than a kill gains on average, so that the run outlasts them
SETTINGS = ["train.epochs=3", f"train.eval_interval={EVAL_INTERVAL}", "checkpoint.interval_steps=25"]
SETTINGS += ["failure.max_failures=-1", "data.val_fraction=0.4", "train.global_batch_size=16"]


@dataclass
class Soak:
    """The run, its command, and what has been done to it; what is noted survives this script."""

    machine: Machine
    args: argparse.Namespace
    note: Path
    command: subprocess.Popen[bytes] | None = None
    done: list[dict[str, Any]] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return STEPS_PER_KILL * self.args.kills + 200

    @property
    def parts(self) -> kills.Parts:
        return self.machine.parts("killed")

    def start(self) -> None:
        """Gives the one command, always the same."""
        arguments = [*self.machine.arguments("killed", self.steps), *SETTINGS]
        with (self.machine.folder / "command.log").open("ab") as log:
            self.command = subprocess.Popen(
                ["bash", str(REPOSITORY / "cluster" / "run_all.sh"), *arguments],
                cwd=self.machine.folder,
                env={**os.environ, **self.machine.variables},
                stdout=log,
                stderr=log,
            )

    def kill_next(self) -> None:
        """Draws and makes the next kill, and waits until the run trains again."""
        rng = random.Random(f"{self.args.seed}/{len(self.done)}")
        kind = rng.choices(list(self.kinds), list(self.kinds.values()))[0]
        moment = rng.choice(MOMENTS)
        folder, begun = self.parts.run_folder, kills.starts(self.parts.run_folder)
        self.await_moment(moment, rng)
        reached, killed_at_s = kills.last_step(folder), time.monotonic()
        victims: list[psutil.Process] = []
        kills.wait_until(lambda: bool(victims.extend(self.victims(kind)) or victims), f"a {kind} to kill")
        kills.kill(victims)
        for survivor in self.parts.workers():  # one that was stopped for the moment could not be ended by Ray
            with suppress(psutil.NoSuchProcess):
                survivor.send_signal(signal.SIGCONT)
        self.await_training(begun, kind)
        resumed = resumed_from(folder)[-1] if kills.starts(folder) > begun else reached
        self.done.append(
            {"kind": kind, "moment": moment, "at_step": reached, "resumed_from": resumed}
            | {"repeated": max(0, reached - resumed), "outage_s": round(time.monotonic() - killed_at_s, 1)}
        )
        self.note.write_text(json.dumps(self.done))
        print(f"{len(self.done)}/{self.args.kills} {self.done[-1]}", flush=True)

    @property
    def kinds(self) -> dict[str, int]:
        return {kind: KINDS[kind] for kind in self.args.kinds or KINDS}

    def await_moment(self, moment: str, rng: random.Random) -> None:
        """Waits for the moment, with rank 0 stopped in it where it is a short one."""
        folder, evaluated = self.parts.run_folder, range(EVAL_INTERVAL, self.steps, EVAL_INTERVAL)
        if moment == "step":
            kills.wait_until(kills.from_step(folder, kills.last_step(folder) + rng.randint(1, 60)), "a step")
        elif moment != "at once":
            is_moment = kills.in_save(folder) if moment == "save" else kills.in_validation(folder, evaluated)
            kills.stop_rank_0(self.parts, is_moment, moment)

    def victims(self, kind: str) -> list[psutil.Process]:
        assert self.command is not None
        if kind == "supervisor":
            return [psutil.Process(self.command.pid)]
        if kind == "everything":
            return [psutil.Process(self.command.pid), *self.parts.members()]
        if kind == "head":
            return handles(self.machine.processes_of("head"))
        return self.parts.of_kind(kind)

    def await_training(self, begun: int, kind: str) -> None:
        """Waits for the next worker group, giving the command again if it has ended; a killed supervisor ends none."""
        assert self.command is not None
        if kind == "supervisor":
            self.command.wait()
            step = kills.last_step(self.parts.run_folder)
            self.start()
            kills.wait_until(kills.from_step(self.parts.run_folder, step + 1), "a step")
            return
        for _ in kills.ticks("training to go on"):
            if self.command.poll() is not None:
                # Not its exit code, which is lost of a process that was killed and waited for by psutil.
                is_done = kills.last_step(self.parts.run_folder) == self.steps
                assert not is_done, "the run was done before the kills were: give it more steps"
                self.start()
            if kills.starts(self.parts.run_folder) > begun and self.parts.rank_0():
                return
            time.sleep(0.1)  # looking for processes takes a core

    def finish(self) -> int:
        """Gives the command again until the run is done, and returns its exit code; no run needs that often."""
        assert self.command is not None
        for _ in range(5):
            if (code := self.command.wait()) in (0, 2):
                break
            self.start()
        return code


def resumed_from(run_folder: Path) -> list[int]:
    """Returns the step that each worker group went on from."""
    lines = (run_folder / STARTS_FILE).read_text().splitlines()
    return [int(json.loads(line)["step"]) for line in lines]


@contextmanager
def machine_in(folder: Path) -> Iterator[Machine]:
    """Offers the machine of a folder, the same at each call; what was started on it is stopped afterwards."""
    variables = folder / "variables.json"
    if not variables.exists():
        folder.mkdir(parents=True)
        write_books(folder / "books")
        ports = {name: str(port) for name, port in zip(DEFAULT_PORTS, free_ports(4), strict=True)}
        variables.write_text(json.dumps({"RAYJOB_STATE": str(folder / "state"), **ports}))
    machine = Machine(folder, json.loads(variables.read_text()))
    try:
        yield machine
    finally:
        print(machine.call("stop.sh")[1], file=sys.stderr)


def undisturbed_s(machine: Machine, steps: int) -> float:
    """Returns how long the undisturbed run took, making it if there is none yet."""
    note = machine.folder / "undisturbed.json"
    if not note.exists():
        begun_at_s = time.monotonic()
        code, output = machine.call("run_all.sh", *machine.arguments("undisturbed", steps), *SETTINGS)
        assert code == 0, output
        note.write_text(json.dumps(time.monotonic() - begun_at_s))
    return float(json.loads(note.read_text()))


def soak(machine: Machine, args: argparse.Namespace) -> dict[str, Any]:
    """Returns the verdict, or how far it came within its limit."""
    begun_at_s = time.monotonic()
    note, clock = machine.folder / "kills.json", machine.folder / "spent_s.json"
    done = json.loads(note.read_text()) if note.exists() else []
    spent_s = float(json.loads(clock.read_text())) if clock.exists() else 0.0
    soaking = Soak(machine, args, note, done=done)
    plain_s = undisturbed_s(machine, soaking.steps)
    begun = kills.starts(soaking.parts.run_folder)
    soaking.start()
    soaking.await_training(begun, "")
    killing_at_s = time.monotonic()
    while len(soaking.done) < args.kills and time.monotonic() - begun_at_s < args.limit_s:
        soaking.kill_next()
    is_over = len(soaking.done) == args.kills
    exit_code = soaking.finish() if is_over else None
    spent_s += time.monotonic() - killing_at_s
    clock.write_text(json.dumps(spent_s))
    folders = [machine.parts(name).run_folder for name in ("undisturbed", "killed")]
    found = kills.differences(*folders) if is_over else None
    return {
        "kills": len(soaking.done),
        "by_kind": dict(Counter(one["kind"] for one in soaking.done)),
        "by_moment": dict(Counter(one["moment"] for one in soaking.done)),
        "restarts": kills.starts(folders[1]) - 1,
        "steps": soaking.steps,
        "steps_repeated": sum(one["repeated"] for one in soaking.done),
        "longest_outage_s": max((one["outage_s"] for one in soaking.done), default=0.0),
        "wall_s": round(spent_s, 1),
        "undisturbed_s": round(plain_s, 1),
        "overhead": round(spent_s / plain_s, 2),
        "exit_code": exit_code,
        "equal": None if found is None else found == [] and exit_code == 0,
        "differences": (found or [])[:5],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", type=lambda text: text.split(","), help="of these only, separated by commas")
    parser.add_argument("--limit-s", type=float, default=3600.0)
    args = parser.parse_args()
    if unknown := set(args.kinds or ()) - KINDS.keys():
        parser.error(f"--kinds: {', '.join(sorted(unknown))} is none of {', '.join(KINDS)}.")
    with machine_in(args.folder.absolute()) as machine:
        verdict = soak(machine, args)
    print(json.dumps(verdict))
    sys.exit(verdict["equal"] is False)


if __name__ == "__main__":
    main()
