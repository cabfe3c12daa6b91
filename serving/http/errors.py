"""The one error body that every route answers with, and the handlers that make sure of it."""

import json
import logging
import math
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

logger = logging.getLogger(__name__)

_TYPES = {401: "authentication_error", 408: "timeout_error", 429: "rate_limit_error"}
_ROUTING_CODES = {404: "not_found", 405: "method_not_allowed"}


class ApiError(Exception):
    """An answer other than 200; `message` is for people, `code` and `param` are for programs."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """Returns the body that every route answers with."""
        default_type = "server_error" if self.status >= 500 else "invalid_request_error"
        error_type = _TYPES.get(self.status, default_type)
        error = {"message": self.message, "type": error_type, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        """Returns the HTTP answer. It is plain ASCII, so that no text of the client's can break it."""
        return Response(
            json.dumps(self.body(), ensure_ascii=True),
            status_code=self.status,
            headers=self.headers,
            media_type="application/json",
        )


def invalid_value(param: str, message: str) -> ApiError:
    """A 400 for a field whose value cannot be used."""
    return ApiError(400, "invalid_value", message, param=param)


def engine_error() -> ApiError:
    """A 500 for the one request whose decoding failed; sending it again would fail again."""
    message = "this request failed inside the engine; the server's log has the cause."
    return ApiError(500, "engine_error", message, headers={"x-should-retry": "false"})


def describe(value: object) -> str:
    """A short ASCII form of what a client sent, for use in a message."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, float) and math.isinf(value):
        return "a number beyond every range"
    if isinstance(value, str):
        return f'"{shorten(value)}"'
    return shorten(json.dumps(value))


def shorten(text: str) -> str:
    """The beginning of a client's text in ASCII, without quotes."""
    escaped = json.dumps(text[:60], ensure_ascii=True)[1:-1]
    return escaped if len(escaped) <= 60 and len(text) <= 60 else f"{escaped[:56]}..."


def install_error_handlers(app: FastAPI, count: Callable[[str], None]) -> None:
    """Makes every fault of `app`, unknown routes included, answer with the one body.

    Args:
        app: The app.
        count: Called with the code of every such answer.
    """

    def answer(error: ApiError) -> Response:
        count(error.code)
        return error.response()

    async def on_api_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return answer(error)

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = _ROUTING_CODES.get(error.status_code, "invalid_value")
        reason = HTTPStatus(error.status_code).phrase.lower()
        message = f"{reason}: {request.method} {shorten(request.url.path)}; /docs lists the routes."
        return answer(ApiError(error.status_code, code, message, headers=dict(error.headers or {})))

    async def on_fault(request: Request, error: Exception) -> Response:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return answer(engine_error())

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(Exception, on_fault)
