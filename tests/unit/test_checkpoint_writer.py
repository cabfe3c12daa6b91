"""A checkpoint written in shares, as the ranks of a run write it, but in one process."""

import errno
import shutil
from pathlib import Path

import pytest
import torch

from model.checkpoint import load_model, load_trainer_tensors, read_trainer_state, verify_checkpoint
from model.checkpoint_writer import Draft, remove_checkpoint, remove_leftovers
from model.complete import CheckpointError, Files
from model.llama import Llama
from tests.saved_run import CONFIG


@pytest.fixture(scope="module")
def llama() -> Llama:
    llama = Llama(CONFIG)
    llama.init_weights(0)
    return llama


TENSORS = {f"exp_avg.{i}": torch.full((3, i), float(i)) for i in range(9)}


def write_shares(draft: Draft, llama: Llama, tokenizer_folder: Path, n_ranks: int) -> Files:
    files = draft.write_model(llama.state_dict(), CONFIG, tokenizer_folder, {"val_loss": None})
    for rank in range(n_ranks):
        share = {name: TENSORS[name] for name in list(TENSORS)[rank::n_ranks]}
        files |= draft.write_trainer_tensors(share, rank, n_ranks)
    return files


@pytest.mark.parametrize("n_ranks", [1, 2, 4, 12])
def test_shares_of_any_number_of_ranks_load_as_one_state(
    tmp_path: Path, llama: Llama, small_tokenizer: Path, n_ranks: int
) -> None:
    draft = Draft(tmp_path, 7, "abc")
    folder = draft.commit(write_shares(draft, llama, small_tokenizer, n_ranks))
    assert folder == tmp_path / "step_00000007"
    verify_checkpoint(folder)
    loaded = load_trainer_tensors(folder)
    assert loaded.keys() == TENSORS.keys()
    assert all(loaded[name].equal(tensor) for name, tensor in TENSORS.items())
    assert load_model(folder).state_dict()["model.norm.weight"].equal(llama.state_dict()["model.norm.weight"])


def test_a_complete_that_lacks_a_share_is_refused(tmp_path: Path, llama: Llama, small_tokenizer: Path) -> None:
    draft = Draft(tmp_path, 7, "abc")
    files = write_shares(draft, llama, small_tokenizer, 4)
    del files["trainer/tensors-00002-of-00004.safetensors"]
    with pytest.raises(CheckpointError, match="does not name trainer/tensors-00002-of-00004"):
        verify_checkpoint(draft.commit(files))


def test_a_share_on_a_disk_of_its_own_is_noticed_before_the_commit(
    tmp_path: Path, llama: Llama, small_tokenizer: Path
) -> None:
    draft = Draft(tmp_path / "here", 7, "abc")
    files = draft.write_model(llama.state_dict(), CONFIG, small_tokenizer, {})
    files |= Draft(tmp_path / "elsewhere", 7, "abc").write_trainer_tensors(TENSORS, 0, 1)
    with pytest.raises(CheckpointError, match="all nodes share"):
        draft.commit(files)
    assert not (tmp_path / "here" / "step_00000007").exists()


def test_writers_of_one_step_do_not_meet(tmp_path: Path, llama: Llama, small_tokenizer: Path) -> None:
    dead, living = Draft(tmp_path, 7, "dead"), Draft(tmp_path, 7, "living")
    dead.write_trainer_tensors({"exp_avg.0": torch.zeros(3)}, 0, 1)
    folder = living.commit(write_shares(living, llama, small_tokenizer, 1))
    dead.write_trainer_tensors({"exp_avg.0": torch.ones(3)}, 0, 1)
    verify_checkpoint(folder)


def test_a_score_is_added_to_a_sound_checkpoint_and_never_taken_from_it(
    tmp_path: Path, llama: Llama, small_tokenizer: Path
) -> None:
    for val_loss, kept in [(None, None), (2.5, 2.5), (None, 2.5), (2.0, 2.5)]:
        draft = Draft(tmp_path, 7, "abc")
        files = draft.write_model(llama.state_dict(), CONFIG, small_tokenizer, {"val_loss": val_loss})
        folder = draft.commit(files | draft.write_trainer_tensors(TENSORS, 0, 1))
        verify_checkpoint(folder)
        assert read_trainer_state(folder)["val_loss"] == kept
        assert list(tmp_path.iterdir()) == [folder]


def write_scored(tmp_path: Path, llama: Llama, tokenizer: Path, val_loss: float | None) -> Path:
    draft = Draft(tmp_path, 7, "abc")
    files = draft.write_model(llama.state_dict(), CONFIG, tokenizer, {"val_loss": val_loss})
    return draft.commit(files | draft.write_trainer_tensors(TENSORS, 0, 1))


def test_a_kill_while_a_replaced_checkpoint_is_removed_leaves_the_new_one(
    tmp_path: Path, llama: Llama, small_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_scored(tmp_path, llama, small_tokenizer, None)
    remove = shutil.rmtree

    def killed(folder: Path, **options: bool) -> None:
        if folder.exists():
            raise KeyboardInterrupt
        remove(folder, **options)

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        write_scored(tmp_path, llama, small_tokenizer, 2.5)
    verify_checkpoint(tmp_path / "step_00000007")
    assert read_trainer_state(tmp_path / "step_00000007")["val_loss"] == 2.5


def test_a_rename_that_fails_puts_the_replaced_checkpoint_back(
    tmp_path: Path, llama: Llama, small_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_scored(tmp_path, llama, small_tokenizer, None)
    rename = Path.rename

    def failing(source: Path, target: Path) -> Path:
        if source.name == "step_00000007.abc.tmp":
            raise OSError(errno.EIO, "Input/output error")
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="Input/output"):
        write_scored(tmp_path, llama, small_tokenizer, 2.5)
    verify_checkpoint(folder)


def test_leftovers_of_saves_and_removals_are_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in ("step_00000007.tmp", "step_00000007.5f0c.tmp", "step_00000007.removed.tmp"):
        (tmp_path / name / "trainer").mkdir(parents=True)
    for name in ("step_00000007", "step_00000008.rejected", "samples", ".stage.json.5f0c.tmp"):
        (tmp_path / name).mkdir()
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *(".stage.json.5f0c.tmp", "samples", "step_00000007", "step_00000008.rejected")
    ]


def test_removal_leaves_nothing(tmp_path: Path, llama: Llama, small_tokenizer: Path) -> None:
    draft = Draft(tmp_path, 7, "abc")
    remove_checkpoint(draft.commit(write_shares(draft, llama, small_tokenizer, 1)))
    assert list(tmp_path.iterdir()) == []
