"""POST /generate and its neighbours through ASGI: answers, limits and errors, against the naive generator."""

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model.generate import generate
from model.sampling import SamplingParams
from serving.http.schemas import KNOWN
from tests.serving_checkpoint import MAX_SEQ_LEN, Served, close, save_run, serve_run

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    service = serve_run(save_run(tmp_path_factory.mktemp("runs") / "tiny"))
    yield service
    close(service)


def model_of(served: Served) -> Any:
    return served.service.engine().served


def expect_error(response: Any, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(response.json()) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert "Traceback" not in response.text
    return error


def test_an_answer_is_what_the_naive_generator_yields(served: Served) -> None:
    model = model_of(served)
    prompt = model.tokenizer.encode_prompt(PROMPT)
    params = SamplingParams(temperature=1.2, top_k=20, repetition_penalty=1.1)
    eos_id = model.tokenizer.eos_id
    expected = [
        generated.token for generated in generate(model.model, prompt, params, max_new_tokens=20, seed=5, eos_id=eos_id)
    ]
    response = served.client.generate(
        prompt=PROMPT, max_new_tokens=20, temperature=1.2, top_k=20, repetition_penalty=1.1, seed=5
    )
    answer = response.json()
    output = answer["outputs"][0]
    assert output["tokens"] == expected
    assert output["text"] == answer["text"]
    assert output["seed"] == 5
    assert answer["checkpoint"] == {"step": 1200, "sha256": model.sha256}
    assert answer["model"] == "tiny"
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(expected),
        "total_tokens": len(prompt) + len(expected),
        "prompt_truncated": 0,
    }


def test_timings_add_up(served: Served) -> None:
    timings = served.client.generate(prompt=PROMPT, max_new_tokens=8, ignore_eos=True).json()["timings"]
    assert all(value >= 0 for value in timings.values())
    # Each is rounded to a microsecond by itself.
    assert timings["ttft_ms"] == pytest.approx(timings["queue_ms"] + timings["prefill_ms"], abs=0.01)


def test_the_drawn_seed_is_returned_and_repeats_the_text(served: Served) -> None:
    drawn = served.client.generate(prompt=PROMPT, temperature=1.5, max_new_tokens=20).json()
    seed = drawn["outputs"][0]["seed"]
    again = served.client.generate(prompt=PROMPT, temperature=1.5, max_new_tokens=20, seed=seed).json()
    assert again["text"] == drawn["text"]
    assert served.client.generate(prompt=PROMPT, max_new_tokens=1).json()["outputs"][0]["seed"] != seed


def test_zero_values_are_taken_at_their_word(served: Served) -> None:
    body = {"prompt": PROMPT, "temperature": 0, "top_k": 0, "top_p": 1, "seed": 0, "max_new_tokens": 10}
    first, second = served.client.generate(**body).json(), served.client.generate(**body | {"seed": 9}).json()
    assert first["outputs"][0]["seed"] == 0
    assert first["text"] == second["text"], "greedy does not depend on the seed"


def test_greedy_and_nearly_greedy_parameters_agree(served: Served) -> None:
    variants: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1e-8},
        {"top_p": 1e-6},
        {"top_k": 1},
        {"temperature": 0, "top_p": 0.5, "top_k": 3},
    ]
    texts = {served.client.generate(prompt=PROMPT, max_new_tokens=12, **v).json()["text"] for v in variants}
    assert len(texts) == 1


@pytest.mark.parametrize("top_k", [-1, 10**6, 10**12])
def test_top_k_beyond_the_vocabulary_is_off(served: Served, top_k: int) -> None:
    body = {"prompt": PROMPT, "max_new_tokens": 8, "seed": 3, "temperature": 1}
    assert (
        served.client.generate(**body, top_k=top_k).json()["text"]
        == served.client.generate(**body, top_k=0).json()["text"]
    )


def test_outputs_are_prompt_major_and_each_is_that_of_its_prompt_alone(served: Served) -> None:
    body = {"max_new_tokens": 6, "temperature": 1.3, "seed": 11, "n": 3}
    together = served.client.generate(prompt=[PROMPT, "The river"], **body).json()["outputs"]
    alone = [served.client.generate(prompt=p, **body).json()["outputs"] for p in (PROMPT, "The river")]
    assert [output["index"] for output in together] == list(range(6))
    assert [o["tokens"] for o in together] == [o["tokens"] for outputs in alone for o in outputs]
    assert len({tuple(o["tokens"]) for o in together[:3]}) > 1, "choices of one seed differ"


def test_token_ids_and_their_text_give_the_same_answer(served: Served) -> None:
    tokens = model_of(served).tokenizer.encode_prompt(PROMPT)
    body = {"max_new_tokens": 8, "seed": 1}
    by_tokens = served.client.generate(prompt=tokens, **body).json()
    assert by_tokens["text"] == served.client.generate(prompt=PROMPT, **body).json()["text"]
    assert by_tokens["usage"]["prompt_tokens"] == len(tokens)


def test_prompts_go_through_the_text_normaliser(served: Served) -> None:
    corpus_form = "`` do n't go , '' said tom ."
    typed_form = '"don\'t go," said tom.'
    body = {"max_new_tokens": 8, "seed": 1, "echo": True}
    assert (
        served.client.generate(prompt=corpus_form, **body).json()["text"]
        == served.client.generate(prompt=typed_form, **body).json()["text"]
    )


@pytest.mark.parametrize("prompt", [" ", "a", "naïve 😀 e\u0301 漢字", "\ud800 lone", "\x00", "</s>", "a\r\nb"])
def test_unusual_prompts_are_answered(served: Served, prompt: str) -> None:
    response = served.client.generate(prompt=prompt, max_new_tokens=2)
    assert response.status_code == 200, response.text


def test_echo_puts_the_prompt_first(served: Served) -> None:
    body = {"prompt": "naïve 😀 漢字", "max_new_tokens": 5, "seed": 4}
    plain = served.client.generate(**body).json()
    echoed = served.client.generate(**body, echo=True).json()
    assert echoed["text"] == "naïve 😀 漢字" + plain["text"]
    assert echoed["outputs"][0]["tokens"] == plain["outputs"][0]["tokens"]


def test_logprobs_are_those_of_the_raw_logits(served: Served) -> None:
    model = model_of(served)
    prompt = model.tokenizer.encode_prompt(PROMPT)
    greedy = SamplingParams(temperature=0)
    expected = list(generate(model.model, prompt, greedy, max_new_tokens=4, seed=0, eos_id=None, n_top_logprobs=3))
    body = {"prompt": PROMPT, "max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
    entries = served.client.generate(**body, logprobs=3).json()["outputs"][0]["logprobs"]
    assert [entry["token"] for entry in entries] == [e.token for e in expected]
    # 1e-4: the engine's fp32 products have other shapes and sum in another order.
    assert [entry["logprob"] for entry in entries] == pytest.approx([e.logprob for e in expected], abs=1e-4)
    for entry, wanted in zip(entries, expected, strict=True):
        assert [top["token"] for top in entry["top"]] == [token for token, _ in wanted.top_logprobs]
        values = [top["logprob"] for top in entry["top"]]
        assert values == pytest.approx([value for _, value in wanted.top_logprobs], abs=1e-4)
    own_only = served.client.generate(**body, logprobs=0).json()["outputs"][0]["logprobs"]
    assert [entry["top"] for entry in own_only] == [[]] * 4
    assert served.client.generate(**body).json()["outputs"][0]["logprobs"] is None


def test_text_ends_before_a_stop_string_and_says_which(served: Served) -> None:
    body = {"prompt": PROMPT, "max_new_tokens": 30, "temperature": 1.5, "seed": 21, "ignore_eos": True}
    text = served.client.generate(**body).json()["text"]
    stop = text[5:8]
    at = text.index(stop)
    output = served.client.generate(**body, stop=stop).json()["outputs"][0]
    assert output["text"] == text[:at]
    assert (output["finish_reason"], output["stop_reason"]) == ("stop", stop)
    assert len(output["tokens"]) < 30
    kept = served.client.generate(**body, stop=[stop, "never there"], include_stop=True).json()["text"]
    assert kept == text[: at + len(stop)]


def test_the_prompt_is_not_searched_for_stop_strings(served: Served) -> None:
    body = {"prompt": PROMPT, "max_new_tokens": 5, "seed": 3, "ignore_eos": True}
    output = served.client.generate(**body, stop=PROMPT, echo=True).json()["outputs"][0]
    assert (output["finish_reason"], output["stop_reason"]) == ("length", None)


def test_end_of_text_stops_unless_ignored(served: Served) -> None:
    """A frequency penalty of -2 and 60 tries make the end of text come up with this model."""
    eos_id = model_of(served).tokenizer.eos_id
    for seed in range(60):
        body = {"prompt": PROMPT, "temperature": 2, "top_k": 0, "top_p": 1, "seed": seed}
        output = served.client.generate(**body).json()["outputs"][0]
        if output["finish_reason"] == "stop":
            break
    assert output["tokens"][-1] == eos_id
    assert output["stop_reason"] is None
    ignored = served.client.generate(**body, ignore_eos=True).json()["outputs"][0]
    assert ignored["finish_reason"] == "length"
    assert ignored["tokens"][: len(output["tokens"])] == output["tokens"]


CONTEXT = [
    (MAX_SEQ_LEN - 1, {}, 200),
    (MAX_SEQ_LEN - 1, {"max_new_tokens": 1}, 200),
    (MAX_SEQ_LEN - 1, {"max_new_tokens": 2}, 400),
    (MAX_SEQ_LEN, {"max_new_tokens": 1}, 200),
    (MAX_SEQ_LEN, {}, 200),
    (MAX_SEQ_LEN, {"max_new_tokens": 2}, 400),
    (MAX_SEQ_LEN + 1, {"max_new_tokens": 1}, 400),
    (MAX_SEQ_LEN + 1, {}, 400),
    (1, {"max_new_tokens": MAX_SEQ_LEN - 1}, 200),
    (1, {"max_new_tokens": MAX_SEQ_LEN}, 400),
    (512, {}, 400),
    (513, {}, 400),
    (6400, {}, 400),
]


@pytest.mark.parametrize(("length", "fields", "status"), CONTEXT)
def test_prompt_and_answer_fit_or_are_refused_with_both_numbers(
    served: Served, length: int, fields: dict[str, Any], status: int
) -> None:
    response = served.client.generate(prompt=[5] * length, ignore_eos=True, **fields)
    assert response.status_code == status, response.text
    if status == 200:
        answer = response.json()
        assert answer["outputs"][0]["finish_reason"] == "length"
        assert answer["usage"]["prompt_tokens"] == length
        assert answer["usage"]["completion_tokens"] == fields.get("max_new_tokens", 1)
    else:
        error = expect_error(response, 400, "context_length_exceeded")
        assert str(length) in error["message"]
        assert str(512 if length > 512 else MAX_SEQ_LEN) in error["message"]


def test_the_token_after_a_full_context_is_the_most_probable_one(served: Served) -> None:
    model = model_of(served)
    prompt = [7 + position % 40 for position in range(MAX_SEQ_LEN)]
    with torch.inference_mode():
        expected = int(model.model(torch.tensor([prompt]))[0, -1].argmax())
    answer = served.client.generate(prompt=prompt, max_new_tokens=1, temperature=0).json()
    assert answer["outputs"][0]["tokens"] == [expected]


def test_truncate_left_keeps_the_end_of_the_prompt(served: Served) -> None:
    prompt = [5 + position % 50 for position in range(100)]
    body = {"max_new_tokens": 10, "seed": 1, "ignore_eos": True}
    cut = served.client.generate(prompt=prompt, truncate="left", **body).json()
    assert cut["usage"]["prompt_tokens"] == MAX_SEQ_LEN - 10
    assert cut["usage"]["prompt_truncated"] == 100 - (MAX_SEQ_LEN - 10)
    assert cut["text"] == served.client.generate(prompt=prompt[-(MAX_SEQ_LEN - 10) :], **body).json()["text"]


@pytest.mark.parametrize("max_new_tokens", [MAX_SEQ_LEN + 1, 10_000, 10**9])
def test_max_new_tokens_beyond_the_context_is_refused(served: Served, max_new_tokens: int) -> None:
    response = served.client.generate(prompt="a", max_new_tokens=max_new_tokens)
    assert expect_error(response, 400, "invalid_value")["param"] == "max_new_tokens"


@pytest.mark.parametrize("token", [-1, 320, 10**6, 2**63, 10**300])
def test_token_ids_beyond_the_vocabulary_are_refused(served: Served, token: int) -> None:
    expect_error(served.client.generate(prompt=[1, token]), 400, "invalid_value")


def test_a_prompt_that_the_normaliser_empties_is_refused(served: Served) -> None:
    expect_error(served.client.generate(prompt="\ufeff"), 400, "empty_prompt")


RAW = [
    ('{"prompt":"Once","temperature":NaN}', 400),
    ('{"prompt":"Once","temperature":Infinity}', 400),
    ('{"prompt":"Once","top_p":-Infinity}', 400),
    ('{"prompt":"Once","temperature":1e999}', 400),
    ('{"prompt":"Once","temperature":-3}', 400),
    ('{"prompt":"Once","top_p":1.5}', 400),
    ('{"prompt":"Once","top_k":9999999,"temperature":1,"max_new_tokens":4}', 200),
    ('{"prompt":"Once","top_k":-5}', 400),
    ('{"prompt":"Once","max_new_tokens":0}', 400),
    ('{"prompt":"Once","max_new_tokens":1000000000}', 400),
    ('{"prompt":"Once","max_new_tokens":3.5}', 400),
    ('{"prompt":"Once","top_k":true}', 400),
    ('{"prompt":"Once","max_new_token":4}', 400),
    ("{}", 400),
    ('{"prompt":null}', 400),
    ('{"prompt":["a"]}', 200),
    ('{"prompt":""}', 400),
    ('{"prompt":"Once"', 400),
    ("[1,2,3]", 400),
    ('{"prompt":"a","temperature":' + "9" * 5000 + "}", 400),
    ('{"prompt":"a","n":1000000000}', 400),
    ('{"prompt":"a","logprobs":1000000}', 400),
    ('{"prompt":' + "[" * 100_000, 400),
]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("raw", "status"), RAW, ids=lambda value: str(value)[:40])
def test_raw_bodies_answer_in_the_one_shape(served: Served, raw: str, status: int, streamed: bool) -> None:
    if streamed and raw.endswith("}") and raw != "{}":
        raw = raw[:-1] + ',"stream":true}'
    response = served.client.generate(raw)
    assert response.status_code == status, response.text
    if status == 400:
        expect_error(response, 400, response.json()["error"]["code"])
        assert len(response.text) < 600


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=2),
    max_leaves=5,
)
requests = st.fixed_dictionaries(
    {"prompt": st.text(min_size=1, max_size=20) | st.lists(st.integers(0, 400), min_size=1, max_size=5)},
    optional={
        "max_new_tokens": st.integers(1, 4),
        "temperature": st.floats(0, 2),
        "top_k": st.integers(-1, 400),
        "top_p": st.floats(0, 1),
        "min_p": st.floats(0, 1),
        "repetition_penalty": st.floats(0, 10, exclude_min=True),
        "frequency_penalty": st.floats(-2, 2),
        "presence_penalty": st.floats(-2, 2),
        "stop": st.lists(st.text(max_size=3), max_size=3),
        "seed": st.integers(0, 2**63 - 1),
        "n": st.integers(1, 2),
        "logprobs": st.integers(0, 20),
        "echo": st.booleans(),
        "stream": st.booleans(),
        "include_stop": st.booleans(),
        "truncate": st.sampled_from(["error", "left"]),
    },
)
wild = st.dictionaries(st.sampled_from(KNOWN), json_values, max_size=2)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests, wild)
def test_no_request_answers_500(served: Served, body: dict[str, Any], changes: dict[str, Any]) -> None:
    response = served.client.generate(json.dumps({"max_new_tokens": 2, **body, **changes}))
    assert response.status_code in (200, 400), response.text
    assert '"engine_error"' not in response.text


def test_unknown_routes_and_methods_answer_in_the_one_shape(served: Served) -> None:
    expect_error(served.client.request("GET", "/nothing"), 404, "not_found")
    expect_error(served.client.request("POST", "/generate/"), 404, "not_found")
    refused = served.client.request("GET", "/generate")
    expect_error(refused, 405, "method_not_allowed")
    assert refused.headers["allow"] == "POST"
    expect_error(served.client.request("DELETE", "/health"), 405, "method_not_allowed")


def test_a_body_over_one_mebibyte_is_refused_by_its_header(served: Served) -> None:
    headers = {"content-length": str(2**40)}
    response = served.client.request("POST", "/generate", content=b"{}", headers=headers)
    expect_error(response, 413, "request_too_large")


def test_a_body_over_one_mebibyte_is_refused_while_it_is_read(served: Served) -> None:
    sent = 0

    async def chunks() -> Any:
        nonlocal sent
        while sent < 100 << 20:
            sent += 1 << 16
            yield b" " * (1 << 16)

    expect_error(served.client.request("POST", "/generate", content=chunks()), 413, "request_too_large")
    assert sent <= (1 << 20) + (1 << 16), "reading goes on after the limit"


def test_health_names_the_checkpoint(served: Served) -> None:
    health = served.client.request("GET", "/health").json()
    assert health["status"] == "ok"
    assert health["model"] == "tiny"
    assert health["checkpoint"]["step"] == 1200
    assert (health["running"], health["waiting"], health["update_error"]) == (0, 0, None)


def test_openapi_describes_the_fields_and_the_errors(served: Served) -> None:
    schema = served.client.request("GET", "/openapi.json").json()
    post = schema["paths"]["/generate"]["post"]
    body = post["requestBody"]["content"]["application/json"]["schema"]
    assert set(body["properties"]) == set(KNOWN)
    assert {"200", "400", "401", "408", "413", "429", "500", "503"} == set(post["responses"])
    assert set(post["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert served.client.request("GET", "/docs").status_code == 200


def test_every_reference_of_the_openapi_document_resolves(served: Served) -> None:
    schema = served.client.request("GET", "/openapi.json").json()
    references = set(re.findall(r'"\$ref": "#/([^"]+)"', json.dumps(schema)))
    assert references
    for reference in references:
        found = schema
        for name in reference.split("/"):
            found = found[name]


def test_the_same_request_gives_the_same_text_alone_and_among_others(served: Served) -> None:
    bodies: list[dict[str, Any]] = [
        {"prompt": PROMPT[: 2 + i], "max_new_tokens": count, "seed": i, "temperature": i % 3}
        for i, count in enumerate((3, 7, 12, 20, 5, 1, 30, 9))
    ]
    bodies.append({"prompt": PROMPT, "max_new_tokens": 20, "temperature": 2})
    alone = [served.client.generate(**body).json()["outputs"] for body in bodies[:-1]]
    for _ in range(3):
        together = served.client.generate_together(bodies)
        assert [response.json()["outputs"] for response in together[:-1]] == alone


def test_bad_bodies_beside_normal_requests_change_nothing(served: Served) -> None:
    normal = [{"prompt": PROMPT, "max_new_tokens": 40, "seed": i, "ignore_eos": True} for i in range(4)]
    alone = [served.client.generate(**body).json()["outputs"] for body in normal]

    async def send_all() -> list[Any]:
        running = [asyncio.create_task(served.client.post(body)) for body in normal]
        for raw, status in RAW:
            assert (await served.client.post(raw)).status_code == status
        return await asyncio.gather(*running)

    together = served.client.run(send_all())
    assert [response.json()["outputs"] for response in together] == alone


def test_many_requests_one_after_another_leave_no_task_and_no_thread(served: Served) -> None:
    async def send(count: int) -> tuple[int, int]:
        for _ in range(count):
            assert (await served.client.post({"prompt": "a", "max_new_tokens": 1})).status_code == 200
        return len(asyncio.all_tasks()), threading.active_count()

    # Enough for every thread that the event loop keeps for tokenizing to have been started.
    before = served.client.run(send(50))
    assert served.client.run(send(200)) == before


def test_a_timeout_before_the_first_token_is_a_408(served: Served) -> None:
    response = served.client.generate(prompt=PROMPT, timeout_s=1e-9)
    expect_error(response, 408, "timeout")


def test_concurrent_requests_leave_nothing_behind(served: Served) -> None:
    async def until_idle() -> None:
        while served.service.health().running:
            await asyncio.sleep(0.001)

    served.client.generate_together([{"prompt": PROMPT, "timeout_s": 1e-9}] * 20)
    served.client.run(asyncio.wait_for(until_idle(), timeout=10))
    assert served.service.health().waiting == 0
