"""What Ray Train calls in every worker: from the first collective to the end, with what ended it written down."""

import logging
import uuid
from typing import Any

import torch
import torch.distributed as dist

from rayjob.store.shared import check_shared
from rayjob.training.failure import StartRefusedError, has_failed, remembered_errors, write_failure
from rayjob.training.link import require_link
from rayjob.training.loop import TrainTask, TrainWorker
from rayjob.training.micro_batch import naming_smaller_size
from rayjob.training.notice import own_notice
from rayjob.training.preflight import LINK_SHARE
from rayjob.training.start import from_rank_0, set_up_device

logger = logging.getLogger(__name__)


def train_loop(loop_config: dict[str, Any]) -> None:
    """Trains until the last step, a request to stop or the end of the budget; Ray Train calls it in every worker."""
    task: TrainTask = loop_config["task"]
    run_folder = task.config.run_folder
    _hide_reports_of_ray()
    check_shared(task.config)
    device = set_up_device(dist.get_world_size())
    if task.config.train.preflight:
        require_link(device, LINK_SHARE * task.config.train.step_timeout_s)
    # Rank 0 looks and tells the others, so that all do the same.
    failed, group = from_rank_0((has_failed(run_folder), uuid.uuid4().hex), device)
    if failed:
        return
    rank = dist.get_rank()
    try:
        with remembered_errors(run_folder, group, rank, step=lambda: -1):
            worker = _start(task, device)
        if worker is None:
            return
        with (
            remembered_errors(run_folder, group, rank, step=lambda: worker.state.step),
            naming_smaller_size(task.config, worker.micro_batch_size),
        ):
            worker.train()
    finally:
        own_notice.answer()  # whatever ended it, who gave the notice must not wait


def _start(task: TrainTask, device: torch.device) -> TrainWorker | None:
    """Returns a worker that is ready for its next step; None, on all ranks, if training must not begin here."""
    try:
        return TrainWorker(task, device)
    except StartRefusedError as error:
        if dist.get_rank() == 0:
            logger.error("%s", error)
            write_failure(task.config.run_folder, f"{error}.")
        return None


def _hide_reports_of_ray() -> None:
    """Keeps Ray Train's line about every report of every worker off the console; its warnings stay."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(lambda record: record.levelno >= logging.WARNING or "/ray/train/" not in record.pathname)
