"""The FastAPI app: routes, authentication and errors around a `Service`."""

import asyncio
import time
from typing import Any

from fastapi import FastAPI, Request, Response

from serving.engine.engine import EngineClosed, QueueFull, RequestCancelled, RequestStream
from serving.http.answers import ErrorAnswer, GenerateAnswer, Health
from serving.http.auth import RequireApiKey
from serving.http.body import read_json_object
from serving.http.errors import ApiError, install_error_handlers
from serving.http.generation import Generation, prepare_generation
from serving.http.schemas import GenerateRequest, generate_schema, parse_generate
from serving.http.service import Service
from serving.http.streaming import EventStream, generation_events, next_delta, watch_disconnect

GENERATE_ERRORS = (400, 401, 408, 413, 429, 500, 503)


def create_app(service: Service, *, api_key: str | None = None) -> FastAPI:
    """Returns the app of a service. With an `api_key` every route but /health and / wants it."""
    app = FastAPI(title="rayjob serving", redirect_slashes=False)
    install_error_handlers(app)
    if api_key:
        app.add_middleware(RequireApiKey, api_key=api_key)

    @app.get("/health", response_model=Health, responses=_errors(503))
    async def health() -> Health:
        """Tells whether requests can be taken, and which checkpoint answers."""
        return service.health()

    @app.post(
        "/generate",
        response_model=GenerateAnswer,
        responses=_errors(*GENERATE_ERRORS) | _stream_response(),
        openapi_extra={"requestBody": _json_body(generate_schema())},
    )
    async def generate(request: Request) -> Response:
        """Continues one or several prompts; with `stream` as server-sent events."""
        accepted_at_s = time.monotonic()
        checked = parse_generate(await read_json_object(request))
        return await _generate(service, request, checked, accepted_at_s)

    return app


async def _generate(service: Service, request: Request, checked: GenerateRequest, accepted_at_s: float) -> Response:
    deadline_s = asyncio.get_running_loop().time() + checked.timeout_s
    generation, stream = await _start(service, checked, accepted_at_s)
    is_handed_on = False
    try:
        async with watch_disconnect(request.receive, stream.cancel):
            if not checked.stream:
                return await _collect(generation, stream, deadline_s)
            first = await next_delta(stream, deadline_s)
        is_handed_on = True
        return EventStream(generation_events(generation, stream, first, deadline_s), stream.cancel)
    except RequestCancelled:
        return Response(status_code=499)  # nobody is there to read it
    finally:
        if not is_handed_on:
            stream.cancel()


async def _start(service: Service, checked: GenerateRequest, accepted_at_s: float) -> tuple[Generation, RequestStream]:
    """Tokenizes off the event loop and submits; again if the engine was exchanged in the meantime."""
    while True:
        engine = service.engine()
        try:
            engine.check_room(len(checked.prompts) * checked.n)
            generation = await asyncio.to_thread(prepare_generation, checked, engine.served, accepted_at_s)
            return generation, engine.submit(generation.specs())
        except EngineClosed:
            continue
        except QueueFull as error:
            headers = {"Retry-After": str(error.retry_after_s)}
            raise ApiError(429, "queue_full", str(error), headers=headers) from None


async def _collect(generation: Generation, stream: RequestStream, deadline_s: float) -> Response:
    while (delta := await next_delta(stream, deadline_s)) is not None:
        generation.add(delta)
    return Response(generation.answer(stream).model_dump_json(), media_type="application/json")


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": ErrorAnswer} for status in statuses}


def _stream_response() -> dict[int | str, dict[str, Any]]:
    about = "The whole answer; with `stream` one event per token, then usage and timings, then [DONE]."
    return {200: {"description": about, "content": {"text/event-stream": {"schema": {"type": "string"}}}}}


def _json_body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"required": True, "content": {"application/json": {"schema": schema}}}
