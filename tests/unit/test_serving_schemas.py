"""The request of POST /generate: defaults, aliases, and every way to get a value wrong."""

import asyncio
import json
import threading
from typing import Any

import pytest
from fastapi import Request
from hypothesis import given
from hypothesis import strategies as st

from model.sampling import SamplingParams
from serving.http import body as body_module
from serving.http.body import parse_json_object
from serving.http.errors import ApiError
from serving.http.fields import IntegerField, NumberField
from serving.http.schemas import (
    ALIASES,
    KNOWN,
    SIMPLE_FIELDS,
    GenerateRequest,
    generate_schema,
    parse_generate,
)


def refusal(raw: str | bytes) -> ApiError:
    body = raw.encode() if isinstance(raw, str) else raw
    with pytest.raises(ApiError) as caught:
        parse_generate(parse_json_object(body))
    return caught.value


def test_only_a_prompt_gives_the_defaults_of_the_contract() -> None:
    request = parse_generate({"prompt": "Once"})
    assert request.prompts == ("Once",)
    assert request.params == SamplingParams(0.8, 50, 0.95, 0.0, 1.0, 0.0, 0.0)
    assert (request.max_new_tokens, request.seed, request.logprobs, request.stop) == (None, None, None, ())
    assert (request.n, request.timeout_s, request.truncate) == (1, 120, "error")
    assert [request.echo, request.ignore_eos, request.include_stop, request.stream] == [False] * 4


def test_zero_is_not_unset() -> None:
    body = {"prompt": "a", "temperature": 0, "top_k": 0, "top_p": 1, "seed": 0, "logprobs": 0}
    request = parse_generate(body)
    assert (request.params.temperature, request.params.top_k, request.params.top_p) == (0, 0, 1)
    assert (request.seed, request.logprobs) == (0, 0)


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_an_alias_means_its_field(alias: str, name: str) -> None:
    value = "Once" if name == "prompt" else 2
    rest = {} if name == "prompt" else {"prompt": "Once"}
    assert parse_generate({alias: value, **rest}) == parse_generate({name: value, **rest})


def test_a_field_and_its_alias_at_once_are_refused() -> None:
    error = refusal('{"prompt":"a","text":"b"}')
    assert (error.status, error.code) == (400, "invalid_value")
    assert "prompt" in error.message
    assert "text" in error.message


def test_an_unknown_field_is_named_with_its_nearest() -> None:
    error = refusal('{"prompt":"a","max_new_token":4}')
    assert (error.code, error.param) == ("unknown_field", "max_new_token")
    assert "max_new_tokens" in error.message


@pytest.mark.parametrize("name", sorted({"stop", "seed", "logprobs"}))
def test_null_says_unset_where_the_default_is_none(name: str) -> None:
    assert parse_generate({"prompt": "a", name: None}) == parse_generate({"prompt": "a"})


PROMPTS = [
    ("a", ("a",)),
    (["a", "b"], ("a", "b")),
    ([1, 2, 3], ((1, 2, 3),)),
    ([0], ((0,),)),
    ("   ", ("   ",)),
    ("x" * 65_536, ("x" * 65_536,)),
]


@pytest.mark.parametrize(("sent", "prompts"), PROMPTS)
def test_prompts_are_text_texts_or_tokens(sent: Any, prompts: tuple[Any, ...]) -> None:
    assert parse_generate({"prompt": sent}).prompts == prompts


BAD_VALUES = [
    ("top_k", "0.01"),
    ("top_k", '"5"'),
    ("top_k", "true"),
    ("top_k", "-5"),
    ("top_k", "5.0"),
    ("top_k", "null"),
    ("temperature", "NaN"),
    ("temperature", "Infinity"),
    ("temperature", "1e999"),
    ("temperature", "-3"),
    ("temperature", "2.1"),
    ("temperature", "9" * 5000),
    ("temperature", "-" + "9" * 399),
    ("temperature", '"0.5"'),
    ("temperature", "false"),
    ("temperature", "[0.5]"),
    ("top_p", "0"),
    ("top_p", "-Infinity"),
    ("top_p", "1.5"),
    ("min_p", "-0.1"),
    ("repetition_penalty", "0"),
    ("repeat_penalty", "11"),
    ("frequency_penalty", "2.5"),
    ("presence_penalty", "-2.5"),
    ("max_new_tokens", "0"),
    ("max_new_tokens", "3.5"),
    ("max_tokens", "-1"),
    ("seed", "-1"),
    ("seed", str(2**63)),
    ("seed", "9" * 5000),
    ("n", "0"),
    ("n", "17"),
    ("n", "1000000000"),
    ("logprobs", "21"),
    ("logprobs", "1000000"),
    ("logprobs", "true"),
    ("echo", "1"),
    ("stream", '"true"'),
    ("truncate", '"right"'),
    ("truncate", "true"),
    ("timeout_s", "0"),
    ("timeout_s", "301"),
    ("stop", '""'),
    ("stop", '["a", ""]'),
    ("stop", "[1]"),
    ("stop", "5"),
    ("stop", json.dumps("x" * 129)),
    ("stop", json.dumps(["x"] * 17)),
    ("stop", json.dumps(["x"] * 100_000)),
]


@pytest.mark.parametrize(("name", "value"), BAD_VALUES, ids=lambda text: text[:16])
def test_a_bad_value_is_a_400_that_names_its_field(name: str, value: str) -> None:
    error = refusal(f'{{"prompt":"Once","{name}":{value}}}')
    assert (error.status, error.code, error.param) == (400, "invalid_value", name)
    assert error.message.startswith(name)
    assert len(error.message) < 300


BAD_PROMPTS = [
    ("{}", "invalid_value", "prompt"),
    ('{"prompt":null}', "invalid_value", "prompt"),
    ('{"prompt":5}', "invalid_value", "prompt"),
    ('{"prompt":{}}', "invalid_value", "prompt"),
    ('{"prompt":true}', "invalid_value", "prompt"),
    ('{"prompt":""}', "empty_prompt", "prompt"),
    ('{"inputs":""}', "empty_prompt", "inputs"),
    ('{"prompt":[]}', "empty_prompt", "prompt"),
    ('{"prompt":["a",""]}', "empty_prompt", "prompt[1]"),
    ('{"prompt":["a",1]}', "invalid_value", "prompt[1]"),
    ('{"prompt":[1,true]}', "invalid_value", "prompt[0]"),
    ('{"prompt":[1.5]}', "invalid_value", "prompt[0]"),
    ('{"prompt":[NaN]}', "invalid_value", "prompt[0]"),
    ('{"prompt":[[1,2]]}', "invalid_value", "prompt[0]"),
    (json.dumps({"prompt": "x" * 65_537}), "invalid_value", "prompt"),
    (json.dumps({"prompt": ["x"] * 65}), "invalid_value", "prompt"),
    (json.dumps({"prompt": ["x"] * 33, "n": 2}), "invalid_value", "n"),
]


@pytest.mark.parametrize(("raw", "code", "param"), BAD_PROMPTS, ids=lambda text: text[:24])
def test_a_bad_prompt_is_a_400_that_names_it(raw: str, code: str, param: str) -> None:
    error = refusal(raw)
    assert (error.status, error.code, error.param) == (400, code, param)


NOT_JSON = [
    b"",
    b"   ",
    b'{"prompt":"Once"',
    b"[1,2,3]",
    b"null",
    b'"Once"',
    b"\xff\xfe",
    b'\xef\xbb\xbf{"prompt":"a"}',
    '{"prompt":"a"}'.encode("utf-16"),
    b'{"prompt":"a\nb"}',
    b'{"prompt":"a","prompt":"b"}',
    b'{"prompt":' + b"[" * 100_000,
    b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
]


@pytest.mark.parametrize("body", NOT_JSON, ids=lambda body: repr(body[:16]))
def test_a_body_that_is_not_one_json_object_is_invalid_json(body: bytes) -> None:
    error = refusal(body)
    assert (error.status, error.code) == (400, "invalid_json")


def test_a_nested_value_below_the_depth_limit_is_refused_by_its_field() -> None:
    assert refusal('{"prompt":' + "[" * 500 + "]" * 500 + "}").param == "prompt[0]"


def test_hints_for_a_field_name_of_a_megabyte_cost_nothing() -> None:
    error = refusal(json.dumps({"prompt": "a", "x" * 900_000: 1}))
    assert error.code == "unknown_field"
    assert len(error.message) < 300


def test_a_message_shows_the_range_that_was_left() -> None:
    assert refusal('{"prompt":"a","top_p":1.5}').message == "top_p must be in (0, 1], got 1.5"
    assert refusal('{"prompt":"a","n":17}').message == "n must be in 1..16, got 17"
    assert refusal('{"prompt":"a","seed":-1}').message == "seed must be at least 0, got -1"
    assert refusal(f'{{"prompt":"a","seed":{2**63}}}').message.startswith(f"seed must be in 0..{2**63 - 1}, got")


def test_lone_surrogates_in_names_and_values_do_not_break_the_error_body() -> None:
    for raw in (r'{"prompt":"a","\ud800":1}', r'{"prompt":"a","truncate":"\udfff"}'):
        assert json.loads(bytes(refusal(raw).response().body))["error"]["code"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=3),
    max_leaves=8,
)
bodies = st.dictionaries(st.sampled_from(KNOWN) | st.text(max_size=12), json_values, max_size=5)


def outcome(body: bytes) -> GenerateRequest | ApiError:
    try:
        return parse_generate(parse_json_object(body))
    except ApiError as error:
        return error


@given(bodies)
def test_any_object_is_a_request_or_a_400(body: dict[str, Any]) -> None:
    result = outcome(json.dumps(body).encode())
    if isinstance(result, ApiError):
        assert result.status == 400
        assert json.loads(bytes(result.response().body)) == result.body()
    else:
        assert result.params.problems() == []


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_a_400(body: bytes) -> None:
    result = outcome(body)
    assert isinstance(result, GenerateRequest) or result.status == 400


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p", "repetition_penalty"])
def test_the_ends_of_each_range_are_those_of_the_sampler(name: str) -> None:
    field = SIMPLE_FIELDS[name]
    assert isinstance(field, IntegerField | NumberField)
    is_low_open = isinstance(field, NumberField) and field.is_low_open
    for value in (field.high, 1e-9 if is_low_open else field.low):
        assert SamplingParams(**{name: value}).problems() == []
    assert SamplingParams(**{name: field.low if is_low_open else field.low - 1}).problems() != []


def test_the_published_schema_lists_every_field_and_alias() -> None:
    schema = generate_schema()
    assert set(schema["properties"]) == set(KNOWN)
    assert schema["properties"]["top_p"]["exclusiveMinimum"] == 0
    assert schema["properties"]["temperature"]["default"] == 0.8
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize("is_large", [False, True])
def test_a_large_body_is_parsed_off_the_event_loop(monkeypatch: pytest.MonkeyPatch, is_large: bool) -> None:
    threads = []

    def parse(content: bytes) -> dict[str, Any]:
        threads.append(threading.get_ident())
        return parse_json_object(content)

    monkeypatch.setattr(body_module, "parse_json_object", parse)
    content = b'{"prompt": "%s"}' % (b"a" * (body_module.PARSED_AT_ONCE_BYTES if is_large else 5))

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": content, "more_body": False}

    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    found = asyncio.run(body_module.read_json_object(request))
    assert found == json.loads(content)
    assert (threads[0] != threading.get_ident()) == is_large
