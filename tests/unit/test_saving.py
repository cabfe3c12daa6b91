"""Which checkpoints are kept and which one a run goes on from, with real checkpoint folders."""

import dataclasses
import logging
import shutil
from pathlib import Path

import pytest
import torch

from model.checkpoint import best_checkpoint, list_checkpoints, load_model
from model.complete import CheckpointError
from model.config import ModelConfig
from model.llama import Llama
from model.normalizer import Normalizer
from model.tokenizer import Tokenizer, train_tokenizer
from rayjob.config import CheckpointConfig, OptimizerConfig
from rayjob.training.optimizer import build_optimizer, load_optimizer_tensors, optimizer_tensors
from rayjob.training.recovery import find_sound_checkpoint, load_run
from rayjob.training.saving import RunIdentity, RunState, SavePolicy, save_run


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    model = train_tokenizer(["the old house by the river stood alone\n"] * 20, vocab_size=290)
    Tokenizer(model, Normalizer(detokenize=False, lowercase=False)).save(folder)
    return folder


CONFIG = ModelConfig(vocab_size=290, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=16, max_seq_len=8)


IDENTITY = RunIdentity("corpus", "tokenizer", seed=7, global_batch_size=16)


class Run:
    """A model that takes real steps and saves as a run does."""

    def __init__(self, folder: Path, tokenizer_folder: Path, keep: int = 1) -> None:
        self.folder, self._tokenizer_folder, self._keep = folder, tokenizer_folder, keep
        self.model = Llama(CONFIG)
        self.model.init_weights(0)
        self.optimizer = build_optimizer(self.model, OptimizerConfig())
        self.state = RunState(IDENTITY)

    def step(self) -> float:
        tokens = torch.arange(8)[None] + self.state.step
        sums = self.model(tokens, tokens + 1)
        sums.nats.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state = self.state.after_step(8)
        return float(sums.nats.detach())

    def save(self, val_loss: float | None = None) -> Path:
        state = dataclasses.replace(self.state, val_loss=val_loss)
        return save_run(self.folder, self.model, self.optimizer, state, self._tokenizer_folder, self._keep)

    def train(self, val_losses: list[float | None]) -> None:
        for val_loss in val_losses:
            self.step()
            self.save(val_loss)


@pytest.fixture
def run(tmp_path: Path, tokenizer_folder: Path) -> Run:
    return Run(tmp_path, tokenizer_folder)


def steps(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in list_checkpoints(folder)]


def test_best_and_latest_are_kept(run: Run) -> None:
    run.train([3.0, 2.0, 2.5, None, 2.7])
    assert steps(run.folder) == [2, 5]
    assert best_checkpoint(run.folder) == run.folder / "step_00000002"


def test_a_checkpoint_without_a_score_is_never_the_best_and_never_evicts_it(run: Run) -> None:
    run.train([3.0, None, float("nan"), None])
    assert steps(run.folder) == [1, 4]
    assert best_checkpoint(run.folder) == run.folder / "step_00000001"


def test_resumed_optimizer_takes_the_same_step(run: Run, tmp_path: Path) -> None:
    run.train([None, None])
    saved = run.folder / "step_00000002"
    tensors, state = load_run(saved, CONFIG, IDENTITY)
    model = load_model(saved).train()
    optimizer = build_optimizer(model, OptimizerConfig())
    load_optimizer_tensors(model, optimizer, tensors, state.step)
    again = Run(tmp_path / "again", tmp_path)
    again.model, again.optimizer, again.state = model, optimizer, state
    assert again.step() == run.step(), "the loss of a fixed batch before a save and after the load"
    for name, moment in optimizer_tensors(run.model, run.optimizer).items():
        assert moment.equal(optimizer_tensors(model, optimizer)[name])
    for mine, theirs in zip(run.model.parameters(), model.parameters(), strict=True):
        assert mine.equal(theirs)


def test_every_parameter_is_in_one_group_and_only_matrices_are_decayed(run: Run) -> None:
    groups = run.optimizer.param_groups
    members = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(members) == sorted(id(parameter) for parameter in run.model.parameters())
    for group in groups:
        assert {parameter.dim() >= 2 for parameter in group["params"]} == {group["weight_decay"] > 0}


@pytest.mark.parametrize("damage", ["truncate", "empty", "flip", "remove"])
def test_damaged_file_means_the_checkpoint_before(
    run: Run, damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run._keep = 2
    run.train([None, None])
    newest = run.folder / "step_00000002"
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    assert len(files) >= 8
    for file in files:
        original = file.read_bytes()
        if damage == "remove":
            file.unlink()
        else:
            middle = len(original) // 2
            flipped = original[:middle] + bytes([original[middle] ^ 1]) + original[middle + 1 :]
            file.write_bytes({"truncate": original[:middle], "empty": b"", "flip": flipped}[damage])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert find_sound_checkpoint(run.folder) == run.folder / "step_00000001", file
        assert len(caplog.records) == 1
        assert "step_00000002" in caplog.text
        file.write_bytes(original)
    assert find_sound_checkpoint(run.folder) == newest


def test_leftover_of_an_interrupted_save_is_not_a_checkpoint(run: Run) -> None:
    run.train([None])
    shutil.copytree(run.folder / "step_00000001", run.folder / "step_00000009")
    (run.folder / "step_00000009" / "COMPLETE").unlink()
    (run.folder / ".step_00000010.tmp").mkdir()
    assert find_sound_checkpoint(run.folder) == run.folder / "step_00000001"


def test_complete_copy_under_another_name_is_not_a_checkpoint(run: Run) -> None:
    run.train([None])
    for name in ("step_00000009.tmp", "step_00000001.bak"):  # killed just before the rename; a person's copy
        shutil.copytree(run.folder / "step_00000001", run.folder / name)
    assert find_sound_checkpoint(run.folder) == run.folder / "step_00000001"


def test_damaged_newer_checkpoint_takes_no_sound_ones_place(run: Run) -> None:
    run.train([None, None])
    damaged = run.folder / "step_00000009"
    shutil.copytree(run.folder / "step_00000002", damaged)
    weights = damaged / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # the size is right, so it looks complete
    run.train([None])
    assert find_sound_checkpoint(run.folder) == run.folder / "step_00000003"


def test_checkpoint_of_another_corpus_tokenizer_or_shape_is_refused_with_both_values(run: Run) -> None:
    run.train([None])
    saved = run.folder / "step_00000001"
    with pytest.raises(CheckpointError, match="corpus corpus, but the configuration gives corpus other"):
        load_run(saved, CONFIG, dataclasses.replace(IDENTITY, corpus="other"))
    with pytest.raises(CheckpointError, match="tokenizer tokenizer, but the configuration gives tokenizer other"):
        load_run(saved, CONFIG, dataclasses.replace(IDENTITY, tokenizer="other"))
    with pytest.raises(CheckpointError, match="d_ff=16.*d_ff=32"):
        load_run(saved, dataclasses.replace(CONFIG, d_ff=32), IDENTITY)
    with pytest.raises(CheckpointError, match="seed 7, but the configuration gives seed 8"):
        load_run(saved, CONFIG, dataclasses.replace(IDENTITY, seed=8))
    with pytest.raises(CheckpointError, match="global_batch_size 16, but the configuration gives global_batch_size 32"):
        load_run(saved, CONFIG, dataclasses.replace(IDENTITY, global_batch_size=32))


def test_saves_are_due_by_steps_or_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("rayjob.training.saving.time.monotonic", lambda: now[0])
    by_steps = SavePolicy(CheckpointConfig(interval_s=None, interval_steps=10))
    assert [step for step in range(1, 31) if by_steps.is_due(step)] == [10, 20, 30]
    by_time = SavePolicy(CheckpointConfig(interval_s=60))
    assert not by_time.is_due(1)
    now[0] = 161.0
    assert by_time.is_due(2)
    by_time.saved()
    assert not by_time.is_due(3)
