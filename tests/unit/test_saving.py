"""When a save is due, what its document tells and which checkpoints are kept, with real checkpoint folders."""

import dataclasses
import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel

import rayjob.training.saving
from model.checkpoint import best_checkpoint, list_checkpoints, load_model, load_trainer_tensors
from rayjob.config import CheckpointConfig, OptimizerConfig
from rayjob.training.evaluation import Evaluation
from rayjob.training.host_copy import restore_rng
from rayjob.training.optimizer import build_optimizer, load_optimizer_tensors, optimizer_tensors
from rayjob.training.recovery import find_sound_checkpoint, load_run, read_run
from rayjob.training.saving import RunState, SavePolicy, prune
from tests.saved_run import CONFIG, IDENTITY, SavedRun

pytestmark = pytest.mark.usefixtures("one_worker")


@pytest.fixture
def run(tmp_path: Path, small_tokenizer: Path) -> SavedRun:
    return SavedRun(tmp_path / "runs" / "tiny", small_tokenizer, keep=1)


def steps(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in list_checkpoints(folder)]


def test_best_and_latest_are_kept(run: SavedRun) -> None:
    run.train([3.0, 2.0, 2.5, None, 2.7])
    assert steps(run.folder) == [2, 5]
    assert best_checkpoint(run.folder) == run.folder / "step_00000002"


def test_a_checkpoint_without_a_score_is_never_the_best_and_never_evicts_it(run: SavedRun) -> None:
    run.train([3.0, None, float("nan"), None])
    assert steps(run.folder) == [1, 4]
    assert best_checkpoint(run.folder) == run.folder / "step_00000001"


def test_a_worse_model_after_a_resume_does_not_replace_the_best(run: SavedRun, small_tokenizer: Path) -> None:
    run.train([3.0, 2.0])
    state = read_run(run.folder / "step_00000002", CONFIG, IDENTITY)
    resumed = SavedRun(run.folder, small_tokenizer, keep=1, resumed=state)
    resumed.train([2.6, 2.4])
    assert steps(run.folder) == [2, 4]
    assert best_checkpoint(run.folder) == run.folder / "step_00000002"
    state = read_run(run.folder / "step_00000004", CONFIG, IDENTITY)
    assert (state.best_val_loss, state.best_step) == (2.0, 2)


def test_a_removal_that_fails_is_told_and_fails_no_save(
    run: SavedRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(folder: Path) -> None:
        raise PermissionError(f"not permitted: {folder}")

    monkeypatch.setattr(rayjob.training.saving, "remove_checkpoint", refuse)
    run.train([None, None])
    assert steps(run.folder) == [1, 2]
    assert "could not be removed: not permitted" in caplog.text


def test_what_is_kept_never_depends_on_folders_beyond_the_step(run: SavedRun) -> None:
    run.train([None, None])
    shutil.copytree(run.folder / "step_00000002", run.folder / "step_00000009")  # damaged, or the run were at step 9
    prune(run.folder, 2, keep=1)
    assert steps(run.folder) == [2, 9]


def test_document_tells_where_the_checkpoint_came_from(run: SavedRun) -> None:
    (run.folder / "mlflow_run_id").write_text("f00d" * 8 + "\n")
    run.train([2.5])
    document = json.loads((run.folder / "step_00000001" / "trainer" / "state.json").read_text())
    assert document["step"] == 1
    assert document["tokens"] == 8
    assert document["val_loss"] == document["best_val_loss"] == 2.5
    assert document["best_step"] == 1
    assert document["identity"] == dataclasses.asdict(IDENTITY)
    assert document["run_id"] == run.attempt.run_id
    assert document["attempt"] == run.attempt.id
    assert document["mlflow_run_id"] == "f00d" * 8
    assert document["config"]["run_name"] == "tiny"
    assert document["cost_usd"] == 0.0
    assert RunState.from_json(document) == run.state


def test_document_of_an_early_version_is_read_with_defaults(run: SavedRun) -> None:
    early = run.state.to_json()
    for key in ("best_val_loss", "best_step", "run_id"):
        del early[key]
    assert RunState.from_json(early) == dataclasses.replace(run.state, run_id=None)


def test_best_so_far_takes_no_loss_that_is_not_finite() -> None:
    state = RunState(IDENTITY, step=1)
    for val_loss, best in [(float("nan"), None), (3.0, 3.0), (float("inf"), 3.0), (2.0, 2.0), (2.5, 2.0)]:
        state = state.evaluated(Evaluation(val_loss, 0.5, 1.0, 8, 8))
        assert state.best_val_loss == best


def test_resumed_optimizer_and_generator_go_on_as_they_were(run: SavedRun) -> None:
    run.train([None, None])
    saved = run.folder / "step_00000002"
    tensors, state = load_run(saved, CONFIG, IDENTITY)
    drawn = torch.rand(4)
    restore_rng(tensors, torch.device("cpu"))
    assert torch.rand(4).equal(drawn)
    model = load_model(saved).train()
    optimizer = build_optimizer(model, OptimizerConfig())
    load_optimizer_tensors(model, optimizer, tensors, state.step)
    tokens = torch.arange(8)[None] + state.step
    sums = model(tokens, tokens + 1)
    assert float(sums.nats.detach()) == run.step(), "the loss of a fixed batch before a save and after the load"
    sums.nats.backward()
    optimizer.step()
    for name, moment in optimizer_tensors(run.model, run.optimizer).items():
        assert moment.equal(optimizer_tensors(model, optimizer)[name])
    for mine, theirs in zip(run.model.parameters(), model.parameters(), strict=True):
        assert mine.equal(theirs)


def test_names_in_a_checkpoint_do_not_depend_on_compile_or_ddp(run: SavedRun) -> None:
    wanted = set(run.model.state_dict())
    DistributedDataParallel(run.model)
    run.model.compile()  # in place; nothing is compiled before a forward
    run.saver.finish(run.state)
    saved = run.folder / "step_00000000"
    assert set(load_file(saved / "model.safetensors")) == wanted
    moments = {name for name in load_trainer_tensors(saved) if not name.startswith("rng.")}
    assert moments == {f"{moment}.{name}" for name in wanted for moment in ("exp_avg", "exp_avg_sq")}


def test_every_parameter_is_in_one_group_and_only_matrices_are_decayed(run: SavedRun) -> None:
    groups = run.optimizer.param_groups
    members = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(members) == sorted(id(parameter) for parameter in run.model.parameters())
    for group in groups:
        assert {parameter.dim() >= 2 for parameter in group["params"]} == {group["weight_decay"] > 0}


def test_damaged_newer_checkpoint_takes_no_sound_ones_place(run: SavedRun, caplog: pytest.LogCaptureFixture) -> None:
    run.train([None, None])
    damaged = run.folder / "step_00000009"
    shutil.copytree(run.folder / "step_00000002", damaged)
    weights = damaged / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # the size is right, so it looks complete
    run.train([None])
    with caplog.at_level(logging.ERROR):
        assert find_sound_checkpoint(run.folder) == run.folder / "step_00000003"


def test_saves_are_due_by_steps_or_by_time_until_one_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("rayjob.training.saving.time.monotonic", lambda: now[0])
    by_steps = SavePolicy(CheckpointConfig(interval_s=None, interval_steps=10))
    assert not by_steps.is_due(9)
    assert by_steps.is_due(10)
    assert by_steps.is_due(11), "another save was in the way at step 10"
    by_steps.save_begun()
    assert not by_steps.is_due(12)
    by_time = SavePolicy(CheckpointConfig(interval_s=60))
    assert not by_time.is_due(1)
    now[0] = 161.0
    assert by_time.is_due(2)
    by_time.save_begun()
    assert not by_time.is_due(3)


def test_checkpoint_has_twelve_bytes_for_each_parameter_of_a_large_model(run: SavedRun) -> None:
    run.train([None])
    folder = run.folder / "step_00000001"
    rng_bytes = sum(t.nbytes for name, t in load_trainer_tensors(folder).items() if name.startswith("rng."))
    n_bytes = sum(path.stat().st_size for path in folder.rglob("*.safetensors")) - rng_bytes
    # Beside the numbers there are only the headers, 8 bytes and at most 150 for each of the tensors.
    n_tensors = 3 * sum(1 for _ in run.model.parameters())
    assert 0 < n_bytes - 12 * CONFIG.n_params < 150 * n_tensors + 200
