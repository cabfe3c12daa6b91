"""One generating request from its checked form to its answer, whatever the shape of the answer."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response

from serving.engine.engine import EngineClosed, IndexedDelta, QueueFull, RequestCancelled, RequestStream
from serving.http.answer_format import AnswerFormat
from serving.http.errors import ApiError, engine_error
from serving.http.generation import Generation, prepare_generation
from serving.http.metrics import Metrics
from serving.http.schemas import GenerateRequest
from serving.http.service import Service
from serving.http.streaming import EventStream, bursts, next_delta, watch_disconnect

logger = logging.getLogger(__name__)

PING = ": ping\n\n"


async def respond(service: Service, request: Request, checked: GenerateRequest, answer: AnswerFormat) -> Response:
    """Generates and returns the answer, streamed or whole; a client that goes away ends the generation.

    Raises:
        ApiError: Nothing was sent yet and there is no answer.
    """
    deadline_s = asyncio.get_running_loop().time() + checked.timeout_s
    generation, stream = await _start(service, checked, answer)
    exchange = Exchange(generation, stream, answer, deadline_s, service.metrics)
    is_handed_on = False
    try:
        async with watch_disconnect(request.receive, stream.cancel):
            if not checked.stream:
                return await exchange.whole()
            first = await next_delta(stream, deadline_s)
        is_handed_on = True
        return EventStream(exchange.events(first), on_disconnect=stream.cancel, on_end=exchange.end)
    except RequestCancelled:
        return Response(status_code=499)  # nobody is there to read it
    finally:
        if not is_handed_on:
            exchange.end()


async def _start(service: Service, checked: GenerateRequest, answer: AnswerFormat) -> tuple[Generation, RequestStream]:
    """Tokenizes off the event loop and submits; again if the engine was exchanged in the meantime."""
    accepted_at_s = time.monotonic()
    while True:
        engine = service.engine()
        answer.check(engine.served)
        try:
            engine.check_room(len(checked.prompts) * checked.n)
            generation = await asyncio.to_thread(prepare_generation, checked, engine.served, accepted_at_s)
            stream = engine.submit(generation.specs())
        except EngineClosed:
            continue
        except QueueFull as error:
            headers = {"Retry-After": str(error.retry_after_s)}
            raise ApiError(429, "queue_full", str(error), headers=headers) from None
        generation.prompt_scores = stream.prompt_scores
        return generation, stream


@dataclass(frozen=True, slots=True)
class Exchange:
    """A submitted request and how its answer is written; `deadline_s` is in the time of the event loop."""

    generation: Generation
    stream: RequestStream
    answer: AnswerFormat
    deadline_s: float
    metrics: Metrics

    async def whole(self) -> Response:
        """Returns the answer once all deltas are there."""
        while (delta := await next_delta(self.stream, self.deadline_s)) is not None:
            for one in (delta, *self.stream.ready()):
                self.generation.add(one)
            await self.stream.wait_end(self.deadline_s)  # nobody reads before
        return Response(self.answer.whole(self.generation, self.stream), media_type="application/json")

    async def events(self, first: IndexedDelta | None) -> AsyncGenerator[str, None]:
        """Yields the events of a stream whose first delta is there already, as many at a time as are there.

        A fault becomes the last event.
        """
        try:
            async for burst in bursts(self.stream, first, self.deadline_s):
                yield "".join(_event(self.answer.event(self.generation, delta)) for delta in burst) or PING
            yield "".join(map(_event, self.answer.closing(self.generation, self.stream)))
        except ApiError as error:
            self.metrics.count_error(error.code)
            yield _event(error.body())
        except RequestCancelled:
            return
        except Exception:
            logger.exception("a stream failed")
            fault = engine_error()
            self.metrics.count_error(fault.code)
            yield _event(fault.body())
        yield "data: [DONE]\n\n"

    def end(self) -> None:
        """Frees the slots, if they are not free yet, and counts the request."""
        self.stream.cancel()
        self.metrics.record(self.generation, self.stream)


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
