"""The training loop in this process: one worker with real gloo, model, corpus and checkpoints; only Ray is left out.

A notice comes at an exact moment, as Ray's would: the loop reads it from `own_notice`.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from model.checkpoint import best_checkpoint, list_checkpoints, load_model, load_trainer_state, verify_checkpoint
from model.config import ModelConfig
from model.normalizer import Normalizer
from model.tokenizer import Tokenizer, train_tokenizer
from rayjob.config import CheckpointConfig, CostConfig, JobConfig, OptimizerConfig, TokenizerConfig, TrainConfig
from rayjob.corpus.blocks import Manifest, Row, SplitTotals, write_block
from rayjob.lease import Fence, LeaseLostError
from rayjob.training import entry, loop, recorder
from rayjob.training.failure import has_failed, raise_failure
from rayjob.training.loop import TrainTask, TrainWorker
from rayjob.training.metrics import MetricsRow, Spent, read_metrics
from rayjob.training.notice import GaveWay, Notice
from rayjob.training.saver import SaveFailedError
from rayjob.training.saving import RunState
from rayjob.training.step_clock import StepSplit
from rayjob.training.trial import MicroBatchTrial

N_STEPS = 12
MODEL = ModelConfig(vocab_size=300, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=16, max_seq_len=8)
SPLIT = {field.name for field in dataclasses.fields(StepSplit)}
TIMES = {"tokens_per_s", "mfu_pct", "data_wait_pct", "cost_usd", "elapsed_s", "wall_time"} | SPLIT


@pytest.fixture(scope="module", autouse=True)
def one_worker() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 training windows and 12 of validation of random tokens, in blocks, and a tokenizer."""
    folder = tmp_path_factory.mktemp("corpus")
    model = train_tokenizer(["the old house by the river stood alone\n"] * 20, vocab_size=300)
    tokenizer = Tokenizer(model, Normalizer(detokenize=False, lowercase=False))
    tokenizer.save(folder / "tokenizer")
    sides = {}
    for split, n_tokens in (("train", 8 * 40 + 1), ("val", 8 * 12 + 4)):
        tokens = np.random.default_rng(len(split)).integers(5, 290, n_tokens).astype(np.uint16)
        row = [Row("book", tokens)]
        block = write_block(folder / "tokens" / split / "part-00000.parquet", row, unit_hash="u", text_bytes=9)
        sides[split] = SplitTotals(1, n_tokens, 0, 0, 9, "", [block])
    inputs: dict[str, Any] = {}
    Manifest(
        folder.name.replace("-", ""), inputs, tokenizer.hash, "uint16", [], {}, sides["train"], sides["val"], {}, {}, []
    ).save(folder / "tokens")
    return folder


class Run:
    """A run of the loop; every start is a new group of one worker."""

    def __init__(self, corpus: Path, storage: Path, monkeypatch: pytest.MonkeyPatch, keep: int = 2) -> None:
        self.config = JobConfig(
            storage=str(storage),
            seed=7,
            tokenizer=TokenizerConfig(vocab_size=300),
            model=MODEL,
            train=TrainConfig(
                num_workers=1,
                use_gpu=False,
                global_batch_size=6,
                micro_batch_size=3,
                max_steps=N_STEPS,
                precision="fp32",
                eval_interval=4,
            ),
            optimizer=OptimizerConfig(lr=1e-2, min_lr=1e-3, warmup_steps=2),
            checkpoint=CheckpointConfig(interval_s=None, interval_steps=3, keep=keep),
            cost=CostConfig(),
        )
        self.folder = self.config.run_folder
        (self.folder / "lease").mkdir(parents=True)
        (self.folder / "lease" / "00000001.json").touch()
        self._corpus = corpus
        self._monkeypatch = monkeypatch
        self.notice = Notice()
        monkeypatch.setattr(loop, "_report", lambda *_: None)
        monkeypatch.setattr(recorder, "StopListener", lambda _: SimpleNamespace(is_requested=False))

    def start(self, prepare: Callable[[TrainWorker], None] = lambda _: None) -> TrainWorker:
        """Trains until the end or until the workers give way; `prepare` plants what happens meanwhile."""
        self.notice = Notice()
        self._monkeypatch.setattr(loop, "own_notice", self.notice)
        worker = TrainWorker(self.task(), torch.device("cpu"))
        prepare(worker)
        worker.train()
        return worker

    def task(self) -> TrainTask:
        tokens, tokenizer, spent = self._corpus / "tokens", self._corpus / "tokenizer", Spent(0.0, 0.0)
        return TrainTask(self.config, tokens, tokenizer, spent, None, Fence(self.folder))

    def give_way(self, prepare: Callable[[TrainWorker], None] = lambda _: None) -> None:
        with pytest.raises(GaveWay):
            self.start(prepare)

    def notice_in_validation(self, worker: TrainWorker, nth_batch: int = 2) -> None:
        """Gives notice while the nth batch of the next validation is made."""
        windows, batches = worker.val_windows, iter(range(1, 100))
        make = windows.batch

        def batch(ids: Any, size: int) -> Any:
            if next(batches) == nth_batch:
                self.notice.give("preemption notice")
            return make(ids, size)

        windows.batch = batch  # type: ignore[method-assign]

    def rows(self) -> list[MetricsRow]:
        return list(read_metrics(self.folder))

    def record(self) -> list[tuple[object, ...]]:
        """All that must be equal in an interrupted run, NaN comparable to itself."""
        names = [field.name for field in dataclasses.fields(MetricsRow) if field.name not in TIMES]
        return [tuple(repr(getattr(row, name)) for name in names) for row in self.rows()]

    def assert_equals(self, other: "Run") -> None:
        assert self.record() == other.record()
        mine, theirs = list_checkpoints(self.folder)[-1], list_checkpoints(other.folder)[-1]
        assert mine.name == theirs.name == f"step_{N_STEPS:08d}"
        weights, others = load_model(mine).state_dict(), load_model(theirs).state_dict()
        assert all(weights[name].equal(others[name]) for name in others)
        moments, others = load_trainer_state(mine)[0], load_trainer_state(theirs)[0]
        assert all(moments[name].equal(others[name]) for name in others)
        best, others_best = best_checkpoint(self.folder), best_checkpoint(other.folder)
        assert best is not None
        assert others_best is not None
        assert best.name == others_best.name


@pytest.fixture
def undisturbed(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    run = Run(corpus, tmp_path / "undisturbed", monkeypatch)
    run.start()
    return run


@pytest.fixture
def run(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(corpus, tmp_path / "run", monkeypatch)


def test_run_has_a_row_for_each_step_and_evaluates_where_it_should(undisturbed: Run) -> None:
    assert [row.step for row in undisturbed.rows()] == list(range(1, N_STEPS + 1))
    assert [row.step for row in undisturbed.rows() if row.val_loss is not None] == [4, 8, 12]
    assert not any(row.skipped for row in undisturbed.rows())


def test_every_tenth_step_is_split_up_in_the_row_after_it(undisturbed: Run) -> None:
    rows = undisturbed.rows()
    assert [row.step for row in rows if row.forward_s is not None] == [2, 12], "of steps 1 and 11"
    for row in (rows[1], rows[11]):
        parts = {name: getattr(row, name) for name in SPLIT}
        assert all(seconds is not None and seconds >= 0 for seconds in parts.values())
        assert parts["forward_s"] > 0
        assert parts["backward_s"] > 0
        assert sum(parts.values()) < row.elapsed_s, "they do not overlap, and the step before lies within the run"


@pytest.mark.parametrize("keep", [1, 2])
def test_notice_in_every_validation_leaves_the_run_as_it_would_have_been(
    undisturbed: Run, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    run = Run(corpus, tmp_path / "run", monkeypatch, keep=keep)
    run.give_way(run.notice_in_validation)
    for step in (4, 8, N_STEPS):
        assert run.rows()[-1].step == step - 1, "the half result is not logged"
        latest = list_checkpoints(run.folder)[-1]
        assert latest.name == f"step_{step:08d}"
        assert load_trainer_state(latest)[1]["val_loss"] is None
        if step == 4:
            run.give_way(run.notice_in_validation)  # in the one that is made up: again nothing is gained or lost
            assert run.rows()[-1].step == step - 1
        if step < N_STEPS:
            run.give_way(lambda worker: run.notice_in_validation(worker, nth_batch=7))  # in the one after it
    run.start()
    run.assert_equals(undisturbed)


def test_notice_between_steps_loses_no_step(undisturbed: Run, run: Run, caplog: pytest.LogCaptureFixture) -> None:
    def give_at_step_5(worker: TrainWorker) -> None:
        make = worker.feed.step_batch

        def step_batch(index: int) -> Any:
            if index == 4:
                run.notice.give("preemption notice")
            return make(index)

        worker.feed.step_batch = step_batch  # type: ignore[method-assign]

    run.give_way(give_at_step_5)
    assert run.rows()[-1].step == 5
    assert list_checkpoints(run.folder)[-1].name == "step_00000005"
    assert "preemption notice at step 5, saved step 5 in " in caplog.text
    run.start()
    run.assert_equals(undisturbed)


def test_notice_during_a_save_leaves_one_sound_checkpoint_of_each_step(undisturbed: Run, run: Run) -> None:
    def give_when_a_save_begins(worker: TrainWorker) -> None:
        save = worker.saver.save

        def save_and_give(state: RunState) -> bool:
            is_taken = save(state)
            run.notice.give("preemption notice")
            run.notice.give("once more")
            return is_taken

        worker.saver.save = save_and_give  # type: ignore[method-assign]

    run.give_way(give_when_a_save_begins)
    assert [folder.name for folder in list_checkpoints(run.folder)] == ["step_00000003", "step_00000004"]
    for folder in list_checkpoints(run.folder):
        verify_checkpoint(folder)
    assert not list(run.folder.glob("*.tmp")), "nothing is left half written"
    run.start()
    run.assert_equals(undisturbed)


def test_notice_before_step_1_ends_cleanly_and_leaves_no_checkpoint(undisturbed: Run, run: Run) -> None:
    run.give_way(lambda _: run.notice.give("preemption notice"))
    assert list_checkpoints(run.folder) == []
    assert run.rows() == []
    run.start()
    run.assert_equals(undisturbed)


def with_micro_batch(run: Run, size: Any) -> Run:
    run.config = dataclasses.replace(run.config, train=dataclasses.replace(run.config.train, micro_batch_size=size))
    return run


def test_auto_run_is_bit_for_bit_the_run_with_the_size_that_was_found(
    corpus: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_micro_batch(run, "auto").start()
    (size,) = {row.micro_batch_size for row in run.rows()}
    assert 6 % size == 0
    given = with_micro_batch(Run(corpus, tmp_path / "given", monkeypatch), size)
    given.start()
    run.assert_equals(given)


def test_resumed_auto_run_takes_the_size_it_had_and_equals_the_undisturbed_one(
    corpus: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = with_micro_batch(Run(corpus, tmp_path / "undisturbed", monkeypatch), 2)
    undisturbed.start()

    def seem_fastest(size: int) -> Callable[[Any, int], float]:
        return lambda _trial, tried: 0.1 if tried == size else float(tried)

    monkeypatch.setattr(MicroBatchTrial, "__call__", seem_fastest(2))
    with_micro_batch(run, "auto").give_way(run.notice_in_validation)
    monkeypatch.setattr(MicroBatchTrial, "__call__", seem_fastest(6))
    run.start()
    assert {row.micro_batch_size for row in run.rows()} == {2}
    run.assert_equals(undisturbed)


def enter(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the loop as Ray enters it; only the device comes from elsewhere."""
    monkeypatch.setattr(entry, "set_up_device", lambda _: torch.device("cpu"))
    (run.folder / "config.yaml").touch()
    entry.train_loop({"task": run.task()})


def test_rays_entry_checks_and_trains_as_the_loop_does(
    undisturbed: Run, run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        enter(run, monkeypatch)
    assert "preflight\n  step " in caplog.text
    run.assert_equals(undisturbed)


def test_start_that_is_refused_fails_the_run_with_its_reason_and_is_not_tried_again(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []
    monkeypatch.setattr(MicroBatchTrial, "__call__", lambda _trial, size: tried.append(size))
    enter(with_micro_batch(run, "auto"), monkeypatch)  # returns: an error would have Ray start it again
    assert tried == [6, 2, 1]
    with pytest.raises(RuntimeError, match=r"out of memory, and there is no smaller micro-batch"):
        raise_failure(run.folder)
    enter(run, monkeypatch)
    assert tried == [6, 2, 1], "by another worker of the same driver"
    assert run.rows() == []


def test_preflight_changes_nothing_of_the_run_and_can_be_left_out(
    undisturbed: Run, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        run.config = dataclasses.replace(run.config, train=dataclasses.replace(run.config.train, preflight=False))
        run.start()
        assert "preflight" not in caplog.text
    run.assert_equals(undisturbed)


def plant_nan(worker: TrainWorker, step: int) -> None:
    """Makes the embedding's output NaN while `step` is done, but not when the bad number is looked for."""

    def poison(_module: object, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        return output * torch.nan if worker.model.training and worker.state.step + 1 == step else output

    worker.model.model.embed_tokens.register_forward_hook(poison)


def test_run_with_a_skipped_step_is_resumed_bit_for_bit(
    corpus: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Run(corpus, tmp_path / "whole", monkeypatch)
    whole.start(lambda worker: plant_nan(worker, 3))
    assert [row.step for row in whole.rows() if row.skipped] == [3]
    assert [row.loss for row in whole.rows() if row.skipped] == [pytest.approx(float("nan"), nan_ok=True)]

    def plant_nan_and_notice(worker: TrainWorker) -> None:
        plant_nan(worker, 3)
        run.notice_in_validation(worker)

    run.give_way(plant_nan_and_notice)
    assert [folder.name for folder in list_checkpoints(run.folder)] == ["step_00000003", "step_00000004"]
    run.start()
    run.assert_equals(whole)


def test_saves_that_fail_because_another_driver_has_the_run_do_not_end_it_there(run: Run) -> None:
    task = dataclasses.replace(run.task(), fence=Fence(run.folder / "lease" / "00000007.json"))
    worker: Any = SimpleNamespace(task=task, config=run.config)
    with pytest.raises(LeaseLostError):
        TrainWorker._end_unsaved(worker, SaveFailedError("three saves in a row failed"))
    assert not has_failed(run.folder)


def test_bad_steps_in_a_row_end_the_run_and_the_checkpoint_before_is_sound(run: Run) -> None:
    def plant(worker: TrainWorker) -> None:
        save = worker.saver.save

        def save_and_wait(state: RunState) -> bool:
            """Steps of a millisecond would overtake the save of step 4, and that of step 6 be put off to a bad step."""
            is_taken = save(state)
            worker.saver.finish()
            return is_taken

        worker.saver.save = save_and_wait  # type: ignore[method-assign]

        def spoil(_module: object, _inputs: object) -> None:
            if worker.state.step == 6:
                worker.model.model.norm.weight.data[0] = torch.nan

        worker.model.register_forward_pre_hook(spoil)

    run.start(plant)
    assert [row.step for row in run.rows() if row.skipped] == [7, 8, 9, 10, 11]
    newest = list_checkpoints(run.folder)[-1]
    assert newest.name in ("step_00000004", "step_00000006"), "the second where the save of the first was done in time"
    load_model(newest)  # refuses weights that are not finite
    assert has_failed(run.folder)
    with pytest.raises(RuntimeError, match=r"5 bad steps in a row, the last step 11: loss nan.*rank 0: the weight"):
        raise_failure(run.folder)
