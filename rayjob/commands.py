"""The commands of the job, one function each; the command line only parses and prints."""

import json
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray

from model.checkpoint import latest_checkpoint, read_trainer_state, resolve_checkpoint
from model.config import ModelConfig
from model.tokenizer import Tokenizer
from rayjob.atomic import read_object, write_atomically
from rayjob.config import ConfigError, JobConfig
from rayjob.config_file import to_tree
from rayjob.connection import ConnectCancelled, connect
from rayjob.corpus.blocks import n_windows
from rayjob.corpus.errors import PrepareCancelled
from rayjob.corpus.lookup import find_window
from rayjob.corpus.prepare import PreparedCorpus, check, find_prepared, find_without_sources
from rayjob.corpus.prepare import prepare as prepare_corpus
from rayjob.evaluate import evaluate_split, evaluate_texts
from rayjob.lease import Fence, hold_run
from rayjob.lock import WaitCancelled
from rayjob.plan import plan_line
from rayjob.status import set_stage
from rayjob.store.runs import adopt_run, publish_run
from rayjob.training import job
from rayjob.training.evaluation import Evaluation
from rayjob.training.job import Outcome
from rayjob.training.recovery import settle_best_checkpoint
from rayjob.training.saving import RunState
from rayjob.training.tracking import is_behind

logger = logging.getLogger(__name__)

EVALUATION_FILE = "evaluation.json"


def prepare(config: JobConfig, stop: threading.Event) -> PreparedCorpus:
    """Returns the corpus as blocks, doing only what is not done yet.

    Raises:
        ConfigError: everything that is wrong with the corpus, before Ray is touched.
    """
    settings = config.data, config.tokenizer, config.storage_folder
    T = config.model.max_seq_len
    if problems := check(*settings, T, is_cancelled=stop.is_set):
        raise ConfigError(problems)
    if find_prepared(*settings) is not None:
        return prepare_corpus(*settings, T, is_cancelled=stop.is_set)
    with _stage(config, "prepare"):
        connect()
        return prepare_corpus(*settings, T, is_cancelled=stop.is_set)


def train(config: JobConfig, stop: threading.Event) -> Outcome:
    """Trains from the prepared blocks, making them if needed; does nothing for a run that is done.

    Raises:
        ConfigError: the configuration cannot work with this corpus, cluster or budget.
        CheckpointError: the run folder belongs to another corpus, tokenizer or shape.
        LockedError: another driver has the run.
    """
    with _only_driver(config) as fence:
        return _train(config, stop, fence)


def run(config: JobConfig, stop: threading.Event) -> Outcome:
    """Prepares, trains, and evaluates the best checkpoint; raises as `train` does."""
    with _only_driver(config) as fence:
        outcome = _train(config, stop, fence)
        if outcome is Outcome.DONE and (best := settle_best_checkpoint(config.run_folder)):
            outcome = _evaluate_best(config, best, stop)
            set_stage(config, outcome.value)
        return outcome


@contextmanager
def _only_driver(config: JobConfig) -> Iterator[Fence]:
    """Holds the run for the block; a run in an object store is fetched before it and published after it."""
    with hold_run(config.run_folder, f"run {config.run_name}") as fence:
        adopt_run(config.run_folder)
        try:
            yield fence
        except BaseException:
            with suppress(OSError):  # a store that is away must not hide what went wrong
                publish_run(config.run_folder)
            raise
        publish_run(config.run_folder)


@contextmanager
def _stage(config: JobConfig, stage: str, max_steps: int | None = None) -> Iterator[None]:
    """Records the stage of the block, and how it ended if it was left by an error."""
    set_stage(config, stage, max_steps)
    with _recorded_end(config):
        yield


@contextmanager
def _recorded_end(config: JobConfig) -> Iterator[None]:
    """Records as the stage how the block ended if it was left by an error."""
    try:
        yield
    except (ConnectCancelled, PrepareCancelled, WaitCancelled, KeyboardInterrupt):
        set_stage(config, Outcome.STOPPED.value)
        raise
    except BaseException:
        with suppress(OSError):  # a full disk must not hide what went wrong
            set_stage(config, "failed")
        raise


def _train(config: JobConfig, stop: threading.Event, fence: Fence) -> Outcome:
    corpus = prepare(config, stop)
    n_steps = job.steps_of_run(config, corpus)
    with _recorded_end(config):
        step = job.step_to_go_on_from(config, corpus)
    if step >= n_steps:
        logger.info("run %s has all of its %d steps: nothing to train.", config.run_name, n_steps)
        set_stage(config, Outcome.DONE.value, n_steps)
        if is_behind(config.run_folder):
            job.send_to_trackers(config, corpus)
        return Outcome.DONE
    if job.is_spent(config):
        set_stage(config, Outcome.BUDGET.value, n_steps)
        return Outcome.BUDGET
    logger.info(plan_line(config))
    with _stage(config, "train", n_steps):
        if not stop.is_set():
            connect()
        outcome = Outcome.STOPPED if stop.is_set() else job.train(config, corpus, n_steps, step, stop, fence)
    set_stage(config, outcome.value)
    return outcome


def _evaluate_best(config: JobConfig, best: Path, stop: threading.Event) -> Outcome:
    path = config.run_folder / EVALUATION_FILE
    if read_object(path).get("checkpoint") == best.name:
        return Outcome.DONE
    with _stage(config, "evaluate"):
        corpus = find_prepared(config.data, config.tokenizer, config.storage_folder)
        assert corpus is not None  # training has just used it
        connect()
        pending = _start_evaluation(config, best, corpus)
        while not ray.wait([pending], timeout=0.2)[0]:
            if stop.is_set():
                return Outcome.STOPPED
        evaluation = ray.get(pending)
    result = {"checkpoint": best.name} | evaluation.to_json()
    write_atomically(path, json.dumps(result, indent=2).encode() + b"\n")
    logger.info(
        "best checkpoint %s: validation loss %.4f, perplexity %.1f, accuracy %.1f %%, %.3f bits per byte",
        *(
            best.name,
            evaluation.val_loss,
            evaluation.perplexity,
            100 * evaluation.accuracy,
            evaluation.bits_per_byte,
        ),
    )
    return Outcome.DONE


def _start_evaluation(config: JobConfig, checkpoint: Path, corpus: PreparedCorpus) -> Any:
    # Without a GPU it is slower, but Ray would wait for one without end.
    has_gpu = config.train.use_gpu and ray.cluster_resources().get("GPU", 0) >= 1  # type: ignore[no-untyped-call]
    resources: dict[str, Any] = {"num_gpus": 1} if has_gpu else {"num_cpus": 0.5}
    task = ray.remote(evaluate_split).options(**resources)
    return task.remote(checkpoint, corpus.tokens_folder)


def evaluate(config: JobConfig, checkpoint: Path, texts: list[Path] | None) -> Evaluation:
    """Returns the evaluation of a checkpoint or of a run's best, on texts or else on the validation split.

    Raises:
        CheckpointError: no such checkpoint, or a damaged one.
        ConfigError: an unreadable text, or no prepared corpus of the checkpoint's tokenizer to validate on.
    """
    folder = resolve_checkpoint(checkpoint)
    if texts:
        return evaluate_texts(folder, texts)
    corpus = _prepared_corpus(config, "run `prepare`, or give --text")
    return evaluate_split(folder, corpus.tokens_folder)


def show_windows(config: JobConfig, split: str, windows: Sequence[int]) -> list[dict[str, Any]]:
    """Returns, for each window id of a split, its documents and their text in it.

    Raises:
        ConfigError: no id is given, the corpus is not prepared, or there is no such window.
    """
    if not windows:
        raise ConfigError(["no window id is given: expected at least one whole number."])
    corpus = _corpus_to_show(config)
    T = config.model.max_seq_len
    n = n_windows(corpus.manifest.split(split).tokens, T)
    problems = [
        f"window {window} is not in the {split} split: its ids are 0 to {n - 1:,} at max_seq_len={T}."
        for window in windows
        if not 0 <= window < n
    ]
    if problems:
        raise ConfigError(problems)
    tokenizer = Tokenizer.load(corpus.tokenizer_folder)
    found = []
    for window in windows:
        parts = find_window(corpus.tokens_folder, corpus.manifest, tokenizer, split, window, T)
        found.append({"window": window, "split": split, "parts": [part._asdict() for part in parts]})
    return found


def _corpus_to_show(config: JobConfig) -> PreparedCorpus:
    try:
        return _prepared_corpus(config, "run `prepare`")
    except ConfigError:
        found = find_without_sources(config.data, config.tokenizer, config.storage_folder)
        if not found:
            raise
        corpus = _choose(found, config.run_folder)
        logger.warning("the sources are gone or have changed: showing %s as it was prepared.", _describe(corpus))
        return corpus


def _choose(corpora: Sequence[PreparedCorpus], run_folder: Path) -> PreparedCorpus:
    """Returns the corpus that the run was trained on, or the newest, unless they are of different sources."""
    newest = latest_checkpoint(run_folder)
    of_run = RunState.from_json(read_trainer_state(newest)).identity.corpus if newest else None
    for corpus in corpora:
        if corpus.manifest.hash == of_run:
            return corpus
    if len({_source_names(corpus) for corpus in corpora}) > 1:
        raise ConfigError(
            [
                "the sources are gone or have changed, and several corpora with these settings are on storage: "
                f"{'; '.join(map(_describe, corpora))}. Restore the sources, or name a run (run_name) trained on one."
            ]
        )
    return corpora[0]


def _describe(corpus: PreparedCorpus) -> str:
    first, *others = _source_names(corpus)
    return f"{corpus.tokens_folder} (of {first}{f' and {len(others):,} more' if others else ''})"


def _source_names(corpus: PreparedCorpus) -> tuple[str, ...]:
    return tuple(source["name"] for source in corpus.manifest.sources)


def show_config(config: JobConfig) -> dict[str, Any]:
    """Returns the resolved configuration with derived values."""
    model: ModelConfig = config.model
    return to_tree(config) | {
        "derived": {
            "storage_folder": str(config.storage_folder),
            "run_folder": str(config.run_folder),
            "parameters": model.n_params,
            "flops_per_token": model.flops_per_token,
            "head_dim": model.head_dim,
            "vocab_size": model.vocab_size,
            "tokens_per_step": config.tokens_per_step,
            **_micro_batches(config),
        }
    }


def _micro_batches(config: JobConfig) -> dict[str, Any]:
    """How a step is cut into micro-batches; of `auto` only what it will be chosen from."""
    if config.train.micro_batch_size == "auto":
        return {"grad_accum_steps": None, "micro_batch_sizes": config.train.micro_batch_sizes}
    return {"grad_accum_steps": config.train.grad_accum_steps}


def _prepared_corpus(config: JobConfig, remedy: str) -> PreparedCorpus:
    corpus = find_prepared(config.data, config.tokenizer, config.storage_folder)
    if corpus is None:
        raise ConfigError([f"the corpus of this configuration is not prepared: {remedy}."])
    return corpus
