"""The whole job on this machine, from a config to a generated text. Called by run_all.sh.

1. Check the config; nothing has been started if it is wrong.
2. Bring up the MLflow server and the Ray head, or join those that run.
3. Submit the job, show its log, wait for it.
4. Deploy the best checkpoint, ask it for a text, print it.
5. Print where everything is, and as the last line the run's status in JSON.

Exit codes are the job's: 0 done, 1 failed, 2 bad usage or config, 3 stopped on request (run again to go on).
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray.job_submission import JobSubmissionClient

from cluster import deploy, head, locks, product, services, submit, tracking_server
from cluster.settings import REPOSITORY, Settings, SettingsError, auth_variables
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
    tracking_server.TrackingServerError,
    UploadError,
    OSError,
)
FAILED, BAD_USAGE, STOPPED = 1, 2, 3


def main(arguments: Sequence[str]) -> int:
    """Runs everything and returns the exit code."""
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run_all(arguments, Path(os.environ.get("CALLER_DIR") or os.getcwd()))
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_USAGE
    except product.CommandError as error:
        return error.exit_code
    except FAILURES as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("\nInterrupted. The same command goes on from here.", file=sys.stderr)
        return STOPPED


def run_all(arguments: Sequence[str], caller: Path) -> int:
    """Takes the steps of this file's head in order; see there."""
    settings = services.current_settings(os.environ)
    config, overrides = product.split_arguments(arguments, caller)
    run = product.check_config(config, overrides, caller)
    if os.environ.get("RAY_ADDRESS"):
        print(f"RAY_ADDRESS={os.environ['RAY_ADDRESS']} is not used: this runs on a head of its own.")
    os.environ.update(auth_variables(settings))
    with locks.hold(run_lock(settings, run), wait=False, purpose=f"run_all for {run.folder}"):
        services.start(settings, None if "://" in run.storage else Path(run.storage))
        exit_code = submit.run_job(settings, JobSubmissionClient(settings.dashboard_url), run)
        status = product.read_status(run, caller)
        if exit_code == 0:
            serve(settings, status)
    print_next_steps(settings, run, exit_code)
    print(json.dumps(status), flush=True)
    return exit_code


def run_lock(settings: Settings, run: product.Run) -> Path:
    """Returns the lock file of one run folder."""
    digest = hashlib.sha256(run.folder.encode()).hexdigest()[:16]
    return settings.state / "locks" / f"{digest}.lock"


def serve(settings: Settings, status: dict[str, Any]) -> None:
    """Deploys the best checkpoint and prints a text from it."""
    checkpoint = status["best_checkpoint"] or status["latest_checkpoint"]
    if not checkpoint:
        raise deploy.DeployError("the run has no checkpoint to serve.")
    deploy.deploy(settings, str(checkpoint))
    text = deploy.generate(settings)
    print(f"\nPrompt: {deploy.PROMPT}\nText:   {text}\n", flush=True)


def print_next_steps(settings: Settings, run: product.Run, exit_code: int) -> None:
    """Prints where to look and what to do next."""
    if exit_code == STOPPED:
        print("Stopped on request. The same command goes on from the last checkpoint.")
    elif exit_code != 0:
        print(f"The run failed with exit code {exit_code}; the lines above say why.")
    else:
        print(f"Service:       {settings.serve_url} (POST /generate, playground at /)")
    print(f"Run folder:    {run.folder}")
    print(f"MLflow:        {settings.mlflow_url}")
    print(f"Ray dashboard: {settings.dashboard_url} (asks for the token in {settings.token_path})")
    print(f"Stop it all:   bash {REPOSITORY / 'cluster' / 'stop.sh'}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
