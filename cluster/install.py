"""Makes the virtual environment and installs the product into it, once.

Runs on the system's Python, before anything is installed, so it uses the standard library alone.

1. A stamp in the environment says what was installed: a hash of pyproject.toml, the Python, the repository's
   path (an environment cannot be moved) and the extras. If it covers what is wanted, stop.
2. No stamp means an interrupted install, which pip does not repair: make the environment anew. The same for
   another Python or path.
3. Remove the stamp, let pip install in editable mode with its output in a log, write the stamp.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

REPOSITORY = Path(__file__).resolve().parents[1]
NEEDED_GIB = 3  # torch for CPUs with everything else takes 2.3 GiB; the CUDA build several more
PROGRESS_INTERVAL_S = 15
STAMP = "installed.json"


class InstallError(Exception):
    """What stopped the installation and what to do about it, in one message."""


def wanted_stamp(repository: Path) -> dict[str, str]:
    """Returns everything but the extras that makes an environment out of date when it changes."""
    return {
        "project": hashlib.sha256((repository / "pyproject.toml").read_bytes()).hexdigest(),
        "home": f"{sys.implementation.cache_tag} {sys.base_prefix} {repository}",
    }


def read_stamp(environment: Path) -> dict[str, Any] | None:
    """Returns what a completed install left behind, or None."""
    try:
        stamp = json.loads((environment / STAMP).read_text())
    except (OSError, ValueError):
        return None
    return stamp if isinstance(stamp, dict) else None


def is_installed(stamp: dict[str, Any] | None, wanted: dict[str, str], extras: Sequence[str]) -> bool:
    """Says whether a completed install covers what is wanted."""
    return stamp is not None and wanted.items() <= stamp.items() and set(extras) <= set(stamp.get("extras", []))


def check_python() -> None:
    """Raises InstallError where Debian has split venv off and left it out."""
    if importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip"):
        return
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    raise InstallError(
        f"{sys.executable} (Python {version}) has no venv module with pip. On Debian or Ubuntu: "
        f"apt-get install python{version}-venv (or python3-venv); elsewhere set PYTHON to another Python."
    )


def check_room(folder: Path, remedy: str, needed_gib: float = NEEDED_GIB) -> None:
    """Raises InstallError if the file system of `folder` has less than `needed_gib` GiB free."""
    free_gib = shutil.disk_usage(folder).free / 2**30
    if free_gib < needed_gib:
        raise InstallError(f"{folder} has {free_gib:.1f} GiB free, {needed_gib} GiB are needed: {remedy}")


def check_temporary_folder() -> None:
    """Raises InstallError if pip could not unpack its downloads in the temporary folder."""
    try:
        folder = Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise InstallError(f"no temporary folder can be written ({error}): free space or set TMPDIR.") from error
    check_room(folder, "free some, or set TMPDIR to a folder with room.")


def make_environment(environment: Path) -> None:
    """Makes an empty virtual environment in place of whatever is there."""
    # The base interpreter: the one running may be the very environment that is replaced.
    base = getattr(sys, "_base_executable", sys.executable)
    subprocess.run([base, "-m", "venv", "--clear", str(environment)], check=True, stdout=subprocess.DEVNULL)


def pip_install(environment: Path, extras: Sequence[str], log: Path) -> None:
    """Runs pip with its output in `log`, and says every quarter of a minute that it is still at it.

    Raises:
        InstallError: pip failed; the message has the end of its log.
    """
    target = f".[{','.join(extras)}]" if extras else "."
    command = [
        str(environment / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "--no-input",
        "--editable",
        target,
    ]
    # Packages on PYTHONPATH would count as installed.
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=REPOSITORY, env=variables, stdout=output, stderr=output)
        returncode = wait_with_progress(process, log)
    if returncode != 0:
        raise InstallError(explain(log))


def wait_with_progress(process: subprocess.Popen[bytes], log: Path) -> int:
    """Returns the exit code of `process`, printing a line of its log now and then; ends it if interrupted."""
    started_at_s = time.monotonic()
    try:
        while True:
            try:
                return process.wait(timeout=PROGRESS_INTERVAL_S)
            except subprocess.TimeoutExpired:
                elapsed_s = time.monotonic() - started_at_s
                print(f"  {elapsed_s:.0f} s: {current_phase(log)}", flush=True)
    except BaseException:
        process.terminate()
        process.wait()
        raise


def current_phase(log: Path) -> str:
    """Returns what pip is at, in its own words: `Collecting NAME…` or `Installing collected packages`."""
    lines = log.read_text(errors="replace").splitlines()
    phases = [line for line in lines if line.startswith(("Collecting", "Installing"))]
    return phases[-1].partition(":")[0].partition(" (from")[0] if phases else "starting"


def last_lines(log: Path, count: int) -> str:
    """Returns the last `count` lines of a log that are not blank."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-count:])


def explain(log: Path) -> str:
    """Returns why pip failed: its own last words, and the likely remedy where they are known."""
    tail = last_lines(log, 15)
    remedy = ""
    if "No space left on device" in tail:
        remedy = f"\nThe disk of {REPOSITORY} or of {tempfile.gettempdir()} (TMPDIR) is full: free some space."
    return f"pip failed. The end of its log, {log}:\n{tail}{remedy}"


def lock(path: Path) -> IO[str]:
    """Takes the installation lock, waiting for another installation with a message; held until closed."""
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("Another set-up is at work in this folder; waiting for it.", flush=True)
        fcntl.flock(file, fcntl.LOCK_EX)
    return file


def install(extras: Sequence[str]) -> None:
    """Brings <repository>/.venv up to date; a second call does nothing.

    Raises:
        InstallError: it could not be done, and what to do about it.
    """
    environment, state = REPOSITORY / ".venv", REPOSITORY / ".cluster"
    wanted = wanted_stamp(REPOSITORY)
    if is_installed(read_stamp(environment), wanted, extras):
        return
    state.mkdir(mode=0o700, exist_ok=True)
    with lock(state / "install.lock"):
        stamp = read_stamp(environment)
        if is_installed(stamp, wanted, extras):
            return
        check_python()
        check_room(REPOSITORY, "free some space there.")
        check_temporary_folder()
        print(f"Installing into {environment} (the first time takes minutes).", flush=True)
        started_at_s = time.monotonic()
        if stamp is None or stamp.get("home") != wanted["home"]:
            make_environment(environment)
            stamp = None
        (environment / STAMP).unlink(missing_ok=True)
        all_extras = sorted({*extras, *(stamp["extras"] if stamp else [])})
        pip_install(environment, all_extras, state / "install.log")
        (environment / STAMP).write_text(json.dumps({**wanted, "extras": all_extras}))
        print(f"Installed in {time.monotonic() - started_at_s:.0f} s.", flush=True)


def main() -> int:
    """Installs with the extras named on the command line; returns the exit code."""
    try:
        install(sys.argv[1:])
    except KeyboardInterrupt:
        print("\nInterrupted; the same command starts the installation again.", file=sys.stderr)
        return 3
    except (InstallError, OSError, subprocess.CalledProcessError) as error:
        print(f"error: the set-up failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
