"""The driver's side of training: starts the Ray Train job, follows it, and turns its end into an outcome.

1. Refuse workers that the cluster has no GPUs for: Ray would wait for them without end.
2. fit() runs in a thread of its own, so that the main thread is free to receive signals.
3. A request to stop goes to the workers; they finish the step, save and return. Where none trains, none is waited for.
4. Ray starts the workers again after a failure or a preemption; a run that gains checkpoints has new failures free.
   The driver does it where they ended by themselves, for the actor that would tell them to stop was lost.
5. Trackers and progress lines follow the run folder meanwhile.
"""

import enum
import importlib.util
import logging
import os
import threading
from pathlib import Path

import ray
import ray.train.torch
from ray.train import FailureConfig, RunConfig, ScalingConfig, WorkerGroupError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from model.checkpoint import latest_checkpoint, read_trainer_state
from model.tokenizer import Tokenizer
from rayjob.config import ConfigError, JobConfig
from rayjob.config_file import to_tree
from rayjob.corpus.blocks import n_windows
from rayjob.corpus.prepare import PreparedCorpus
from rayjob.lease import Fence
from rayjob.training.config_record import write_config
from rayjob.training.entry import train_loop
from rayjob.training.failure import RunFailedError, forget_failure, raise_failure
from rayjob.training.loop import TrainTask
from rayjob.training.metrics import Spent, cut_metrics, read_spent
from rayjob.training.mlflow_sink import MlflowSink
from rayjob.training.narration import Narration
from rayjob.training.notice import GaveWay
from rayjob.training.preemption import StopRequest, StopSignal
from rayjob.training.ray_callbacks import SaveBeforeResize, SigtermIsNotice
from rayjob.training.recovery import forget_ray_snapshot, read_run, settle_checkpoints
from rayjob.training.saving import RunIdentity, RunState
from rayjob.training.schedule import WindowOrder, max_steps
from rayjob.training.tensorboard_sink import TensorboardSink
from rayjob.training.tracking import Sink, Tracking
from rayjob.training.wandb_sink import WandbSink

logger = logging.getLogger(__name__)

# Ray reads these in the controller, which takes them over from the driver.
_RAY_TRAIN_SETTINGS = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.25",  # a report is committed at the next look; the default is 2 s
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.25",  # a pod is killed 5 s after its notice; the default is 5 s
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "12",  # then with the nodes that are left; the default is 60 s
}
_FIT_THREAD = "fit"
_RESIZE_INTERVAL_S = 60.0  # between looks whether there is room for more workers


class Outcome(enum.Enum):
    """How training ended when nothing failed."""

    DONE = "done"
    STOPPED = "stopped"
    BUDGET = "budget"


def steps_of_run(config: JobConfig, corpus: PreparedCorpus) -> int:
    """Returns the updates of the whole run on this corpus."""
    windows = n_windows(corpus.manifest.train.tokens, config.model.max_seq_len)
    return max_steps(config, WindowOrder(windows, config.train.global_batch_size, config.seed))


def latest_step(config: JobConfig) -> int:
    """Returns the last step that the run's newest complete checkpoint has done with, 0 if it has none."""
    latest = latest_checkpoint(config.run_folder)
    return RunState.from_json(read_trainer_state(latest)).recorded_step if latest else 0


def is_spent(config: JobConfig) -> bool:
    """Returns whether cost.max_usd is used up, so that starting workers would only cost more."""
    if config.cost.max_usd is None:
        return False
    latest = latest_checkpoint(config.run_folder)  # whose row may be owed, with its evaluation
    saved_usd = RunState.from_json(read_trainer_state(latest)).cost_usd if latest else 0.0
    return max(saved_usd, read_spent(config.run_folder).cost_usd) >= config.cost.max_usd


def step_to_go_on_from(config: JobConfig, corpus: PreparedCorpus) -> int:
    """Returns the last step that the run's newest sound checkpoint has done with, 0 if it has none.

    That is its own step, or the one before if the evaluation of it is still to be made up.

    Raises:
        CheckpointError: it is of another corpus, tokenizer, shape, seed or batch size.
    """
    folder = settle_checkpoints(config.run_folder)
    if folder is None:
        return 0
    identity = RunIdentity.of(config, corpus.manifest.hash, Tokenizer.load(corpus.tokenizer_folder).hash)
    return read_run(folder, config.model, identity).recorded_step


def train(
    config: JobConfig, corpus: PreparedCorpus, n_steps: int, step: int, stop: threading.Event, fence: Fence
) -> Outcome:
    """Trains to the end, to a stop or to the end of the budget; Ray must be initialised.

    Args:
        config: of a run whose folder no other driver writes and whose checkpoints fit, see `step_to_go_on_from`.
        n_steps: of the whole run.
        step: to go on from.
        stop: set by a signal handler; the workers then save and return.
        fence: of this driver's lease on the run; the workers ask it before they write.

    Raises:
        ConfigError: the cluster has too few GPUs.
        RunFailedError: it would fail in the same way again: bad steps in a row, or an exception that came twice.
        ray.train.TrainingFailedError: more failures or preemptions than the budgets allow.
    """
    _check_gpus(config)
    run_folder = config.run_folder
    write_config(config)
    forget_failure(run_folder)
    spent = read_spent(run_folder)
    cut_metrics(run_folder, step)  # before anybody follows rows that will be written again
    tracking = Tracking(run_folder, _sinks(config, corpus.tokens_folder, n_steps, step))
    status = "FAILED"
    try:
        share = _cpus_per_worker(config.train.max_workers)  # once: of an elastic run nodes may be gone later
        _fit_while_it_gains(config, corpus, n_steps, share, spent, stop, fence)
        is_done = latest_step(config) >= n_steps
        status = "FINISHED" if is_done else "KILLED"
    finally:
        tracking.finish(status)
    if is_done:
        return Outcome.DONE
    return Outcome.STOPPED if stop.is_set() else Outcome.BUDGET


def _fit_while_it_gains(
    config: JobConfig,
    corpus: PreparedCorpus,
    n_steps: int,
    share: float,
    spent: Spent,
    stop: threading.Event,
    fence: Fence,
) -> None:
    """Runs fit() until there is no more to train, or it is to stop.

    It runs again when its failures are used up, or its workers ended unasked, as long as there is a new checkpoint
    each time.
    """
    while True:
        forget_ray_snapshot(config.run_folder)
        step = latest_step(config)
        try:
            _fit(config, corpus, share, spent, stop, fence)
        except WorkerGroupError as error:
            raise_failure(config.run_folder)
            gained = latest_step(config) - step
            is_preemption = any(isinstance(cause, GaveWay) for cause in error.worker_failures.values())
            if gained <= 0 or is_preemption or stop.is_set():
                raise
            logger.warning(
                "failure.max_failures=%d is used up, but %d steps were gained: the count begins again.",
                *(config.failure.max_failures, gained),
            )
        else:
            raise_failure(config.run_folder)
            now = latest_step(config)
            if now >= n_steps or stop.is_set() or is_spent(config):
                return
            if now <= step:
                if config.cost.max_usd is not None:  # what was left went into starting, for which no row has paid
                    return
                raise RunFailedError(f"the workers ended at step {now} though nobody had asked them to, without a gain")
            logger.warning("the workers saved and ended though nobody had asked them to: they start again.")


def send_to_trackers(config: JobConfig, corpus: PreparedCorpus) -> None:
    """Sends what the trackers have not got of a run that is done."""
    n_steps = steps_of_run(config, corpus)
    Tracking(config.run_folder, _sinks(config, corpus.tokens_folder, n_steps, n_steps)).finish("FINISHED")


def _fit(
    config: JobConfig, corpus: PreparedCorpus, share: float, spent: Spent, stop: threading.Event, fence: Fence
) -> None:
    """Runs fit() to its end in a thread; passes a stop on and an error up."""
    # A worker that does not answer in this time is taken for dead, so Ray names it before the others' collective ends.
    settings = _RAY_TRAIN_SETTINGS | {"RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": str(0.8 * config.train.step_timeout_s)}
    os.environ.update({name: os.environ.get(name, value) for name, value in settings.items()})
    # Beside the driver: on another node it could be taken away, and the workers would take the driver for gone.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    stop_signal = StopSignal.options(scheduling_strategy=here).remote()  # type: ignore[attr-defined]
    task = TrainTask(config, corpus.tokens_folder, corpus.tokenizer_folder, spent, stop_signal, fence)
    trainer = _build_trainer(config, task, share)
    errors: list[BaseException] = []

    def fit() -> None:
        try:
            trainer.fit()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=fit, name=_FIT_THREAD, daemon=True)
    thread.start()
    request: StopRequest | None = None
    while thread.is_alive():
        thread.join(0.2)
        if stop.is_set() and request is None:
            logger.warning("stop requested: the workers finish the step, save and end.")
            request = StopRequest(stop_signal)
        if request and request.is_unheard:
            logger.warning("no worker is training, so there is nothing to save.")
            return  # Ray ends what is still starting when the driver ends
    if errors:
        raise errors[0]


def is_fit_running() -> bool:
    """Returns whether fit() was left to itself, as nobody trained who could save; it waits for Ray."""
    return any(thread.name == _FIT_THREAD for thread in threading.enumerate())


def _check_gpus(config: JobConfig) -> None:
    if not config.train.use_gpu:
        return
    n_gpus, n_workers = int(ray.cluster_resources().get("GPU", 0)), config.train.min_workers  # type: ignore[no-untyped-call]
    given = to_tree(config)["train"]["num_workers"]
    if n_gpus < n_workers:
        raise ConfigError(
            [
                f"train.num_workers={given} with train.use_gpu=true needs {n_workers} GPUs, but the Ray cluster "
                f"has {n_gpus}: start its other nodes first, lower train.num_workers, or set train.use_gpu=false."
            ]
        )


def _build_trainer(config: JobConfig, task: TrainTask, share: float) -> ray.train.torch.TorchTrainer:
    train = config.train
    cpus = {"CPU": share}
    is_fixed = train.min_workers == train.max_workers
    size = train.max_workers if is_fixed else (train.min_workers, train.max_workers)
    return ray.train.torch.TorchTrainer(
        train_loop,
        train_loop_config={"task": task},
        torch_config=ray.train.torch.TorchConfig(timeout_s=int(train.step_timeout_s)),
        scaling_config=ScalingConfig(
            num_workers=size,  # type: ignore[arg-type]
            use_gpu=train.use_gpu,
            elastic_resize_monitor_interval_s=_RESIZE_INTERVAL_S,  # type: ignore[call-arg]
            resources_per_worker=(cpus | {"GPU": 1}) if train.use_gpu else cpus,
        ),
        run_config=RunConfig(
            name=config.run_name,
            storage_path=str(config.runs_folder),
            callbacks=[SigtermIsNotice(), SaveBeforeResize()],  # type: ignore[list-item]
            failure_config=FailureConfig(
                max_failures=config.failure.max_failures,
                max_preemption_failures=config.failure.max_preemptions,  # type: ignore[call-arg]
            ),
        ),
    )


def _cpus_per_worker(num_workers: int) -> float:
    """Returns a share that leaves a fifth of the cluster to actors that only coordinate or serve."""
    cpus: float = ray.cluster_resources().get("CPU", 1.0)  # type: ignore[no-untyped-call]
    return min(1.0, round(0.8 * cpus / num_workers, 2))


def _sinks(config: JobConfig, tokens_folder: Path, n_steps: int, step: int) -> list[Sink]:
    sinks: list[Sink] = [Narration(n_steps, step), MlflowSink(config, tokens_folder)]
    if config.tracking.tensorboard:
        sinks.append(TensorboardSink(config.run_folder))
    if config.tracking.wandb and os.environ.get("WANDB_API_KEY"):
        if importlib.util.find_spec("wandb"):
            sinks.append(WandbSink(config))
        else:
            logger.warning(
                "WANDB_API_KEY is set, but wandb is not installed: pip install wandb, or tracking.wandb=false."
            )
    return sinks
