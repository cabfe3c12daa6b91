"""The engine in use, and the change to another checkpoint without a request lost."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from model.checkpoint import resolve_checkpoint
from model.complete import COMPLETE, CheckpointError
from serving.engine.engine import Engine
from serving.engine.loading import ServedModel, load_served_model
from serving.engine.weights import decoding_dtype
from serving.http.answers import CheckpointId, Health
from serving.http.errors import ApiError
from serving.http.metrics import Metrics
from serving.settings import FOLLOW_INTERVAL_S, Settings, parse_settings

logger = logging.getLogger(__name__)


class Service:
    """Owns the current engine. A request takes it once and keeps it, so no answer mixes two models.

    Attributes:
        loaded_at: When the current model was loaded, in seconds since the epoch.
        metrics: What GET /metrics shows; it goes on counting when the engine is exchanged.
    """

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._settings: Settings | None = None
        self._seen: CheckpointIdentity | None = None
        self._update_error: str | None = None
        self._is_closing = False
        self._update_lock = asyncio.Lock()
        self.loaded_at = 0
        self.metrics = Metrics()

    async def update(self, user_config: Mapping[str, Any]) -> None:
        """Changes to the checkpoint and limits of `user_config` once they are loaded and checked.

        When they cannot be used, a running service keeps what it has and /health tells why.

        Raises:
            Exception: There is nothing to keep: this was the first update.
        """

        def prepare() -> Prepared:
            settings = parse_settings(user_config)
            return self._prepare(settings, identify(settings.checkpoint))

        async with self._update_lock:
            await self._change(prepare)

    async def follow(self) -> None:
        """Changes to the best checkpoint of the run folder if that is another one by now.

        One that cannot be used is not tried a second time before it changes.
        """
        async with self._update_lock:
            settings = self._settings
            if settings is None:
                return
            try:
                found = await asyncio.to_thread(identify, settings.checkpoint)
            except (CheckpointError, OSError) as error:
                logger.debug("%s cannot be followed at the moment: %s", settings.checkpoint, error)
                return
            if found != self._seen:
                self._seen = found
                await self._change(lambda: self._prepare(settings, found))

    def engine(self) -> Engine:
        """Returns the engine for a new request.

        Raises:
            ApiError: 503 while there is none, when it is dead, or when the service shuts down.
        """
        if self._is_closing:
            raise ApiError(503, "shutting_down", "the service is shutting down: try another replica.")
        if self._engine is None:
            raise ApiError(503, "model_loading", "the model is still loading: try again in a few seconds.")
        if not self._engine.is_alive():
            raise ApiError(503, "engine_dead", "the engine has stopped: the service must be restarted.")
        return self._engine

    @property
    def follow_interval_s(self) -> float:
        """How often `follow` should be called."""
        return FOLLOW_INTERVAL_S if self._settings is None else self._settings.follow_interval_s

    @property
    def has_model(self) -> bool:
        """Whether an update has succeeded."""
        return self._engine is not None

    def health(self) -> Health:
        """Returns what GET /health shows; raises the ApiError of `engine` when no request can be taken."""
        engine = self.engine()
        load = engine.load()
        return Health(
            status="ok",
            model=engine.served.name,
            checkpoint=checkpoint_id(engine.served),
            max_seq_len=engine.served.max_seq_len,
            slots=engine.num_slots,
            running=load.running,
            waiting=load.waiting,
            update_error=self._update_error,
        )

    def close(self) -> None:
        """Takes no more requests; those already taken are finished."""
        self._is_closing = True
        if self._engine is not None:
            self._engine.close()

    async def _change(self, prepare: Callable[[], "Prepared"]) -> None:
        try:
            prepared = await asyncio.to_thread(prepare)
        except Exception as error:
            # Whatever a bad checkpoint raises, the good one goes on serving.
            if self._engine is None:
                raise
            self._update_error = f"update failed: {error}"
            served = self._engine.served
            logger.warning("%s; step %d of %s is kept", self._update_error, served.step, served.name)
        else:
            self._swap(prepared)

    def _prepare(self, settings: Settings, found: "CheckpointIdentity") -> "Prepared":
        served = load_served_model(found.folder, name=settings.model_name)
        if self._engine is not None:
            _refuse_another_model(self._engine.served, served)
        return Prepared(_start(served, settings), settings, found)

    def _swap(self, prepared: "Prepared") -> None:
        previous, self._update_error = self._engine, None
        self._engine, self._settings, self._seen = prepared
        self.loaded_at = int(time.time())
        if previous is not None:
            previous.close()  # its running and waiting sequences are finished on the old weights
        logger.info("serving %s, step %d", self._engine.served.name, self._engine.served.step)


class CheckpointIdentity(NamedTuple):
    """Tells one complete checkpoint from another, also from an earlier one of the same name."""

    folder: Path
    completed_at_ns: int


class Prepared(NamedTuple):
    """An engine that is ready to serve, and what it was made from."""

    engine: Engine
    settings: Settings
    seen: CheckpointIdentity


def identify(path: Path) -> CheckpointIdentity:
    """Returns which checkpoint a checkpoint or run folder means now; reads a few small files.

    Raises:
        CheckpointError: There is none.
    """
    folder = resolve_checkpoint(path)
    return CheckpointIdentity(folder, (folder / COMPLETE).stat().st_mtime_ns)


def checkpoint_id(served: ServedModel) -> CheckpointId:
    """Returns how answers name the weights."""
    return CheckpointId(step=served.step, sha256=served.sha256)


def _start(served: ServedModel, settings: Settings) -> Engine:
    return Engine(
        served,
        num_slots=settings.num_slots,
        max_waiting=settings.max_waiting,
        dtype=decoding_dtype(settings.dtype, served.model),
        num_threads=settings.num_threads or len(os.sched_getaffinity(0)),
    )


def _refuse_another_model(current: ServedModel, new: ServedModel) -> None:
    """Under one name clients may rely on one tokenizer: their token ids and limits depend on it."""
    if new.name == current.name and new.tokenizer.hash != current.tokenizer.hash:
        raise ValueError(
            f"{new.folder} is another model: its tokenizer has {new.tokenizer.vocab_size} tokens and hash "
            f"{new.tokenizer.hash[:12]}, {current.name} has {current.tokenizer.vocab_size} and "
            f"{current.tokenizer.hash[:12]}. To serve it, set another user_config.model_name."
        )
