"""Hostile requests with the answer that each must get, and a client that sends bytes as they are."""

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

GENERATE, COMPLETIONS = "/generate", "/v1/completions"
TEXTS = ["a", "Once upon", "naïve 😀 e\u0301 漢字", "\ud800", "\x00", "</s>", " ", "\r\n", "<0x0A>", "\u2581", "x" * 40]
WRONG_TYPES: list[Any] = ["1", [], {}, [1], True, "NaN", {"a": [None]}]
# Of each field: values beyond its range, as they stand in JSON.
OUT_OF_RANGE = {
    "temperature": ["-0.1", "2.01", "NaN", "Infinity", "-Infinity", "1e999", "9" * 500],
    "top_p": ["0", "1.0001", "-1", "NaN"],
    "min_p": ["-0.5", "1.5", "NaN"],
    "top_k": ["-2", "0.5", "1e2", "9" * 30],
    "repetition_penalty": ["0", "-1", "10.5", "NaN"],
    "frequency_penalty": ["-2.5", "3"],
    "presence_penalty": ["-2.5", "3"],
    "seed": ["-1", "9223372036854775808", "1.0"],
    "n": ["0", "17", "1000000000", "-1"],
    "logprobs": ["-1", "21", "1000000"],
    "max_tokens": ["-1", "1000000000", "2.5"],
}
GOOD: dict[str, list[Any]] = {
    "temperature": [0, 1e-8, 0.7, 2],
    "top_p": [1e-9, 0.5, 1],
    "top_k": [-1, 0, 1, 10**12],
    "min_p": [0, 0.5, 1],
    "repetition_penalty": [1e-9, 1, 10],
    "frequency_penalty": [-2, 0, 2],
    "presence_penalty": [-2, 0, 2],
    "seed": [0, 1, 2**63 - 1],
    "n": [1, 2],
    "logprobs": [0, 20],
    "stop": ["a", ["e", "zz"], []],
    "echo": [False, True],
    "ignore_eos": [False, True],
    "stream": [False, True],
}


@dataclass(frozen=True)
class Model:
    """What the fuzzer must know of the model that answers."""

    max_seq_len: int
    vocab_size: int


@dataclass(frozen=True)
class Case:
    """One request. `status` None: the client goes away without waiting for an answer."""

    kind: str
    status: int | None
    body: bytes
    path: str = GENERATE
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    pauses: int = 0


def cases(seed: int, count: int, model: Model) -> Iterator[Case]:
    """Yields `count` requests, the same for the same seed."""
    rng = random.Random(seed)
    for number in range(count):
        # In turn, so that every kind comes up however few are asked for.
        yield KINDS[number % len(KINDS)](rng, model)


def _body(rng: random.Random, **fields: Any) -> dict[str, Any]:
    chosen = rng.sample(sorted(GOOD), rng.randrange(4))
    body = {name: rng.choice(GOOD[name]) for name in chosen}
    return {"prompt": rng.choice(TEXTS), "max_tokens": rng.randint(1, 3), **body, **fields}


def _case(kind: str, status: int | None, body: Any, rng: random.Random, **more: Any) -> Case:
    path = more.pop("path", None) or rng.choice([GENERATE, COMPLETIONS])
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Case(kind, status, raw, path, **more)


def good(rng: random.Random, model: Model) -> Case:
    return _case("good", 200, _body(rng), rng)


def slow(rng: random.Random, model: Model) -> Case:
    return _case("slow body", 200, _body(rng), rng, pauses=rng.randint(1, 3))


def wrong_type(rng: random.Random, model: Model) -> Case:
    name = rng.choice(sorted(set(OUT_OF_RANGE)))
    return _case("wrong type", 400, _body(rng, **{name: rng.choice(WRONG_TYPES)}), rng)


def wrong_prompt(rng: random.Random, model: Model) -> Case:
    wrong: list[Any] = [5, 1.5, {}, True, [1.5], [None], ["a", 5], [5, "a"], [True, False], [{}], [[[5]]], [["a"]]]
    return _case("wrong prompt", 400, _body(rng, prompt=rng.choice(wrong)), rng)


def out_of_range(rng: random.Random, model: Model) -> Case:
    name = rng.choice(sorted(OUT_OF_RANGE))
    text = json.dumps({key: value for key, value in _body(rng).items() if key != name})
    literal = rng.choice(OUT_OF_RANGE[name])
    return _case("out of range", 400, f'{text[:-1]},"{name}":{literal}}}'.encode(), rng)


def unknown_field(rng: random.Random, model: Model) -> Case:
    path = rng.choice([GENERATE, COMPLETIONS])
    name = rng.choice(["max_new_token", "Prompt", "", "__class__", "x" * 5000, "temperatur\u00e9"])
    return _case("unknown field", 400 if path == GENERATE else 200, _body(rng, **{name: 1}), rng, path=path)


def alias_twice(rng: random.Random, model: Model) -> Case:
    name, value = rng.choice([("text", "b"), ("inputs", ["b"]), ("n_predict", 2), ("max_new_tokens", 1)])
    return _case("alias twice", 400, _body(rng, **{name: value}), rng, path=GENERATE)


def key_twice(rng: random.Random, model: Model) -> Case:
    text = json.dumps(_body(rng))
    return _case("key twice", 400, (text[:-1] + ',"prompt":"again"}').encode(), rng)


def broken_json(rng: random.Random, model: Model) -> Case:
    raw = json.dumps(_body(rng)).encode()
    others = [b"", b"null", b"[]", b'"a"', b"\xff\xfe", raw.decode().encode("utf-16"), b'{"prompt":"\xff"}', b"{'a':1}"]
    return _case("broken JSON", 400, rng.choice([raw[: rng.randrange(len(raw))], *others]), rng)


def nested(rng: random.Random, model: Model) -> Case:
    opening = rng.choice([b"[", b'{"a":', b'[{"a":'])
    return _case("nested", 400, b'{"prompt":' + opening * rng.choice([500, 100_000]), rng)


def too_large(rng: random.Random, model: Model) -> Case:
    raw = b'{"prompt":"' + b"x" * (2 << 20) + b'"}'
    headers = rng.choice([{}, {"Transfer-Encoding": "chunked"}])
    return _case("2 MiB", 413, raw, rng, headers=headers)


def too_long_text(rng: random.Random, model: Model) -> Case:
    length = rng.choice([3000, 65_536, 65_537])
    return _case("long text", 400, {"prompt": "ab cd " * (length // 6 + 1), "max_tokens": 1}, rng)


def beyond_vocabulary(rng: random.Random, model: Model) -> Case:
    token = rng.choice([-1, model.vocab_size, 10**6, 2**63, 10**300])
    return _case("token", 400, _body(rng, prompt=[5, token], stream=False), rng)


def context(rng: random.Random, model: Model) -> Case:
    length = model.max_seq_len + rng.choice([-1, 0, 1])
    status = 400 if length > model.max_seq_len else 200
    return _case("context", status, {"prompt": [5] * length, "max_tokens": 1}, rng)


def empty_prompt(rng: random.Random, model: Model) -> Case:
    return _case("empty prompt", 400, _body(rng, prompt=rng.choice(["", [], [""], ["a", ""], "\ufeff", None])), rng)


def too_many(rng: random.Random, model: Model) -> Case:
    wrong: list[dict[str, Any]] = [
        {"prompt": ["a"] * 65},
        {"prompt": ["a"] * 33, "n": 2},
        {"stop": ["a"] * 100_000},
        {"stop": [""]},
        {"stop": "x" * 129},
    ]
    return _case("too many", 400, _body(rng, **rng.choice(wrong)), rng)


def other_route(rng: random.Random, model: Model) -> Case:
    method, path, status = rng.choice(
        [
            ("POST", "/generat", 404),
            ("POST", "/generate/", 404),
            ("GET", "/%00", 404),
            ("GET", "/../etc/passwd", 404),
            ("GET", "/generate", 405),
            ("DELETE", "/v1/completions", 405),
            ("PUT", "/tokenize", 405),
            ("GET", "/v1/models/nothing", 404),
            ("GET", "/health?" + "x" * 2000, 200),
        ]
    )
    return Case("route", status, b"", path, method)


def tokenizing(rng: random.Random, model: Model) -> Case:
    path, body, status = rng.choice(
        [
            ("/tokenize", {"prompt": rng.choice(TEXTS)}, 200),
            ("/tokenize", {"prompt": 5}, 400),
            ("/tokenize", {"prompt": "a" * 65_537}, 400),
            ("/detokenize", {"tokens": [5, 6, 0]}, 200),
            ("/detokenize", {"tokens": [model.vocab_size]}, 400),
            ("/detokenize", {"tokens": [0.5]}, 400),
            ("/detokenize", {"tokens": "5"}, 400),
        ]
    )
    return _case("tokenizing", status, body, rng, path=path)


def goes_away(rng: random.Random, model: Model) -> Case:
    body = json.dumps(_body(rng, max_tokens=30, n=4, ignore_eos=True, prompt="Once")).encode()
    is_cut = rng.random() < 0.5
    headers = {"Content-Length": str(len(body) + 10)} if is_cut else {}
    return _case("goes away", None, body, rng, headers=headers)


KINDS: list[Callable[[random.Random, Model], Case]] = [
    good, slow, wrong_type, wrong_prompt, out_of_range, unknown_field, alias_twice, key_twice, broken_json, nested,
    too_large, too_long_text, beyond_vocabulary, context, empty_prompt, too_many, other_route, tokenizing, goes_away,
]  # fmt: skip


async def send(host: str, port: int, case: Case, *, timeout_s: float = 60) -> tuple[int, bytes] | None:
    """Sends a case over a connection of its own and returns status and body; None where the client went away."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        async with asyncio.timeout(timeout_s):
            await _write(writer, case)
            if case.status is None:
                await asyncio.sleep(0)
                return None
            answer = await reader.read()
    except ConnectionError:
        answer = b""  # the server may close while a body is sent that it does not want
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return (int(head.split(b" ", 2)[1]), body) if head else (0, b"")


async def _write(writer: asyncio.StreamWriter, case: Case) -> None:
    is_chunked = "Transfer-Encoding" in case.headers
    length = {} if is_chunked else {"Content-Length": str(len(case.body))}
    headers = {"Host": "test", "Connection": "close", **length, **case.headers}
    lines = [f"{case.method} {case.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n")
    step = max(len(case.body) // (case.pauses + 1), 1) if case.pauses else 1 << 16
    for start in range(0, len(case.body), step):
        part = case.body[start : start + step]
        writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n" if is_chunked else part)
        await writer.drain()
        if case.pauses:
            await asyncio.sleep(0.005)
    if is_chunked:
        writer.write(b"0\r\n\r\n")
    await writer.drain()


def verdict(case: Case, answer: tuple[int, bytes] | None) -> str | None:
    """Returns what is wrong with an answer, or None."""
    if case.status is None:
        return None
    status, body = answer or (0, b"")
    if case.kind == "2 MiB" and status == 0:
        return None  # the refusal was sent, and lost where the connection was reset under the rest of the body
    if status != case.status:
        return f"{case.kind}: {status} in place of {case.status} for {case.path} {case.body[:300]!r}: {body[:300]!r}"
    if status >= 400:
        error = json.loads(body)["error"]
        if set(error) != {"message", "type", "param", "code"}:
            return f"{case.kind}: another shape of error: {body[:300]!r}"
    return None
