"""The checkpoint format: complete or absent, never unpickled, and loaded by transformers as it is."""

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import model.checkpoint_writer
from model.checkpoint import (
    CheckpointError,
    best_checkpoint,
    checkpoint_name,
    is_complete,
    latest_checkpoint,
    list_checkpoints,
    load_config,
    load_model,
    load_trainer_tensors,
    read_trainer_state,
    resolve_checkpoint,
    verify_checkpoint,
)
from model.checkpoint_writer import save_checkpoint
from model.complete import COMPLETE, write_complete, write_file
from model.config import ModelConfig
from model.generate import generate
from model.llama import Llama
from model.normalizer import Normalizer
from model.sampling import SamplingParams
from model.tokenizer import Tokenizer, train_tokenizer
from tests.saved_run import CHECKPOINT_FILES

TEXT = "It was a bright cold day in April, and the clocks were striking thirteen.\n\nShe said nothing. " * 20
# The vocabulary is padded above the tokenizer's 300 pieces to a multiple of 64.
CONFIG = ModelConfig(vocab_size=320, d_model=48, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=64, max_seq_len=128)
TRAINER_TENSORS = {
    "optimizer.exp_avg.model.norm.weight": torch.arange(48.0),
    "rng.torch": torch.get_rng_state(),
}


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    Tokenizer(train_tokenizer([TEXT], vocab_size=300), Normalizer(False, False)).save(folder)
    return folder


@pytest.fixture(scope="module")
def llama() -> Llama:
    llama = Llama(CONFIG)
    llama.init_weights(1)
    with torch.no_grad():
        for parameter in llama.parameters():
            parameter.mul_(4)  # sharp enough that greedy text does not just repeat the last token
    return llama.eval()


@pytest.fixture
def save(tmp_path: Path, tokenizer_folder: Path, llama: Llama):
    def save(step: int, val_loss: float | None = None, **changes: Any) -> Path:
        arguments: dict[str, Any] = {
            "model": llama.state_dict(),
            "config": CONFIG,
            "tokenizer_folder": tokenizer_folder,
            "trainer_tensors": TRAINER_TENSORS,
            "trainer_state": {"epoch": 1, "val_loss": val_loss},
        }
        return save_checkpoint(tmp_path / "run", step, **(arguments | changes))

    return save


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_name_has_eight_digits() -> None:
    assert checkpoint_name(1200) == "step_00001200"


def test_saved_checkpoint_comes_back_bit_for_bit(save, llama: Llama) -> None:
    folder = save(1200, 3.5)
    assert folder.name == "step_00001200"
    assert sorted(files_of(folder)) == CHECKPOINT_FILES
    verify_checkpoint(folder)
    loaded = load_model(folder)
    assert not loaded.training
    assert loaded.config == load_config(folder) == CONFIG
    for (name, saved), parameter in zip(llama.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert torch.equal(saved, parameter), name
    tensors, state = load_trainer_tensors(folder), read_trainer_state(folder)
    assert tensors.keys() == TRAINER_TENSORS.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in TRAINER_TENSORS.items())
    assert state == {"epoch": 1, "val_loss": 3.5, "step": 1200}


def test_loss_of_a_fixed_batch_is_equal_bit_for_bit_after_loading(save, llama: Llama) -> None:
    batch = torch.arange(64).view(2, 32)
    assert torch.equal(load_model(save(1))(batch, batch).nats, llama(batch, batch).nats)


def test_embedding_and_head_are_one_tensor_in_the_file(save) -> None:
    weights = load_file(save(1) / "model.safetensors")
    assert "lm_head.weight" not in weights
    assert sum(tensor.numel() for tensor in weights.values()) == CONFIG.n_params


def test_weights_are_stored_in_fp32_whatever_they_were(save, llama: Llama) -> None:
    half = {name: tensor.bfloat16() for name, tensor in llama.state_dict().items()}
    weights = load_file(save(1, model=half) / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


def test_model_loads_in_another_dtype_with_exact_rotary_tables(save) -> None:
    loaded = load_model(save(1), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert loaded.model.rotary.cos.dtype == torch.float32


def test_transformers_loads_the_folder_as_it_is(save, llama: Llama) -> None:
    folder = save(1)
    ours = Tokenizer.load(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    passage = TEXT[:90] + " 😀  12\n"
    tokens = ours.encode(passage)
    assert tokenizer.encode(passage) == tokens
    batch = torch.tensor([tokens])
    sums = llama(batch[:, :-1], batch[:, 1:])
    loss = F.cross_entropy(theirs(batch).logits[0, :-1], batch[0, 1:])
    torch.testing.assert_close(sums.nats / sums.tokens, loss, atol=1e-5, rtol=0)  # fp32 sums in another order
    assert (theirs.generation_config.bos_token_id, theirs.generation_config.eos_token_id) == (1, 2)
    assert theirs.lm_head.weight is theirs.model.embed_tokens.weight


def test_100_greedy_tokens_equal_those_of_transformers(save, llama: Llama) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(save(1))
    prompt = [5, 200, 31]
    inputs = torch.tensor([prompt])
    settings: dict[str, Any] = {
        "max_new_tokens": 100,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    wanted = theirs.generate(inputs, attention_mask=torch.ones_like(inputs), **settings)[0, 3:].tolist()
    steps = generate(llama, prompt, SamplingParams(temperature=0), max_new_tokens=100, seed=0, eos_id=None)
    assert [step.token for step in steps] == wanted


@pytest.mark.parametrize("name", CHECKPOINT_FILES)
@pytest.mark.parametrize("damage", [Path.unlink, truncate, flip_a_bit, lambda path: path.write_bytes(b"")])
def test_every_damage_to_every_file_is_detected_and_named(save, name: str, damage) -> None:
    folder = save(1)
    damage(folder / name)
    with pytest.raises(CheckpointError) as caught:
        verify_checkpoint(folder)
    assert Path(name).name in str(caught.value)
    assert str(folder) in str(caught.value)


def test_every_bit_of_complete_counts(save) -> None:
    folder = save(1)
    content = (folder / "COMPLETE").read_bytes()
    for i in range(len(content)):
        (folder / "COMPLETE").write_bytes(content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :])
        with pytest.raises(CheckpointError):
            verify_checkpoint(folder)


@pytest.mark.parametrize("damage", [Path.unlink, truncate, flip_a_bit])
@pytest.mark.parametrize(
    ("name", "load"),
    [
        ("model.safetensors", load_model),
        ("config.json", load_model),
        ("config.json", load_config),
        ("trainer/state.json", read_trainer_state),
        ("trainer/tensors.safetensors", load_trainer_tensors),
    ],
)
def test_no_loader_reads_a_damaged_file(save, name: str, load, damage) -> None:
    folder = save(1)
    damage(folder / name)
    with pytest.raises(CheckpointError, match=Path(name).name):
        load(folder)


def test_cheap_check_sees_missing_files_and_wrong_sizes_but_reads_no_contents(save) -> None:
    folder = save(1)
    assert is_complete(folder)
    flip_a_bit(folder / "model.safetensors")
    assert is_complete(folder)
    truncate(folder / "model.safetensors")
    assert not is_complete(folder)
    assert not is_complete(folder.parent / "step_00000002")


class Explosive:
    """Unpickling it raises: a loader that unpickles would be found out."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("a file was unpickled",)


@pytest.mark.parametrize("name", ["model.safetensors", "trainer/tensors.safetensors"])
def test_a_pickle_in_place_of_tensors_is_refused_unopened(save, name: str) -> None:
    folder = save(1)
    load = load_model if name == "model.safetensors" else load_trainer_tensors
    (folder / name).write_bytes(pickle.dumps(Explosive()))
    with pytest.raises(CheckpointError, match="damaged"):
        load(folder)
    vouch_for(folder)  # even if COMPLETE vouches for it
    with pytest.raises(CheckpointError):
        load(folder)


def vouch_for(folder: Path) -> None:
    """Writes the COMPLETE that belongs to the files as they are now."""
    (folder / COMPLETE).unlink()
    contents = files_of(folder)
    write_complete(folder, {name: write_file(folder / name, [content]) for name, content in contents.items()})


def rewrite_weights(folder: Path, weights: dict[str, Tensor]) -> None:
    save_file(weights, folder / "model.safetensors")
    vouch_for(folder)


def test_loading_is_strict(save) -> None:
    folder = save(1)
    weights = load_file(folder / "model.safetensors")
    changes: list[dict[str, Tensor]] = [
        {name: tensor for name, tensor in weights.items() if name != "model.norm.weight"},
        weights | {"model.extra": torch.zeros(1)},
        {f"_orig_mod.{name}": tensor for name, tensor in weights.items()},
        weights | {"model.norm.weight": torch.ones(47)},
    ]
    for changed in changes:
        rewrite_weights(folder, changed)
        with pytest.raises(CheckpointError, match="does not fit"):
            load_model(folder)


def test_weights_that_are_not_finite_are_refused_by_name(save) -> None:
    folder = save(1)
    weights = load_file(folder / "model.safetensors")
    rewrite_weights(folder, weights | {"model.norm.weight": torch.full((48,), float("nan"))})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        load_model(folder)


def test_another_architecture_is_refused(save) -> None:
    folder = save(1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    vouch_for(folder)
    with pytest.raises(CheckpointError, match=r"config\.json.*model_type"):
        load_model(folder)


def test_prefixed_state_dict_is_refused_before_anything_is_written(save, llama: Llama, tmp_path: Path) -> None:
    for prefix in ("module.", "_orig_mod."):
        with pytest.raises(ValueError, match="unwrapped"):
            save(1, model={prefix + name: tensor for name, tensor in llama.state_dict().items()})
    assert not (tmp_path / "run").exists()


class Interrupted(BaseException):
    """Stands for the kill of the process."""


@pytest.mark.parametrize("function", ["remove_leftovers", "write_tensors", "write_file", "write_complete"])
def test_an_interrupted_save_is_no_checkpoint_and_the_next_save_cleans_up(
    save, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, function: str
) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        raise Interrupted

    previous = save(1)
    with monkeypatch.context() as patch:
        original = getattr(model.checkpoint_writer, function)
        patch.setattr(model.checkpoint_writer, function, interrupted)
        with pytest.raises(Interrupted):
            save(2)
    assert list_checkpoints(tmp_path / "run") == [previous]
    assert resolve_checkpoint(tmp_path / "run") == previous
    third = save(3)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [previous.name, third.name]


def test_a_folder_torn_after_any_file_is_no_checkpoint(save, tmp_path: Path) -> None:
    content = files_of(save(1))
    for n_files in range(len(CHECKPOINT_FILES)):
        torn = tmp_path / f"run{n_files}" / "step_00000002"
        for name in [*CHECKPOINT_FILES[1:], "COMPLETE"][:n_files]:
            (torn / name).parent.mkdir(parents=True, exist_ok=True)
            (torn / name).write_bytes(content[name])
        assert not is_complete(torn)
        assert list_checkpoints(torn.parent) == []


def test_saving_a_sound_step_again_keeps_it(save) -> None:
    before = files_of(save(1, 3.0))
    assert files_of(save(1, 2.0)) == before


def test_saving_a_damaged_step_again_replaces_it(save) -> None:
    folder = save(1)
    flip_a_bit(folder / "model.safetensors")
    save(1)
    verify_checkpoint(folder)


def test_everything_is_synced_before_complete_and_complete_before_the_rename(
    save, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def record_fsync(descriptor: int) -> None:
        fsync(descriptor)
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    def record_rename(path: Path, target: Path) -> Path:
        done.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "rename", record_rename)
    save(1)
    n_files = len(CHECKPOINT_FILES) - 1
    assert sorted(done[:n_files]) == sorted(Path(name).name for name in CHECKPOINT_FILES[1:])
    assert done[n_files] == "COMPLETE"
    assert sorted(done[n_files + 1 : -2]) == ["step_00000001.save.tmp", "trainer"]
    assert done[-2:] == ["rename", "run"]


def test_checkpoints_are_listed_by_step(save, tmp_path: Path) -> None:
    folders = [save(step) for step in (100_000_000, 20, 3)]
    (tmp_path / "run" / "step_notes").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("")
    assert list_checkpoints(tmp_path / "run") == folders[::-1]
    assert latest_checkpoint(tmp_path / "run") == folders[0]


def test_best_has_the_lowest_finite_val_loss_and_the_earliest_on_a_tie(save, tmp_path: Path) -> None:
    for step, val_loss in [
        (1, None),
        (2, 3.0),
        (3, 2.5),
        (4, 2.5),
        (5, float("nan")),
        (6, float("-inf")),
        (7, 4),
    ]:
        save(step, val_loss)
    best = best_checkpoint(tmp_path / "run")
    assert best is not None
    assert best.name == "step_00000003"
    assert resolve_checkpoint(tmp_path / "run") == best


def test_without_scores_there_is_no_best_and_latest_is_taken(save, tmp_path: Path) -> None:
    save(1)
    latest = save(2, float("nan"))
    assert best_checkpoint(tmp_path / "run") is None
    assert resolve_checkpoint(tmp_path / "run") == latest


def test_a_score_that_cannot_be_read_does_not_hide_the_others(save, tmp_path: Path) -> None:
    state = save(1, 1.0) / "trainer" / "state.json"
    state.write_bytes(b"x" * state.stat().st_size)
    readable = save(2, 2.0)
    assert best_checkpoint(tmp_path / "run") == readable


def test_a_score_that_a_flipped_bit_has_made_does_not_count(save, tmp_path: Path) -> None:
    damaged, best = save(1, 3.0), save(2, 2.0)
    state = damaged / "trainer" / "state.json"
    state.write_bytes(state.read_bytes().replace(b'"val_loss": 3.0', b'"val_loss": 1.0'))
    assert best_checkpoint(tmp_path / "run") == best


def test_a_checkpoint_folder_resolves_to_itself(save) -> None:
    folder = save(1)
    assert resolve_checkpoint(folder) == folder
    moved = folder.parent / "published"
    shutil.copytree(folder, moved)
    assert resolve_checkpoint(moved) == moved


def test_what_cannot_be_resolved_is_refused_with_the_reason(save, tmp_path: Path) -> None:
    torn = save(1)
    truncate(torn / "model.safetensors")
    empty = tmp_path / "empty"
    empty.mkdir()
    reasons = {
        torn: r"model\.safetensors is damaged",
        tmp_path / "run": r"only incomplete ones \(step_00000001\)",
        empty: "none",
        tmp_path / "absent": "does not exist",
        torn / "config.json": "is a file",
    }
    for path, reason in reasons.items():
        with pytest.raises(CheckpointError, match=reason):
            resolve_checkpoint(path)


def test_absent_run_folder_has_no_checkpoints(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path / "absent") == []
    assert latest_checkpoint(tmp_path / "absent") is None
    assert best_checkpoint(tmp_path / "absent") is None


def test_no_module_of_ours_can_unpickle() -> None:
    for path in Path(model.checkpoint_writer.__file__).parent.glob("*.py"):
        source = path.read_text()
        assert "import pickle" not in source
        assert "torch.load" not in source
