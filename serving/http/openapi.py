"""Parts of the OpenAPI schema that FastAPI cannot see: bodies that are read by hand, and event streams."""

from typing import Any

from pydantic import BaseModel

from serving.http.answers import ErrorAnswer

Responses = dict[int | str, dict[str, Any]]


def errors(*statuses: int) -> Responses:
    """Returns the error answers of a route."""
    return {status: {"model": ErrorAnswer} for status in statuses}


def json_body(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the declaration of a JSON body."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def stream_answer(event: type[BaseModel], *others: type[BaseModel], ending: str) -> Responses:
    """Returns the declaration of an answer that is whole, or with `stream` one `event` per token, then the `others`."""
    about = f"The whole answer; with `stream` one event per token, {ending}."
    models: list[type[BaseModel]] = [event, *others, ErrorAnswer]
    bodies = [_inlined(model) for model in models]
    body = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": bodies}}
    # itemSchema is the word of OpenAPI 3.2 for the events of a stream; older readers pass over it.
    item = {"type": "object", "required": ["data"], "properties": {"data": {"anyOf": [{"const": "[DONE]"}, body]}}}
    return {200: {"description": about, "content": {"text/event-stream": {"itemSchema": item}}}}


def _inlined(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    return schema
