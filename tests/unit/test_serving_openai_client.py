"""The openai client as it is, over a real server on loopback: sync, async, streams, errors and retries."""

import asyncio
from collections.abc import Iterator

import openai
import pytest

from serving.http import exchange
from serving.http.errors import ApiError
from tests.serving_checkpoint import save_run
from tests.serving_server import Server, http_server

FIELDS = {"prompt": "Once upon a time", "max_tokens": 8, "seed": 3, "temperature": 1.2}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = save_run(tmp_path_factory.mktemp("runs") / "tiny")
    with http_server(folder, api_key="abc") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="abc", max_retries=0, timeout=60) as client:
        yield client


def test_a_completion_and_its_stream_have_the_same_text(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", **FIELDS)
    stream = client.completions.create(model="tiny", **FIELDS, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 8


def test_own_sampling_fields_pass_as_extra_body(client: openai.OpenAI) -> None:
    extra = {"top_k": 1, "ignore_eos": True}
    answers = [client.completions.create(model="tiny", **{**FIELDS, "seed": s}, extra_body=extra) for s in (1, 2)]
    assert answers[0].choices[0].text == answers[1].choices[0].text


def test_the_async_client_gets_many_answers_at_once(server: Server, client: openai.OpenAI) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="abc", timeout=60) as asking:
            answers = await asyncio.gather(*(asking.completions.create(model="tiny", **FIELDS) for _ in range(8)))
            async for _ in await asking.completions.create(model="tiny", **FIELDS, stream=True):
                break
        return [answer.choices[0].text for answer in answers]

    assert asyncio.run(ask()) == [client.completions.create(model="tiny", **FIELDS).choices[0].text] * 8


def test_models_are_listed_and_retrieved(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_errors_arrive_as_the_clients_classes(server: Server, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt="")
    assert bad.value.code == "empty_prompt"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-4", **FIELDS)
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="ABC") as other,
        pytest.raises(openai.AuthenticationError) as denied,
    ):
        other.models.list()
    assert "abc" not in str(denied.value).lower()


@pytest.mark.parametrize(("code", "calls"), [("queue_full", 3), ("engine_error", 1)])
def test_the_client_retries_what_may_pass_and_nothing_else(
    server: Server, monkeypatch: pytest.MonkeyPatch, code: str, calls: int
) -> None:
    """The first two answers are planted errors; what the client does about them is its own."""
    errors = {
        "queue_full": ApiError(429, "queue_full", "full.", headers={"Retry-After": "0.01"}),
        "engine_error": ApiError(500, "engine_error", "failed.", headers={"x-should-retry": "false"}),
    }
    original, seen = exchange._start, []

    async def start(*arguments: object) -> object:
        seen.append(1)
        if len(seen) <= 2:
            raise errors[code]
        return await original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(exchange, "_start", start)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="abc", max_retries=2, timeout=60) as client:
        if code == "queue_full":
            assert client.completions.create(model="tiny", **FIELDS).choices
        else:
            with pytest.raises(openai.InternalServerError):
                client.completions.create(model="tiny", **FIELDS)
    assert len(seen) == calls
