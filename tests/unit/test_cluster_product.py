import json
import sys
from pathlib import Path

import pytest

from cluster import product
from cluster.restart_policy import Budgets

RESOLVED = {
    "run_name": "small",
    "storage": "/data/st",
    "data": {"paths": []},
    "failure": {"max_failures": 3, "max_preemptions": -1},
    "derived": {"storage_folder": "/data/st", "run_folder": "/data/st/runs/small"},
}


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Calls of the product's command line; it answers with RESOLVED."""
    calls: list[tuple[str, ...]] = []

    def call(*arguments: str, caller: Path) -> str:
        calls.append((*arguments, str(caller)))
        return json.dumps(RESOLVED)

    monkeypatch.setattr(product, "call", call)
    return calls


@pytest.mark.parametrize(
    ("arguments", "config", "overrides"),
    [
        ([], product.DEFAULT_CONFIG, []),
        (["seed=1"], product.DEFAULT_CONFIG, ["seed=1"]),
        (["my.yaml"], Path("/home/u/my.yaml"), []),
        (["/etc/my.yaml", "seed=1", "a.b=c"], Path("/etc/my.yaml"), ["seed=1", "a.b=c"]),
    ],
)
def test_arguments_are_a_config_and_overrides(arguments: list[str], config: Path, overrides: list[str]) -> None:
    assert product.split_arguments(arguments, Path("/home/u")) == (config, overrides)


def test_config_file_may_have_an_equals_sign_in_its_name(tmp_path: Path) -> None:
    (tmp_path / "lr=1.yaml").touch()
    assert product.split_arguments(["lr=1.yaml"], tmp_path) == (tmp_path / "lr=1.yaml", [])


def test_run_is_pinned_to_absolute_paths(answers: list[tuple[str, ...]]) -> None:
    run = product.check_config(Path("/home/u/my.yaml"), ["seed=1"], Path("/home/u"))
    assert answers == [("show-config", "--config", "/home/u/my.yaml", "seed=1", "--json", "/home/u")]
    assert (run.name, run.folder, run.storage) == ("small", "/data/st/runs/small", Path("/data/st"))
    assert run.arguments == ("--config", "/home/u/my.yaml", "seed=1", 'storage="/data/st"')
    assert run.budgets == Budgets(max_failures=3, max_losses=-1)


def test_runs_of_one_name_in_two_storages_have_two_keys() -> None:
    runs = [product.Run("small", f"/{storage}/runs/small", Path(storage), (), Budgets(0, 0)) for storage in "ab"]
    assert len({run.key for run in runs}) == 2
    assert all(run.key.startswith("small-") for run in runs)


def test_relative_paths_mean_the_folder_of_the_caller() -> None:
    resolved = {"storage": "st", "data": {"paths": ["books/*.txt", "/a b", "hf://x/y"]}}
    assert product.absolute_overrides(resolved, Path("/home/u")) == [
        'storage="/home/u/st"',
        'data.paths=["/home/u/books/*.txt", "/a b", "hf://x/y"]',
    ]


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/v")
    assert product.absolute("~/st/", Path("/home/u")) == "/home/v/st"


def test_answer_is_the_last_line_and_a_folder_of_the_caller_shadows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A stand-in for the interpreter that shows how it is called.
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho noise\necho "$PWD $*"\n')
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    assert product.call("status", "--json", caller=tmp_path) == f"{tmp_path} -P -m rayjob status --json"


def test_exit_code_of_the_product_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(product.CommandError) as caught:
        product.call("show-config", caller=tmp_path)
    assert caught.value.exit_code == 1
