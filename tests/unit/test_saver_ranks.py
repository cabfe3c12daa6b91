"""Saving by several workers: real processes, real gloo, one run folder."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import model.checkpoint_writer
import rayjob.training.saver
from model.checkpoint import load_model, load_trainer_tensors, verify_checkpoint
from model.complete import read_complete
from rayjob.training.attempt import begin_attempt
from rayjob.training.recovery import read_run
from tests.ranks import run_ranks
from tests.saved_run import CONFIG, IDENTITY, SavedRun

N_RANKS = 3


def run_worker(rank: int, meeting: str, folder: Path, tokenizer_folder: Path) -> dict[str, Any]:
    """Saves steps 1, 2 and 3; while step 2 is written, the last rank's disk is full."""
    dist.init_process_group("gloo", meeting, rank=rank, world_size=N_RANKS)
    begun = [begin_attempt(folder, 0, None) if rank == 0 else None]
    dist.broadcast_object_list(begun)
    rayjob.training.saver._RETRY_S = 0.0
    run = SavedRun(folder, tokenizer_folder, attempt=begun[0])
    write = model.checkpoint_writer.write_tensors
    failures: list[str] = []

    def is_full(*_arguments: Any) -> dict[str, Any]:
        raise OSError(28, "No space left on device")

    run.saver._count_failure = lambda save: failures.append(save.outcome.error)  # type: ignore[method-assign]
    for step in (1, 2, 3):
        run.step()
        if step == 2 and rank == N_RANKS - 1:
            model.checkpoint_writer.write_tensors = is_full
        run.saver.save(run.state)
        run.saver.finish()
        model.checkpoint_writer.write_tensors = write
    dist.destroy_process_group()
    return {
        "failures": failures,
        "reported": [(saved and saved.name, state.step) for saved, state in run.reported],
        "tensors": {name: tensor.numpy() for name, tensor in run.tensors().items()},
        "share": run.saver._share,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("storage") / "runs" / "tiny"


@pytest.fixture(scope="module")
def workers(folder: Path, small_tokenizer: Path) -> list[dict[str, Any]]:
    return run_ranks(run_worker, N_RANKS, folder, small_tokenizer)


def test_every_rank_writes_its_share_and_together_they_are_the_state(
    workers: list[dict[str, Any]], folder: Path
) -> None:
    saved = folder / "step_00000003"
    verify_checkpoint(saved)
    shards = [name for name in read_complete(saved) if name.startswith("trainer/tensors")]
    assert shards == [f"trainer/tensors-0000{rank}-of-00003.safetensors" for rank in (1, 2, 3)]
    found = load_trainer_tensors(saved)
    wanted = workers[1]["tensors"]  # the ranks hold equal states
    for name in load_model(saved).state_dict():
        assert (load_model(saved).state_dict()[name].numpy() == wanted[name]).all()
        for moment in ("exp_avg", "exp_avg_sq"):
            assert (found[f"{moment}.{name}"].numpy() == wanted[f"{moment}.{name}"]).all()
    assert read_run(saved, CONFIG, IDENTITY).step == 3


def test_a_full_disk_of_one_rank_fails_the_save_on_all_and_the_next_succeeds(
    workers: list[dict[str, Any]], folder: Path
) -> None:
    for worker in workers:
        assert worker["failures"] == ["rank 2: [Errno 28] No space left on device"]
    assert sorted(path.name for path in folder.iterdir()) == ["starts.jsonl", "step_00000001", "step_00000003"]


def test_all_ranks_report_what_rank_0_committed(workers: list[dict[str, Any]]) -> None:
    assert workers[0]["reported"] == [("step_00000001", 1), ("step_00000003", 3)]
    for worker in workers[1:]:
        assert worker["reported"] == [(None, 1), (None, 3)]
