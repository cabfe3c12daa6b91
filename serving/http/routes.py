"""The FastAPI app: routes, authentication and errors around a `Service`."""

from typing import Any

from fastapi import FastAPI, Request, Response

from serving.http.answers import GenerateAnswer, Health, StreamEnd, StreamEvent
from serving.http.auth import RequireApiKey
from serving.http.body import read_json_object
from serving.http.completion_answers import Completion
from serving.http.completion_format import CompletionFormat
from serving.http.completion_schema import completion_schema, parse_completion
from serving.http.errors import install_error_handlers
from serving.http.exchange import respond
from serving.http.generate_format import GenerateFormat
from serving.http.metrics import CONTENT_TYPE
from serving.http.model_routes import add_model_routes
from serving.http.openapi import errors, json_body, stream_answer
from serving.http.playground import add_page
from serving.http.schemas import generate_schema, parse_generate
from serving.http.service import Service

GENERATE_ERRORS = (400, 401, 408, 413, 429, 500, 503)


def create_app(service: Service, *, api_key: str | None = None) -> FastAPI:
    """Returns the app of a service. With an `api_key` every route but /health and / wants it."""
    app = FastAPI(title="rayjob serving", redirect_slashes=False)
    install_error_handlers(app, service.metrics.count_error)
    if api_key:
        app.add_middleware(RequireApiKey, api_key=api_key, count_error=service.metrics.count_error)
    _add_state_routes(app, service)
    _add_generating_routes(app, service)
    add_model_routes(app, service)
    add_page(app, is_key_wanted=bool(api_key))
    return app


def _add_state_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health", response_model=Health, responses=errors(503))
    async def health() -> Health:
        """Tells whether requests can be taken, and which checkpoint answers."""
        return service.health()

    @app.get("/metrics", response_class=Response, responses=errors(401, 503) | _metrics_answer())
    async def metrics() -> Response:
        """Counters, gauges and histograms for Prometheus."""
        return Response(service.metrics.render(service.engine()), media_type=CONTENT_TYPE)


def _add_generating_routes(app: FastAPI, service: Service) -> None:
    @app.post(
        "/generate",
        response_model=GenerateAnswer,
        responses=errors(*GENERATE_ERRORS)
        | stream_answer(StreamEvent, StreamEnd, ending="then usage and timings, then [DONE]"),
        openapi_extra=json_body(generate_schema()),
    )
    async def generate(request: Request) -> Response:
        """Continues one or several prompts; with `stream` as server-sent events."""
        checked = parse_generate(await read_json_object(request))
        return await respond(service, request, checked, GenerateFormat())

    @app.post(
        "/v1/completions",
        response_model=Completion,
        responses=errors(*GENERATE_ERRORS, 404) | stream_answer(Completion, ending="then [DONE]"),
        openapi_extra=json_body(completion_schema()),
    )
    async def completions(request: Request) -> Response:
        """OpenAI's completions; with `stream` as server-sent events."""
        checked = parse_completion(await read_json_object(request))
        return await respond(service, request, checked.generate, CompletionFormat(checked))


def _metrics_answer() -> dict[int | str, dict[str, Any]]:
    about = "Prometheus' text form, version 0.0.4."
    return {200: {"description": about, "content": {"text/plain": {"schema": {"type": "string"}}}}}
