"""The shell scripts: their syntax, and finding Python, on which all else stands."""

import os
import subprocess
from pathlib import Path

import pytest

from cluster.settings import REPOSITORY

SCRIPTS = sorted([*(REPOSITORY / "cluster").glob("*.sh"), REPOSITORY / ".ci" / "run"])


def bash(code: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=cwd,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )


def setup(code: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs bash code after sourcing setup.sh."""
    return bash(f'source "{REPOSITORY}/cluster/setup.sh"; {code}', cwd, **variables)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_parses_and_is_executable(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    assert os.access(script, os.X_OK) or script.name == "setup.sh"


def test_repository_is_found_from_any_folder(tmp_path: Path) -> None:
    (tmp_path / "with space").mkdir()
    finished = setup('echo "$repository|$CALLER_DIR"', tmp_path / "with space")
    assert finished.stdout == f"{REPOSITORY}|{tmp_path}/with space\n"


def test_old_python_is_refused_by_name(tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\nexit 1\n")  # fails the check of the version
    old.chmod(0o755)
    finished = setup("find_python", tmp_path, PYTHON=str(old))
    assert finished.returncode == 1
    assert f"PYTHON={old} is not a Python >= 3.11" in finished.stderr


def test_no_python_at_all_names_the_packages(tmp_path: Path) -> None:
    finished = setup('repository=/nowhere; PATH="$PWD"; find_python', tmp_path, PYTHON="")
    assert finished.returncode == 1
    assert "apt-get install python3 python3-venv" in finished.stderr


def test_unwritable_home_is_replaced_and_named(tmp_path: Path) -> None:
    finished = setup('echo "$HOME"', tmp_path, HOME="/proc/1")
    assert "HOME (/proc/1) cannot be written" in finished.stderr
    assert finished.stdout == f"{REPOSITORY}/.cluster/home\n"
