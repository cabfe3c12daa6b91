"""Reads a request's JSON body: bounded in size and time, strict in form, never a 500."""

import asyncio
import json
import math
from collections import Counter
from typing import Any, NoReturn

from fastapi import Request
from starlette.requests import ClientDisconnect

from serving.http.errors import ApiError, describe

MAX_BODY_BYTES = 1 << 20
READ_TIMEOUT_S = 30.0
PARSED_AT_ONCE_BYTES = 1 << 15
"""Up to this size a body is parsed where it was read; a larger one would hold up the streams of others."""
MAX_INTEGER_DIGITS = 400


async def read_json_object(request: Request) -> dict[str, Any]:
    """Returns the body as a dict.

    Raises:
        ApiError: 413 over 1 MiB, 408 when it does not arrive in time, 400 when it is not one JSON object.
    """
    body = await _read(request)
    if len(body) > PARSED_AT_ONCE_BYTES:
        return await asyncio.to_thread(parse_json_object, body)
    return parse_json_object(body)


def parse_json_object(body: bytes) -> dict[str, Any]:
    """Parses UTF-8 JSON. Numbers that no range can hold become infinite, for their field's check to refuse.

    Raises:
        ApiError: 400 invalid_json when it is not one object, names a key twice or is nested too deeply.
    """
    try:
        value = json.loads(body.decode("utf-8"), parse_int=_parse_int, object_pairs_hook=_without_duplicates)
    except UnicodeDecodeError as error:
        _refuse(f"is not UTF-8 at byte {error.start}")
    except json.JSONDecodeError as error:
        _refuse(f"is not JSON: {error.msg} at character {error.pos}")
    except RecursionError:
        _refuse("is nested too deeply")
    if not isinstance(value, dict):
        _refuse('must be a JSON object such as {"prompt": "Once upon a time"}')
    return value


async def _read(request: Request) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 12 or int(declared) > MAX_BODY_BYTES):
        raise _too_large()
    body = bytearray()
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise _too_large()
    except TimeoutError:
        message = f"the request body did not arrive within {READ_TIMEOUT_S:.0f} s."
        raise ApiError(408, "timeout", message) from None
    except ClientDisconnect:
        raise ApiError(400, "invalid_json", "the request body ended early.") from None
    return bytes(body)


def _parse_int(digits: str) -> int | float:
    return int(digits) if len(digits) <= MAX_INTEGER_DIGITS else math.inf


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        _refuse(f"names {describe(key)} more than once")
    return fields


def _too_large() -> ApiError:
    message = f"the request body is larger than {MAX_BODY_BYTES} bytes: send shorter or fewer prompts."
    return ApiError(413, "request_too_large", message)


def _refuse(reason: str) -> NoReturn:
    raise ApiError(400, "invalid_json", f"the request body {reason}.") from None
