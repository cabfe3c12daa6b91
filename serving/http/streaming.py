"""Server-sent events of a streamed answer, and what happens when the client goes away."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serving.engine.engine import IndexedDelta, RequestStream, SequenceFailed
from serving.http.errors import ApiError, engine_error

logger = logging.getLogger(__name__)

PING_INTERVAL_S = 15.0


class EventStream(Response):
    """A `text/event-stream` response: `on_disconnect` is called as soon as the client is gone, `on_end` at the end."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[str, None], *, on_disconnect: Callable[[], None], on_end: Callable[[], None]
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._on_disconnect = on_disconnect
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events; whatever ends this early ends the generation too."""
        try:
            async with watch_disconnect(receive, self._on_disconnect), aclosing(self._events) as events:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async for event in events:
                    await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:  # the server's way to say that the client is gone
            pass
        finally:
            self._on_end()


@asynccontextmanager
async def watch_disconnect(receive: Receive, on_disconnect: Callable[[], None]) -> AsyncIterator[None]:
    """Calls `on_disconnect` when the client goes away inside the block; the body must have been read."""

    async def watch() -> None:
        try:
            while (await receive())["type"] != "http.disconnect":
                pass
        except Exception:  # Ray's receive raises when the proxy is gone, and the client with it
            logger.warning("the proxy of a request is gone", exc_info=True)
        on_disconnect()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()


async def next_delta(stream: RequestStream, deadline_s: float) -> IndexedDelta | None:
    """Returns the next delta, None after the last; `deadline_s` is in the time of the event loop.

    Raises:
        ApiError: 408 at the deadline, 500 when the sequence failed.
    """
    try:
        return await _next_before(stream, deadline_s)
    except TimeoutError:
        raise _too_late() from None


async def bursts(
    stream: RequestStream, delta: IndexedDelta | None, deadline_s: float
) -> AsyncGenerator[list[IndexedDelta], None]:
    """Yields `delta` and those after it, all that are there at a time, and an empty list whenever a ping is due.

    Raises:
        ApiError: As `next_delta`.
    """
    loop = asyncio.get_running_loop()
    while delta is not None:
        yield [delta, *stream.ready()]
        while True:
            try:
                # One timer for ping and deadline: there are as many of them as bursts.
                delta = await _next_before(stream, min(loop.time() + PING_INTERVAL_S, deadline_s))
                break
            except TimeoutError:
                if loop.time() >= deadline_s:
                    raise _too_late() from None
                yield []


async def _next_before(stream: RequestStream, until_s: float) -> IndexedDelta | None:
    try:
        async with asyncio.timeout_at(until_s):
            return await anext(stream, None)
    except SequenceFailed:
        raise engine_error() from None


def _too_late() -> ApiError:
    return ApiError(408, "timeout", "the answer was not finished in time: ask for fewer tokens.")
