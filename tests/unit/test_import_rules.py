"""The layering of the project: which folder may import which, and that importing a module starts nothing."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDERS = ("model", "rayjob", "serving", "cluster")
# Ours that a folder may import beside itself.
OURS = {"model": set(), "rayjob": {"model"}, "serving": {"model"}, "cluster": set()}
# All that these two may import beside the standard library. yaml comes with ray, which reads its own files by it.
ONLY = {"model": {"torch", "sentencepiece", "safetensors", "numpy"}, "cluster": {"ray", "yaml"}}
NEVER = {"model": {"ray", "mlflow"}, "rayjob": set(), "serving": {"mlflow"}, "cluster": {"torch"}}


def modules_of(folder: str) -> list[Path]:
    return sorted((REPOSITORY / folder).rglob("*.py"))


def imports_of(source: str) -> Iterator[tuple[int, str]]:
    """Yields (line, top-level package) of every import, those inside functions too; relative ones are the own."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module.partition(".")[0]


def violations(folder: str, source: str) -> list[tuple[int, str]]:
    """Returns the imports that the folder must not have."""
    return [(line, package) for line, package in imports_of(source) if not may_import(folder, package)]


def may_import(folder: str, package: str) -> bool:
    if package == folder or package in sys.stdlib_module_names:
        return True
    if package in (*FOLDERS, "tests"):
        return package in OURS[folder]
    return package not in NEVER[folder] and package in ONLY.get(folder, {package})


@pytest.mark.parametrize("folder", FOLDERS)
def test_folder_imports_only_what_the_design_allows(folder: str) -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}:{line} imports {package}"
        for path in modules_of(folder)
        for line, package in violations(folder, path.read_text())
    ]
    assert modules_of(folder)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("model", "import ray"),
        ("model", "import yaml"),
        ("model", "from rayjob.config import JobConfig"),
        ("rayjob", "def f():\n    import serving.http.app"),
        ("serving", "from mlflow import log_metric"),
        ("serving", "import rayjob"),
        ("cluster", "import torch.nn as nn"),
        ("cluster", "from model.config import ModelConfig"),
        ("rayjob", "if True:\n    from cluster import head"),
    ],
)
def test_forbidden_import_is_found(folder: str, source: str) -> None:
    assert len(violations(folder, source)) == 1


def test_importing_any_module_starts_nothing() -> None:
    names = [
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
        for folder in FOLDERS
        for path in modules_of(folder)
    ]
    # A fresh interpreter: in this one, other tests may have started what they like.
    finished = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(names)], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == ""


# Prints a line for each module whose import leaves a thread, a child process or a Ray session behind.
PROBE = """
import importlib, json, os, sys, threading
from pathlib import Path

def children():
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()

for name in json.loads(sys.argv[1]):
    threads = set(threading.enumerate())
    importlib.import_module(name)
    started = [thread.name for thread in threading.enumerate() if thread not in threads]
    ray = sys.modules.get("ray")
    if started or children() or (ray and ray.is_initialized()):
        print(name, "started", started, children())
"""
