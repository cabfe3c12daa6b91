"""POST /v1/completions: OpenAI's fields and defaults, with the limits of POST /generate.

Unlike /generate it is lenient where OpenAI's clients need it: unknown fields are ignored, and null says the
same as leaving a field out. A known field with a wrong value is a 400 all the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serving.http.errors import ApiError, describe, invalid_value
from serving.http.fields import Field, FlagField, IntegerField, NumberField
from serving.http.schemas import (
    MAX_PROMPT_TOKENS,
    MAX_PROMPTS,
    SIMPLE_FIELDS,
    TIMEOUT_S,
    GenerateRequest,
    Prompt,
    check_count,
    check_prompt,
    check_sequences,
    check_stop,
    empty_prompt,
    is_tokens,
    prompt_schema,
    stop_schema,
    take_params,
)

MOST_BY_DEFAULT = 16

_SAME = ("min_p repetition_penalty frequency_penalty presence_penalty seed n logprobs echo ignore_eos stream").split()
COMPLETION_FIELDS: dict[str, Field] = {
    "max_tokens": IntegerField(
        "Most tokens to generate; 0 together with `echo` only scores the prompt. Default: the room left, at most "
        f"{MOST_BY_DEFAULT}.",
        0,
    ),
    "temperature": NumberField("0 is greedy.", 0, 2, 1.0),
    "top_p": NumberField("Keep the most probable tokens up to this mass; 1 is off.", 0, 1, 1.0, is_low_open=True),
    "top_k": IntegerField("Keep the k most probable tokens; 0 or -1 is off.", -1, default=0),
    **{name: SIMPLE_FIELDS[name] for name in _SAME},
    "best_of": IntegerField("Only 1: nothing is generated that is not returned.", 1, 1),
}
STREAM_OPTIONS = {
    "include_usage": FlagField("End the stream with a chunk that has the usage and no choices."),
    "continuous_usage_stats": FlagField("Every chunk has the usage so far."),
}


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A checked request.

    Attributes:
        model: The name that must be served; None takes whatever is.
        generate: What to generate.
        include_usage: Whether a stream ends with a usage chunk.
        continuous_usage_stats: Whether each chunk of a stream has the usage so far.
    """

    model: str | None
    generate: GenerateRequest
    include_usage: bool
    continuous_usage_stats: bool


def parse_completion(body: Mapping[str, Any]) -> CompletionRequest:
    """Returns the checked request, defaults filled in.

    Raises:
        ApiError: 400 empty_prompt or invalid_value, naming the field.
    """
    sent = {name: value for name, value in body.items() if value is not None}
    model = sent.get("model")
    if model is not None and not isinstance(model, str):
        raise invalid_value("model", f"model must be a string, got {describe(model)}")
    options = _stream_options(sent.get("stream_options", {}))
    return CompletionRequest(model, _generate_request(sent), **options)


def _generate_request(sent: Mapping[str, Any]) -> GenerateRequest:
    values: dict[str, Any] = {
        name: field.check(name, sent[name]) if name in sent else field.default
        for name, field in COMPLETION_FIELDS.items()
    }
    if "prompt" not in sent:
        raise invalid_value("prompt", "prompt is required: a string, a list of strings, or one or more lists of tokens")
    prompts = _check_prompt(sent["prompt"])
    check_sequences(prompts, values["n"])
    stop = check_stop("stop", sent["stop"]) if "stop" in sent else ()
    max_tokens = values.pop("max_tokens")
    if max_tokens == 0 and not values["echo"]:
        raise invalid_value(
            "max_tokens", "max_tokens must be at least 1, got 0: only with echo may nothing be generated"
        )
    del values["best_of"]
    return GenerateRequest(
        prompts=prompts,
        params=take_params(values),
        max_new_tokens=max_tokens,
        stop=stop,
        include_stop=False,
        truncate="error",
        timeout_s=TIMEOUT_S,
        most_by_default=MOST_BY_DEFAULT,
        scores_prompt=values["echo"] and values["logprobs"] is not None,
        **values,
    )


def _check_prompt(value: object) -> tuple[Prompt, ...]:
    """As /generate's, and several lists of tokens besides."""
    if not isinstance(value, list) or not value or not all(isinstance(item, list) for item in value):
        return check_prompt("prompt", value)
    check_count("prompt", value)
    return tuple(_check_tokens(f"prompt[{index}]", tokens) for index, tokens in enumerate(value))


def _check_tokens(name: str, tokens: list[Any]) -> tuple[int, ...]:
    if not tokens:
        raise empty_prompt(name)
    if not is_tokens(tokens):
        raise invalid_value(name, f"{name} must hold token ids only, as the others of a list of prompts may")
    return tuple(tokens)


def _stream_options(value: object) -> dict[str, bool]:
    if not isinstance(value, dict):
        raise invalid_value("stream_options", f"stream_options must be an object, got {describe(value)}")
    sent = {name: option for name, option in value.items() if option is not None}
    return {
        name: field.check(f"stream_options.{name}", sent[name]) if name in sent else False
        for name, field in STREAM_OPTIONS.items()
    }


def model_not_found(asked: str, served: str) -> ApiError:
    """The 404 for a model that is not the one served."""
    message = f"the model {describe(asked)} does not exist: this service has {describe(served)}"
    return ApiError(404, "model_not_found", message, param="model")


def completion_schema() -> dict[str, Any]:
    """Returns the OpenAPI schema of the request body; its limits are those that the checks use."""
    tokens = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1, "maxItems": MAX_PROMPT_TOKENS}
    prompt = prompt_schema()
    prompt["anyOf"].append({"type": "array", "items": tokens, "minItems": 1, "maxItems": MAX_PROMPTS})
    options = {name: field.schema() for name, field in STREAM_OPTIONS.items()}
    ignored = "Accepted for OpenAI's clients, without effect."
    optional: dict[str, dict[str, Any]] = {
        "model": {"type": "string", "description": "The name that GET /v1/models shows."},
        "stop": stop_schema(),
        "stream_options": {"type": "object", "properties": options},
        "suffix": {"type": "string", "description": ignored},
        "user": {"type": "string", "description": ignored},
        **{name: field.schema() for name, field in COMPLETION_FIELDS.items()},
    }
    properties = {"prompt": prompt} | {name: _or_null(schema) for name, schema in optional.items()}
    return {"type": "object", "properties": properties, "required": ["prompt"]}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {**schema, "type": [schema["type"], "null"]} if "type" in schema else schema
