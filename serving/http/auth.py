"""Bearer authentication by one API key, and who may bind where without one."""

import hmac
import ipaddress
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from serving.http.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/"})


class RequireApiKey:
    """ASGI middleware: every route but /health and /, known or not, wants `Authorization: Bearer <key>`."""

    def __init__(self, app: ASGIApp, api_key: str, count_error: Callable[[str], None]) -> None:
        self._app = app
        self._count_error = count_error
        self._expected = b"Bearer " + api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or answers 401."""
        if scope["type"] == "lifespan" or self._is_allowed(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            error = _unauthorized()
            self._count_error(error.code)
            await error.response()(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _is_allowed(self, scope: Scope) -> bool:
        if scope["type"] == "http" and scope["path"] in OPEN_PATHS:
            return True
        sent = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        return len(sent) == 1 and hmac.compare_digest(sent[0], self._expected)


def check_bind(host: str | None, api_key: str | None) -> None:
    """Refuses to serve beyond loopback without a key; an empty key counts as none.

    Raises:
        ValueError: `host` can be reached from other machines and there is no key.
    """
    if not api_key and host is not None and not _is_loopback(host):
        raise ValueError(
            f"the HTTP host is {host}, which other machines can reach, and API_KEY is not set: set API_KEY "
            "in the environment of the service, or bind to 127.0.0.1."
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _unauthorized() -> ApiError:
    message = "a valid API key is required: send the header Authorization: Bearer <key>."
    return ApiError(401, "invalid_api_key", message, headers={"WWW-Authenticate": "Bearer"})
