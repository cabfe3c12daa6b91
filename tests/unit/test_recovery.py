"""Every way in which a run folder can be damaged ends with the right step, one clear warning and no crash."""

import dataclasses
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from model.checkpoint import best_checkpoint, load_model, load_trainer_tensors
from model.checkpoint_writer import Draft
from model.complete import CheckpointError
from rayjob.training.attempt import STARTS_FILE
from rayjob.training.recovery import (
    find_sound_checkpoint,
    forget_ray_snapshot,
    load_run,
    read_run,
    settle_best_checkpoint,
    settle_checkpoints,
)
from tests.saved_run import CHECKPOINT_FILES, CONFIG, IDENTITY, SavedRun

pytestmark = pytest.mark.usefixtures("one_worker")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture(scope="module")
def saved(one_worker: None, tmp_path_factory: pytest.TempPathFactory, small_tokenizer: Path) -> Path:
    """A run folder with sound checkpoints of steps 1 and 2."""
    run = SavedRun(tmp_path_factory.mktemp("storage") / "runs" / "tiny", small_tokenizer)
    run.train([3.0, 2.0])
    return run.folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "runs" / "tiny")


def test_fixture_has_every_file_that_is_tried(saved: Path) -> None:
    newest = saved / "step_00000002"
    files = sorted(path.relative_to(newest).as_posix() for path in newest.rglob("*") if path.is_file())
    assert files == CHECKPOINT_FILES


@pytest.mark.parametrize("name", CHECKPOINT_FILES)
@pytest.mark.parametrize("damage", [truncate, empty, flip_a_bit, Path.unlink])
def test_a_damaged_file_means_the_checkpoint_before_with_one_warning(
    folder: Path, name: str, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    damage(folder / "step_00000002" / name)
    for find in (find_sound_checkpoint, settle_checkpoints):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert find(folder) == folder / "step_00000001"
        assert len(caplog.records) == 1
        assert f"{folder}/step_00000002" in caplog.text
        assert Path(name).name in caplog.text
    assert read_run(folder / "step_00000001", CONFIG, IDENTITY).step == 1
    caplog.clear()
    assert settle_checkpoints(folder) == folder / "step_00000001"
    assert caplog.records == [], "what is damaged was put aside and is told of once"
    assert (folder / "step_00000002.rejected").is_dir()


def test_both_checkpoints_damaged_means_the_beginning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2):
        truncate(folder / f"step_0000000{step}" / "model.safetensors")
    assert settle_checkpoints(folder) is None
    assert len(caplog.records) == 2
    assert sorted(path.name for path in folder.glob("step_*")) == ["step_00000001.rejected", "step_00000002.rejected"]


def test_leftovers_are_no_checkpoints(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "step_00000002" / "COMPLETE").unlink()  # as an interrupted copy leaves it
    for name in ("step_00000009.tmp", "step_00000009.5f0c.tmp", "step_00000001.bak"):
        shutil.copytree(folder / "step_00000001", folder / name)  # killed just before the rename; a person's copy
    (folder / ".step_00000010.tmp").mkdir()
    assert find_sound_checkpoint(folder) == folder / "step_00000001"
    assert len(caplog.records) == 1


@pytest.mark.parametrize("step", [3, 99])
def test_a_copy_under_the_name_of_another_step_is_left_out(
    folder: Path, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    copy = shutil.copytree(folder / "step_00000002", folder / f"step_{step:08d}")
    assert settle_checkpoints(folder) == folder / "step_00000002"
    [record] = caplog.records
    assert f"{copy} holds step 2: it is a copy under another step's name." in record.getMessage()
    assert not copy.exists()


@pytest.fixture
def stray(saved: Path, folder: Path, tmp_path: Path, small_tokenizer: Path) -> Path:
    """A sound checkpoint of step 3 of another run with the same settings, put into the folder."""
    other = SavedRun(tmp_path / "runs" / "other", small_tokenizer)
    other.train([None, None, 0.5])
    return shutil.copytree(other.folder / "step_00000003", folder / "step_00000003")


def test_a_checkpoint_of_another_run_is_left_out_and_kept(
    folder: Path, stray: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert settle_checkpoints(folder) == folder / "step_00000002"
    assert len(caplog.records) == 1
    assert "step_00000003 is a checkpoint of another run" in caplog.text
    load_model(folder / "step_00000003.rejected")


def test_an_older_checkpoint_of_another_run_is_not_taken_for_the_best(
    folder: Path, tmp_path: Path, small_tokenizer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = SavedRun(tmp_path / "runs" / "other", small_tokenizer)
    other.train([0.5])
    shutil.rmtree(folder / "step_00000001")
    shutil.copytree(other.folder / "step_00000001", folder / "step_00000001")
    assert settle_checkpoints(folder) == folder / "step_00000002"
    assert len(caplog.records) == 1
    assert "step_00000001 is a checkpoint of another run" in caplog.text
    assert best_checkpoint(folder) == folder / "step_00000002"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "trainer/tensors.safetensors"])
def test_when_the_best_is_damaged_the_next_best_counts(
    folder: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    flip_a_bit(folder / "step_00000002" / name)
    assert settle_best_checkpoint(folder) == folder / "step_00000001"
    assert "step_00000002" in caplog.text
    assert best_checkpoint(folder) == folder / "step_00000001"


def test_without_the_record_of_starts_any_sound_checkpoint_counts(folder: Path, stray: Path) -> None:
    (folder / STARTS_FILE).unlink()
    assert find_sound_checkpoint(folder) == stray


@pytest.mark.parametrize("damage", [truncate, empty, flip_a_bit, Path.unlink])
def test_a_damaged_record_of_starts_loses_no_checkpoint(
    folder: Path, small_tokenizer: Path, damage: Callable[[Path], None]
) -> None:
    for _ in range(2):
        SavedRun(folder, small_tokenizer)
    damage(folder / STARTS_FILE)
    assert find_sound_checkpoint(folder) == folder / "step_00000002"
    resumed = SavedRun(folder, small_tokenizer, resumed=read_run(folder / "step_00000002", CONFIG, IDENTITY))
    resumed.train([None])
    assert find_sound_checkpoint(folder) == folder / "step_00000003"


def test_one_wrong_digit_of_the_run_id_makes_no_checkpoint_a_strangers(folder: Path) -> None:
    path = folder / STARTS_FILE
    lines = path.read_text().splitlines()
    run_id = json.loads(lines[0])["run_id"]
    wrong = ("1" if run_id[0] == "0" else "0") + run_id[1:]
    path.write_text(lines[0].replace(run_id, wrong) + "\n")
    assert find_sound_checkpoint(folder) == folder / "step_00000002"


@pytest.mark.parametrize(
    "content", [None, "", '{"checkpoint_results": [{"checkpoint_dir_name"', '{"latest": "step_9"}']
)
def test_rays_snapshot_is_forgotten_whatever_it_says(folder: Path, content: str | None) -> None:
    snapshot = folder / "checkpoint_manager_snapshot.json"
    if content is not None:
        snapshot.write_text(content)
    forget_ray_snapshot(folder)
    assert not snapshot.exists()
    assert find_sound_checkpoint(folder) == folder / "step_00000002"


def test_checkpoint_of_another_corpus_tokenizer_or_shape_is_refused_with_both_values(saved: Path) -> None:
    newest = saved / "step_00000002"
    with pytest.raises(CheckpointError, match="corpus corpus, but the configuration gives corpus other"):
        load_run(newest, CONFIG, dataclasses.replace(IDENTITY, corpus="other"))
    with pytest.raises(CheckpointError, match="tokenizer tokenizer, but the configuration gives tokenizer other"):
        load_run(newest, CONFIG, dataclasses.replace(IDENTITY, tokenizer="other"))
    with pytest.raises(CheckpointError, match="d_ff=16.*d_ff=32"):
        load_run(newest, dataclasses.replace(CONFIG, d_ff=32), IDENTITY)
    with pytest.raises(CheckpointError, match="seed 7, but the configuration gives seed 8"):
        load_run(newest, CONFIG, dataclasses.replace(IDENTITY, seed=8))
    with pytest.raises(CheckpointError, match="global_batch_size 16, but the configuration gives global_batch_size 32"):
        load_run(newest, CONFIG, dataclasses.replace(IDENTITY, global_batch_size=32))


def test_checkpoint_written_before_shares_and_run_ids_still_loads(folder: Path, small_tokenizer: Path) -> None:
    """Such a checkpoint has trainer/tensors.safetensors, no RNG state and no run id."""
    tensors, state = load_run(folder / "step_00000002", CONFIG, IDENTITY)
    early = {name: tensor for name, tensor in tensors.items() if not name.startswith("rng.")}
    document = json.loads((folder / "step_00000002" / "trainer" / "state.json").read_text())
    for key in ("run_id", "best_step", "best_val_loss", "attempt", "config", "mlflow_run_id"):
        del document[key]
    draft = Draft(folder, 3, "early")
    files = draft.write_model(load_model(folder / "step_00000002").state_dict(), CONFIG, small_tokenizer, document)
    saved = draft.commit(files | draft.write_trainer_tensors(early, 0, 1))
    assert find_sound_checkpoint(folder) == saved
    assert read_run(saved, CONFIG, IDENTITY).tokens == state.tokens
    assert load_trainer_tensors(saved).keys() == early.keys()
