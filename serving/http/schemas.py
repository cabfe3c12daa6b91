"""POST /generate: the table of fields, from which both the checks and the OpenAPI schema come.

Nothing is clamped and nothing unknown is ignored: whatever is not exactly as the table says is a 400 that
names the field.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from model.sampling import SamplingParams
from serving.engine.context import DEFAULT_MAX_NEW_TOKENS
from serving.http.errors import ApiError, describe, invalid_value, shorten
from serving.http.fields import ChoiceField, Field, FlagField, IntegerField, NumberField

MAX_PROMPT_CHARS = 65_536
MAX_PROMPTS = 64
MAX_PROMPT_TOKENS = 512
MAX_SEQUENCES = 64
MAX_STOPS = 16
MAX_STOP_CHARS = 128
TIMEOUT_S = 120.0

DEFAULTS = SamplingParams()
SIMPLE_FIELDS: dict[str, Field] = {
    "max_new_tokens": IntegerField(
        "Most tokens to generate, at most the model's max_seq_len. Default: the room left, at most 128.", 1
    ),
    "temperature": NumberField("0 is greedy.", 0, 2, DEFAULTS.temperature),
    "top_k": IntegerField("Keep the k most probable tokens; 0 or -1 is off.", -1, default=DEFAULTS.top_k),
    "top_p": NumberField(
        "Keep the most probable tokens up to this mass; 1 is off.", 0, 1, DEFAULTS.top_p, is_low_open=True
    ),
    "min_p": NumberField("Keep tokens of at least this share of the most probable one.", 0, 1, DEFAULTS.min_p),
    "repetition_penalty": NumberField(
        "Above 1, tokens of prompt and output become less likely.",
        0,
        10,
        DEFAULTS.repetition_penalty,
        is_low_open=True,
    ),
    "frequency_penalty": NumberField(
        "Subtracted from a token's logit for each time it was generated.", -2, 2, DEFAULTS.frequency_penalty
    ),
    "presence_penalty": NumberField(
        "Subtracted once from the logit of each generated token.", -2, 2, DEFAULTS.presence_penalty
    ),
    "seed": IntegerField("Same seed and parameters, same text. Drawn when absent; always returned.", 0),
    "n": IntegerField("Outputs per prompt; prompts x n is at most 64.", 1, 16, default=1),
    "logprobs": IntegerField("Adds each token's logprob, and those of so many most probable ones.", 0, 20),
    "echo": FlagField("Put the prompt before the generated text."),
    "ignore_eos": FlagField("Go on after the end-of-text token."),
    "include_stop": FlagField("Leave the stop string at the end of the text."),
    "stream": FlagField("Answer with server-sent events, one per token."),
    "truncate": ChoiceField("A prompt that is too long: an error, or cut at its left.", ("error", "left")),
    "timeout_s": NumberField("Give up after so many seconds.", 0, 300, TIMEOUT_S, is_low_open=True),
}
ALIASES = {
    "text": "prompt",
    "inputs": "prompt",
    "max_tokens": "max_new_tokens",
    "n_predict": "max_new_tokens",
    "repeat_penalty": "repetition_penalty",
}
NULLABLE = frozenset({"stop", "seed", "logprobs"})  # null says the same as leaving them out
KNOWN = ("prompt", "stop", *SIMPLE_FIELDS, *ALIASES)

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A checked request. Names are those of the table; `prompts` has one or more text or token prompts.

    Attributes:
        max_new_tokens: None for the room left, at most `most_by_default`; 0 only scores the prompts.
        scores_prompt: Whether the logprobs of the prompt's tokens are asked for.
    """

    prompts: tuple[Prompt, ...]
    params: SamplingParams
    max_new_tokens: int | None
    stop: tuple[str, ...]
    seed: int | None
    n: int
    logprobs: int | None
    echo: bool
    ignore_eos: bool
    include_stop: bool
    stream: bool
    truncate: str
    timeout_s: float
    most_by_default: int = DEFAULT_MAX_NEW_TOKENS
    scores_prompt: bool = False


def parse_generate(body: Mapping[str, Any]) -> GenerateRequest:
    """Returns the checked request, defaults filled in.

    Raises:
        ApiError: 400 unknown_field, empty_prompt or invalid_value, naming the field as the client wrote it.
    """
    sent = _by_canonical_name(body)
    values: dict[str, Any] = {
        name: field.check(*sent[name]) if name in sent else field.default for name, field in SIMPLE_FIELDS.items()
    }
    if "prompt" not in sent:
        raise invalid_value("prompt", "prompt is required: a string, a list of strings or a list of token ids")
    prompts = check_prompt(*sent["prompt"])
    stop = check_stop(*sent["stop"]) if "stop" in sent else ()
    check_sequences(prompts, values["n"])
    return GenerateRequest(prompts=prompts, params=take_params(values), stop=stop, **values)


def take_params(values: dict[str, Any]) -> SamplingParams:
    """Takes the checked sampling fields out of `values`."""
    return SamplingParams(**{field.name: values.pop(field.name) for field in fields(SamplingParams)})


def check_sequences(prompts: Sequence[Prompt], n: int) -> None:
    """Raises the ApiError for more sequences than one request may have."""
    if len(prompts) * n > MAX_SEQUENCES:
        raise invalid_value("n", f"prompts x n must be at most {MAX_SEQUENCES}, got {len(prompts)} x {n}")


def _by_canonical_name(body: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Maps each canonical name to (name as sent, value)."""
    sent: dict[str, tuple[str, Any]] = {}
    for name, value in body.items():
        if name not in KNOWN:
            raise _unknown_field(name)
        canonical = ALIASES.get(name, name)
        if canonical in sent:
            message = f"{sent[canonical][0]} and {name} are the same field: send one of them"
            raise invalid_value(name, message)
        if value is not None or canonical not in NULLABLE:
            sent[canonical] = (name, value)
    return sent


def _unknown_field(name: str) -> ApiError:
    nearest = difflib.get_close_matches(name[:64], KNOWN, n=1, cutoff=0.0)[0]
    shown = shorten(name)
    message = f"unknown field {shown}: the nearest known one is {nearest}; /docs lists all"
    return ApiError(400, "unknown_field", message, param=shown)


def check_prompt(name: str, value: object) -> tuple[Prompt, ...]:
    """Returns the prompts of a string, a list of strings or a list of token ids."""
    if isinstance(value, str):
        return (_check_text(name, value),)
    if not isinstance(value, list):
        message = f"{name} must be a string, a list of strings or a list of token ids, got {describe(value)}"
        raise invalid_value(name, message)
    if not value:
        raise empty_prompt(name)
    if is_tokens(value):
        return (tuple(value),)
    check_count(name, value)
    return tuple(_check_text(f"{name}[{index}]", item) for index, item in enumerate(value))


def is_tokens(value: list[Any]) -> bool:
    """Tells whether a list holds whole numbers only; which of them are tokens, the model knows."""
    return all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def check_count(name: str, prompts: list[Any]) -> None:
    """Raises the ApiError for more prompts than one request may have."""
    if len(prompts) > MAX_PROMPTS:
        raise invalid_value(name, f"{name} must have at most {MAX_PROMPTS} prompts, got {len(prompts)}")


def _check_text(name: str, value: object) -> str:
    if not isinstance(value, str):
        message = f"{name} must be a string, as the others of a list of prompts are, got {describe(value)}"
        raise invalid_value(name, message)
    if not value:
        raise empty_prompt(name)
    if len(value) > MAX_PROMPT_CHARS:
        message = f"{name} must have at most {MAX_PROMPT_CHARS} characters, got {len(value)}"
        raise invalid_value(name, message)
    return value


def check_stop(name: str, value: object) -> tuple[str, ...]:
    """Returns the stop strings of one or a list of them."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise invalid_value(name, f"{name} must be a string or a list of strings, got {describe(value)}")
    if len(stops) > MAX_STOPS:
        raise invalid_value(name, f"{name} must have at most {MAX_STOPS} strings, got {len(stops)}")
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARS:
            message = f"{name} must hold strings of 1 to {MAX_STOP_CHARS} characters, got {describe(stop)}"
            raise invalid_value(name, message)
    return tuple(stops)


def empty_prompt(name: str) -> ApiError:
    """The 400 for a prompt without a character or a token."""
    return ApiError(400, "empty_prompt", f"{name} is empty: send at least one character", param=name)


def generate_schema() -> dict[str, Any]:
    """Returns the OpenAPI schema of the request body; its limits are those that the checks use."""
    properties = {"prompt": prompt_schema(), "stop": stop_schema()}
    properties |= {name: _nullable(name, field.schema()) for name, field in SIMPLE_FIELDS.items()}
    for alias, name in ALIASES.items():
        properties[alias] = {**properties[name], "description": f"Alias of {name}; send one of them."}
    one_prompt = [{"required": [name]} for name in ("prompt", "text", "inputs")]
    return {"type": "object", "properties": properties, "oneOf": one_prompt, "additionalProperties": False}


def prompt_schema() -> dict[str, Any]:
    """Returns the OpenAPI schema of what `check_prompt` takes."""
    text = {"type": "string", "minLength": 1, "maxLength": MAX_PROMPT_CHARS}
    texts = {"type": "array", "items": text, "minItems": 1, "maxItems": MAX_PROMPTS}
    token = {"type": "integer", "minimum": 0}
    tokens = {"type": "array", "items": token, "minItems": 1, "maxItems": MAX_PROMPT_TOKENS}
    return {"anyOf": [text, texts, tokens], "description": "Text, several texts, or one text as token ids."}


def stop_schema() -> dict[str, Any]:
    """Returns the OpenAPI schema of what `check_stop` takes."""
    text = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
    texts = {"type": "array", "items": text, "maxItems": MAX_STOPS}
    about = "The text ends before the first of these."
    return {"anyOf": [text, texts, {"type": "null"}], "description": about}


def _nullable(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {**schema, "type": [schema["type"], "null"]} if name in NULLABLE else schema
