"""The Dockerfile and the manifests of KubeRay and SkyPilot, held to the facts of the product. None of them is run."""

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.settings import REPOSITORY
from rayjob.__main__ import _parser
from rayjob.config import JobConfig
from rayjob.config_file import load_config

CLUSTER = REPOSITORY / "cluster"
MANIFESTS = [CLUSTER / "sky.yaml", *sorted((CLUSTER / "kuberay").glob("*.yaml"))]
STORAGE = "/storage"


def load(path: Path) -> dict[str, Any]:
    loaded = yaml.safe_load(path.read_text())
    assert isinstance(loaded, dict)
    return loaded


def dockerfile(instruction: str) -> list[str]:
    lines = (CLUSTER / "Dockerfile").read_text().splitlines()
    return [line.removeprefix(f"{instruction} ") for line in lines if line.startswith(f"{instruction} ")]


def values(tree: Any, key: str) -> Iterator[Any]:
    """Yields every value of a key, at any depth."""
    if isinstance(tree, dict):
        yield from (value for name, value in tree.items() if name == key)
        yield from (found for value in tree.values() for found in values(value, key))
    elif isinstance(tree, list):
        yield from (found for value in tree for found in values(value, key))


def run_all_words(command: str) -> list[str]:
    """Returns the arguments of a call of run_all.sh."""
    words = shlex.split(command)
    assert words[:2] == ["bash", "cluster/run_all.sh"], command
    return words[2:]


def config_of(words: list[str]) -> JobConfig:
    """Returns the config that a call of run_all.sh, or of the job, trains by."""
    return load_config(REPOSITORY / words[0], words[1:])


@pytest.fixture(scope="module")
def rayjob() -> dict[str, Any]:
    spec = load(CLUSTER / "kuberay" / "rayjob.yaml")["spec"]
    assert isinstance(spec, dict)
    return spec


@pytest.fixture(scope="module")
def workers(rayjob: dict[str, Any]) -> dict[str, Any]:
    (group,) = rayjob["rayClusterSpec"]["workerGroupSpecs"]
    assert isinstance(group, dict)
    return group


def test_container_runs_the_one_command_as_process_1() -> None:
    (entrypoint,), (command,) = dockerfile("ENTRYPOINT"), dockerfile("CMD")
    words = run_all_words(shlex.join(json.loads(entrypoint) + json.loads(command)))  # the list form: no shell around it
    assert config_of(words).storage == STORAGE
    assert dockerfile("VOLUME") == [STORAGE]


def test_image_holds_what_it_needs_and_the_supported_python() -> None:
    copied = [word for line in dockerfile("COPY") for word in line.split()[:-1]]
    assert [path for path in copied if not (REPOSITORY / path).exists()] == []
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    packages = {name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages | {"cluster", "pyproject.toml"} <= set(copied)
    assert ".rayignore" in copied, "the upload of a job leaves out what it names"
    assert dockerfile("FROM") == ["python:3.11-slim"]
    assert run_all_words(dockerfile("RUN")[0]) == ["--help"]


def test_sky_gives_the_same_command_after_every_preemption() -> None:
    sky = load(CLUSTER / "sky.yaml")
    assert sky["run"].startswith("exec "), "a shell in between would keep the SIGTERM"
    config = config_of(run_all_words(sky["run"].removeprefix("exec ")))
    assert run_all_words(sky["setup"]) == ["--help"]
    assert list(sky["volumes"]) == [config.storage]
    assert sky["resources"]["accelerators"] == f"RTX5090:{config.train.num_workers}"
    assert sky["resources"]["use_spot"] is True


def test_kubernetes_runs_a_command_of_the_job_with_as_many_gpus_as_workers(
    rayjob: dict[str, Any], workers: dict[str, Any]
) -> None:
    words = shlex.split(rayjob["entrypoint"])
    assert words[:3] == ["python", "-m", "rayjob"]
    args = _parser().parse_args(words[3:])
    config = load_config(REPOSITORY / args.config, args.words)
    assert config.storage == STORAGE
    (container,) = workers["template"]["spec"]["containers"]
    assert workers["replicas"] * int(container["resources"]["limits"]["nvidia.com/gpu"]) == config.train.num_workers


def test_every_pod_of_kubernetes_mounts_the_storage_that_is_claimed(rayjob: dict[str, Any]) -> None:
    claim = load(CLUSTER / "kuberay" / "storage.yaml")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    specs = [template["spec"] for template in values(rayjob, "template")]
    assert len(specs) == 2
    for spec in specs:
        (volume,) = [one for one in spec["volumes"] if "persistentVolumeClaim" in one]
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        (container,) = spec["containers"]
        assert {"name": volume["name"], "mountPath": STORAGE} in container["volumeMounts"]


def test_ray_is_the_version_that_is_installed(rayjob: dict[str, Any]) -> None:
    (pinned,) = re.findall(r"ray\[[^]]*\]==([\d.]+)", (REPOSITORY / "pyproject.toml").read_text())
    assert rayjob["rayClusterSpec"]["rayVersion"] == pinned


def test_sigterm_of_a_pod_reaches_ray_which_drains_within_the_grace(workers: dict[str, Any]) -> None:
    spec = workers["template"]["spec"]
    assert workers["template"]["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"
    (container,) = spec["containers"]
    shell, option, line = container["command"]
    assert (shell, option) == ("/bin/bash", "-c")
    assert line.rpartition("; ")[2].startswith("exec "), "the shell must not stay in between"
    variables = {one["name"]: one["value"] for one in container["env"]}
    assert float(variables["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]) < spec["terminationGracePeriodSeconds"]


def test_token_is_asked_for_and_nothing_is_published(rayjob: dict[str, Any]) -> None:
    assert rayjob["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    assert list(values(rayjob, "serviceType")) == ["ClusterIP"]
    for path in [*MANIFESTS, CLUSTER / "Dockerfile"]:
        text = path.read_text()
        for word in (
            "0.0.0.0",
            "LoadBalancer",
            "NodePort",
            "hostNetwork",
            "hostPort",
            "Ingress",
            "EXPOSE",
            "privileged",
        ):
            assert word not in text, f"{path.name}: {word}"
    assert "ports" not in load(CLUSTER / "sky.yaml")["resources"]
