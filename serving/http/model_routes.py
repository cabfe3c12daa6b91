"""Routes about the served model and its tokenizer: /v1/models, /tokenize, /detokenize and /tokenizer_info."""

import asyncio
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel

from serving.engine.loading import ServedModel
from serving.http.body import read_json_object
from serving.http.completion_answers import ModelList, ServedModelCard
from serving.http.completion_schema import model_not_found
from serving.http.errors import describe, invalid_value
from serving.http.fields import FlagField
from serving.http.generation import check_tokens
from serving.http.openapi import errors, json_body
from serving.http.schemas import MAX_PROMPT_CHARS, is_tokens
from serving.http.service import Service

_SPECIAL = FlagField("Accepted for other tokenizers: this one adds no token to a text.")


class TokenizeAnswer(BaseModel):
    """Answer of POST /tokenize: the tokens that a prompt of this text is generated from."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeAnswer(BaseModel):
    """Answer of POST /detokenize."""

    prompt: str


class TokenizerInfo(BaseModel):
    """Answer of GET /tokenizer_info. No token stands before a text in training, so none is added to a prompt."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    unk_token: str
    bos_token: str
    eos_token: str
    unk_token_id: int
    bos_token_id: int
    eos_token_id: int
    add_bos_token: bool
    add_eos_token: bool
    chat_template: None = None


def add_model_routes(app: FastAPI, service: Service) -> None:
    """Adds the routes to an app."""
    _add_models(app, service)
    _add_tokenizer(app, service)


def _add_models(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models", response_model=ModelList, responses=errors(401, 503))
    async def models() -> ModelList:
        """Lists the one model that is served."""
        return ModelList(object="list", data=[_card(service)])

    @app.get("/v1/models/{model:path}", response_model=ServedModelCard, responses=errors(401, 404, 503))
    async def model(model: str) -> ServedModelCard:
        """Describes a model by its id."""
        card = _card(service)
        if model != card.id:
            raise model_not_found(model, card.id)
        return card


def _add_tokenizer(app: FastAPI, service: Service) -> None:
    statuses = (400, 401, 408, 413, 503)

    @app.post("/tokenize", responses=errors(*statuses), openapi_extra=json_body(_tokenize_schema()))
    async def tokenize(request: Request) -> TokenizeAnswer:
        """Returns the tokens of a text, after the checkpoint's normaliser."""
        text = _parse_tokenize(await read_json_object(request))
        served = service.engine().served
        tokens = await asyncio.to_thread(served.tokenizer.encode_prompt, text)
        return TokenizeAnswer(tokens=tokens, count=len(tokens), max_model_len=served.max_seq_len)

    @app.post("/detokenize", responses=errors(*statuses), openapi_extra=json_body(_detokenize_schema()))
    async def detokenize(request: Request) -> DetokenizeAnswer:
        """Returns the text of tokens; control tokens have none."""
        body = await read_json_object(request)
        served = service.engine().served
        # Off the event loop: 1 MiB holds half a million ids.
        text = await asyncio.to_thread(lambda: served.tokenizer.decode(_parse_detokenize(body, served)))
        return DetokenizeAnswer(prompt=text)

    @app.get("/tokenizer_info", responses=errors(401, 503))
    async def tokenizer_info() -> TokenizerInfo:
        """Describes the tokenizer."""
        return _info(service.engine().served)


def _card(service: Service) -> ServedModelCard:
    served = service.engine().served
    return ServedModelCard(
        id=served.name,
        object="model",
        created=service.loaded_at,
        owned_by="rayjob",
        max_model_len=served.max_seq_len,
    )


def _info(served: ServedModel) -> TokenizerInfo:
    tokenizer = served.tokenizer
    unk_id, bos_id, eos_id = tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id
    return TokenizerInfo(
        tokenizer_class="LlamaTokenizer",
        vocab_size=tokenizer.vocab_size,
        model_max_length=served.max_seq_len,
        unk_token=tokenizer.label(unk_id),
        bos_token=tokenizer.label(bos_id),
        eos_token=tokenizer.label(eos_id),
        unk_token_id=unk_id,
        bos_token_id=bos_id,
        eos_token_id=eos_id,
        add_bos_token=False,
        add_eos_token=False,
    )


def _parse_tokenize(body: dict[str, Any]) -> str:
    text = body.get("prompt")
    if not isinstance(text, str):
        raise invalid_value("prompt", f"prompt must be a string, got {describe(text)}")
    if len(text) > MAX_PROMPT_CHARS:
        message = f"prompt must have at most {MAX_PROMPT_CHARS} characters, got {len(text)}"
        raise invalid_value("prompt", message)
    if (special := body.get("add_special_tokens")) is not None:
        _SPECIAL.check("add_special_tokens", special)
    return text


def _parse_detokenize(body: dict[str, Any], served: ServedModel) -> list[int]:
    tokens = body.get("tokens")
    if not isinstance(tokens, list) or not is_tokens(tokens):
        raise invalid_value("tokens", f"tokens must be a list of token ids, got {describe(tokens)}")
    return check_tokens("tokens", tokens, served)


def _tokenize_schema() -> dict[str, Any]:
    text = {"type": "string", "maxLength": MAX_PROMPT_CHARS}
    special = {**_SPECIAL.schema(), "type": ["boolean", "null"]}
    properties = {"prompt": text, "add_special_tokens": special}
    return {"type": "object", "properties": properties, "required": ["prompt"]}


def _detokenize_schema() -> dict[str, Any]:
    tokens = {"type": "array", "items": {"type": "integer", "minimum": 0}}
    return {"type": "object", "properties": {"tokens": tokens}, "required": ["tokens"]}
