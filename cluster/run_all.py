"""The whole job on this machine, from a config to a generated text. Called by run_all.sh.

1. Check the config; nothing has been started if it is wrong.
2. Bring up the MLflow server and the Ray head, or join those that run.
3. Submit the job, show its log, wait for it; bring back whatever is lost meanwhile (supervise.py).
4. Deploy the best checkpoint, ask it for a text, print it.
5. Print where everything is, and as the last line the run's status in JSON.

Exit codes are the job's: 0 done, 1 failed, 2 bad usage or config, 3 stopped on request (run again to go on).
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from cluster import deploy, head, locks, product, redeploy, services, spot, submit
from cluster.settings import REPOSITORY, Settings, SettingsError, forget_other_clusters
from cluster.shell_parent import follow_shell
from cluster.supervise import Supervisor
from cluster.upload import UploadError

USAGE = """usage: bash cluster/run_all.sh [CONFIG] [KEY=VALUE …]

Trains the model that CONFIG describes (default: rayjob/configs/small.yaml), serves its best checkpoint and
prints a generated text. Run it again after any interruption: it goes on where it stopped.
Environment: RAY_PORT, DASHBOARD_PORT, SERVE_PORT, MLFLOW_PORT, PYTHON, RAY_TMPDIR, RAYJOB_STATE, NODE_IP."""

FAILURES = (
    deploy.DeployError,
    head.HeadError,
    locks.BusyError,
    submit.JobError,
    UploadError,
    OSError,
    RuntimeError,  # Ray's clients raise it for any answer but 200
)
FAILED, BAD_USAGE, STOPPED = 1, 2, 3


def main(arguments: Sequence[str]) -> int:
    """Runs everything and returns the exit code."""
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    prepare_process()
    caller = Path(os.environ.get("CALLER_DIR") or os.getcwd())
    try:
        settings = services.current_settings(os.environ)
        run = product.check_config(*product.split_arguments(arguments, caller), caller)
        exit_code = run_all(settings, run, caller)
        print_next_steps(settings, run, exit_code)
        print(json.dumps(product.read_status(run, caller)), flush=True)
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_USAGE
    except product.CommandError as error:
        return error.exit_code
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return STOPPED
    return exit_code


def prepare_process() -> None:
    """Sets signals, log levels and variables of this process so that neither shell nor Ray surprises us."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background commands with it ignored
    signal.signal(signal.SIGTERM, interrupt_once)
    follow_shell()
    for name in ("ray", "ray.dashboard.modules.dashboard_sdk"):  # its notes on packing and ignoring files
        logging.getLogger(name).setLevel(logging.ERROR)
    forget_other_clusters(os.environ)


def interrupt_once(number: int, _frame: FrameType | None) -> None:
    """Acts on the first SIGTERM as on Ctrl-C. A pod may get several, and one more must not cut the saving short."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def watch_for_preemption() -> None:
    """Has a notice of AWS or Google Cloud act like SIGTERM, which is the notice of others.

    This machine has the head, so that all ends with it: there is nothing to drain to, and saving at once loses least.
    """

    def stop(notice: spot.Notice) -> None:
        print(f"\nPreemption notice from {notice.source}: {notice.grace_s:.0f} s left.", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

    spot.watch_clouds(os.environ, stop)


def run_all(settings: Settings, run: product.Run, caller: Path) -> int:
    """Takes steps 2 to 4 of this file's head and returns the exit code; failures have been printed."""
    try:
        lock = settings.state / "locks" / f"{run.key}.lock"
        with locks.hold(lock, wait=False, purpose=f"run_all for {run.folder}"):
            watch_for_preemption()
            exit_code = Supervisor(settings, run, caller).keep_running()
            if exit_code == 0:
                serve(settings, product.read_status(run, caller))
    except FAILURES as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return STOPPED
    return exit_code


def serve(settings: Settings, status: dict[str, Any]) -> None:
    """Deploys the best checkpoint and prints a text from it."""
    checkpoint = status["best_checkpoint"] or status["latest_checkpoint"]
    if not checkpoint:
        raise deploy.DeployError("the run has no checkpoint to serve.")
    deploy.deploy(settings, str(checkpoint))
    redeploy.keep(settings)
    head.warn_exposed(settings)
    text = deploy.generate(settings)
    print(f"\nPrompt: {deploy.PROMPT}\nText:   {text}\n", flush=True)


def print_next_steps(settings: Settings, run: product.Run, exit_code: int) -> None:
    """Prints where to look and what to do next."""
    if exit_code == STOPPED:
        print("\nStopped on request. The same command goes on from here.")
    elif exit_code != 0:
        print(f"\nFailed with exit code {exit_code}; the lines above say why.")
    else:
        print(f"Service:       {settings.serve_url} (POST /generate, API page at /docs)")
    print(f"Run folder:    {run.folder}")
    print(f"MLflow:        {settings.mlflow_url}")
    print(f"Ray dashboard: {settings.dashboard_url} (asks for the token in {settings.token_path})")
    print(f"Stop it all:   bash {shlex.quote(str(REPOSITORY / 'cluster' / 'stop.sh'))}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
