"""POST /v1/completions: OpenAI's shapes, and logprobs against a direct forward of the model."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from serving.http.completion_answers import Completion
from serving.http.completion_schema import COMPLETION_FIELDS, completion_schema
from tests.serving_checkpoint import MAX_SEQ_LEN, Served, close, save_run, serve_run

PROMPT = "Once upon a time"
LOOSE = {"temperature": 1.5, "seed": 21, "ignore_eos": True}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    service = serve_run(save_run(tmp_path_factory.mktemp("runs") / "tiny"))
    yield service
    close(service)


def complete(served: Served, **fields: Any) -> Any:
    response = served.client.request("POST", "/v1/completions", json={"prompt": PROMPT, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def refuse(served: Served, status: int, code: str, **fields: Any) -> dict[str, Any]:
    response = served.client.request("POST", "/v1/completions", content=json.dumps({"prompt": PROMPT, **fields}))
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["code"] == code
    return error


def stream(served: Served, **fields: Any) -> list[Any]:
    body = {"prompt": PROMPT, **fields, "stream": True}
    response = served.client.request("POST", "/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def model_of(served: Served) -> Any:
    return served.service.engine().served


def test_an_answer_has_openais_shape_and_the_text_of_generate(served: Served) -> None:
    answer = complete(served, model="tiny", max_tokens=12, temperature=1.5, seed=21)
    same = {"max_new_tokens": 12, "temperature": 1.5, "seed": 21, "top_k": 0, "top_p": 1}
    expected = served.client.generate(prompt=PROMPT, **same).json()
    [choice] = answer["choices"]
    assert choice["text"] == expected["text"]
    assert choice["finish_reason"] == expected["outputs"][0]["finish_reason"]
    assert (choice["index"], choice["logprobs"]) == (0, None)
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    assert answer["id"].startswith("cmpl-")
    assert answer["system_fingerprint"] == model_of(served).sha256
    del expected["usage"]["prompt_truncated"]
    assert answer["usage"] == expected["usage"]


def test_absent_fields_have_openais_defaults(served: Served) -> None:
    explicit = {"max_tokens": 16, "temperature": 1, "top_p": 1, "top_k": 0, "n": 1, "best_of": 1, "echo": False}
    answers = [complete(served, seed=2, ignore_eos=True, **fields) for fields in ({}, explicit)]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"]["completion_tokens"] == 16


def test_nulls_and_unknown_fields_change_nothing(served: Served) -> None:
    nulls: dict[str, Any] = dict.fromkeys([*COMPLETION_FIELDS, "model", "stop", "suffix", "user", "stream_options"])
    del nulls["seed"]
    more = {"user": "u", "suffix": "end", "logit_bias": None, "service_tier": "auto", "nonsense": {"a": [1]}}
    assert complete(served, seed=3)["choices"] == complete(served, seed=3, **{**nulls, **more})["choices"]
    assert refuse(served, 400, "invalid_value", prompt=None)["param"] == "prompt"


def test_without_max_tokens_a_long_prompt_takes_the_room_left(served: Served) -> None:
    prompt = [5] * (MAX_SEQ_LEN - 3)
    assert complete(served, prompt=prompt, ignore_eos=True)["usage"]["completion_tokens"] == 3
    error = refuse(served, 400, "context_length_exceeded", prompt=prompt, max_tokens=4)
    assert str(MAX_SEQ_LEN) in error["message"]
    assert str(MAX_SEQ_LEN - 3) in error["message"]
    assert "truncate" not in error["message"], "a field of another route"


def test_lists_of_tokens_are_prompts_as_their_texts_are(served: Served) -> None:
    texts = [PROMPT, "The river"]
    tokens = [model_of(served).tokenizer.encode_prompt(text) for text in texts]
    by_text = complete(served, prompt=texts, n=2, max_tokens=6, **LOOSE)["choices"]
    assert complete(served, prompt=tokens, n=2, max_tokens=6, **LOOSE)["choices"] == by_text
    assert [choice["index"] for choice in by_text] == [0, 1, 2, 3]
    alone = complete(served, prompt=tokens[1], n=2, max_tokens=6, **LOOSE)["choices"]
    assert [choice["text"] for choice in alone] == [choice["text"] for choice in by_text[2:]]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "empty_prompt"),
    ({"prompt": []}, "empty_prompt"),
    ({"prompt": [""]}, "empty_prompt"),
    ({"prompt": [[]]}, "empty_prompt"),
    ({"prompt": [[5], []]}, "empty_prompt"),
    ({"prompt": [[5], "a"]}, "invalid_value"),
    ({"prompt": [[5], ["a"]]}, "invalid_value"),
    ({"prompt": [[5], [True]]}, "invalid_value"),
    ({"prompt": [[5]] * 65}, "invalid_value"),
    ({"prompt": [[5]] * 40, "n": 2}, "invalid_value"),
    ({"prompt": [[10**6]]}, "invalid_value"),
    ({"prompt": {"a": 1}}, "invalid_value"),
    ({"prompt": 5}, "invalid_value"),
    ({"max_tokens": 0}, "invalid_value"),
    ({"max_tokens": -1}, "invalid_value"),
    ({"max_tokens": 10**9}, "invalid_value"),
    ({"max_tokens": 2.0}, "invalid_value"),
    ({"temperature": 2.1}, "invalid_value"),
    ({"temperature": "1"}, "invalid_value"),
    ({"top_p": 0}, "invalid_value"),
    ({"top_k": 0.5}, "invalid_value"),
    ({"n": 17}, "invalid_value"),
    ({"n": True}, "invalid_value"),
    ({"best_of": 2}, "invalid_value"),
    ({"logprobs": 21}, "invalid_value"),
    ({"logprobs": True}, "invalid_value"),
    ({"echo": 1}, "invalid_value"),
    ({"seed": -1}, "invalid_value"),
    ({"stop": [""]}, "invalid_value"),
    ({"stop": ["x"] * 17}, "invalid_value"),
    ({"model": 5}, "invalid_value"),
    ({"stream_options": []}, "invalid_value"),
    ({"stream_options": {"include_usage": 1}}, "invalid_value"),
]


@pytest.mark.parametrize(("fields", "code"), BAD, ids=lambda value: str(value)[:40])
def test_a_wrong_value_of_a_known_field_is_a_400(served: Served, fields: dict[str, Any], code: str) -> None:
    error = refuse(served, 400, code, **fields)
    name = next(iter(fields))
    assert name in str(error["param"]) or name in error["message"]


def test_another_model_is_a_404(served: Served) -> None:
    error = refuse(served, 404, "model_not_found", model="gpt-4")
    assert error["param"] == "model"
    assert "tiny" in error["message"]
    refuse(served, 404, "model_not_found", model="Tiny")
    refuse(served, 404, "model_not_found", model="")


def direct_logprobs(served: Served, tokens: list[int]) -> torch.Tensor:
    """Log-softmax (T, V) of one forward over all tokens."""
    with torch.inference_mode():
        logits: torch.Tensor = model_of(served).model(torch.tensor([tokens]))[0]
    return logits.float().log_softmax(-1)


def tokens_of(served: Served, labels: list[str]) -> list[int]:
    tokenizer = model_of(served).tokenizer
    by_label = {tokenizer.label(token): token for token in range(tokenizer.vocab_size)}
    assert len(by_label) == tokenizer.vocab_size, "two tokens share a label"
    return [by_label[label] for label in labels]


@pytest.mark.parametrize("max_tokens", [0, 1, 7])
def test_echo_with_logprobs_scores_prompt_and_answer_like_a_direct_forward(served: Served, max_tokens: int) -> None:
    prompt = model_of(served).tokenizer.encode_prompt("naïve 😀 Once upon")
    answer = complete(served, prompt=prompt, echo=True, logprobs=3, max_tokens=max_tokens, temperature=0)
    logprobs = answer["choices"][0]["logprobs"]
    tokens = tokens_of(served, logprobs["tokens"])
    assert tokens[: len(prompt)] == prompt
    assert len(tokens) == len(prompt) + answer["usage"]["completion_tokens"]
    assert {len(logprobs[name]) for name in logprobs} == {len(tokens)}
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    expected = direct_logprobs(served, tokens)
    for position in range(1, len(tokens)):
        row = expected[position - 1]
        # Cached and uncached attention sum in another order.
        assert logprobs["token_logprobs"][position] == pytest.approx(float(row[tokens[position]]), abs=1e-4)
        top = logprobs["top_logprobs"][position]
        assert max(top.values()) == pytest.approx(float(row.max()), abs=1e-4)
        assert logprobs["tokens"][position] in top
        assert 3 <= len(top) <= 4
    assert answer["choices"][0]["finish_reason"] == ("stop" if tokens[-1] == 2 else "length")


def test_a_generated_end_of_text_is_in_the_arrays(served: Served) -> None:
    """The slice [context:-1] that lm-eval takes of prompt + one token is then the continuation in every case."""
    eos_id = model_of(served).tokenizer.eos_id
    for seed in range(60):
        answer = complete(served, echo=True, logprobs=1, max_tokens=40, temperature=2, seed=seed)
        if answer["choices"][0]["finish_reason"] == "stop":
            break
    logprobs = answer["choices"][0]["logprobs"]
    assert tokens_of(served, logprobs["tokens"])[-1] == eos_id
    assert len(logprobs["tokens"]) == answer["usage"]["total_tokens"]


def test_text_offsets_point_at_the_text_of_each_token(served: Served) -> None:
    for echo in (False, True):
        answer = complete(served, prompt="naïve 😀", echo=echo, logprobs=0, max_tokens=10, **LOOSE)["choices"][0]
        logprobs, text = answer["logprobs"], answer["text"]
        assert logprobs["text_offset"][0] == 0
        assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
        for label, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            if not label.startswith("<"):
                assert text[offset:].startswith(label)


def test_without_echo_logprobs_are_of_the_answer_only(served: Served) -> None:
    fields = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
    alone = complete(served, logprobs=2, **fields)["choices"][0]["logprobs"]
    echoed = complete(served, logprobs=2, echo=True, **fields)["choices"][0]["logprobs"]
    assert len(alone["tokens"]) == 5
    assert alone["tokens"] == echoed["tokens"][-5:]
    assert alone["token_logprobs"] == echoed["token_logprobs"][-5:]
    assert complete(served, echo=True, **fields)["choices"][0]["logprobs"] is None


def test_echo_of_zero_tokens_returns_the_prompt(served: Served) -> None:
    answer = complete(served, prompt=[PROMPT, "The"], echo=True, max_tokens=0)
    assert [choice["text"] for choice in answer["choices"]] == [PROMPT, "The"]
    assert answer["usage"]["completion_tokens"] == 0
    full = [5] * MAX_SEQ_LEN
    assert complete(served, prompt=full, echo=True, max_tokens=0, logprobs=1)["usage"]["prompt_tokens"] == MAX_SEQ_LEN
    refuse(served, 400, "context_length_exceeded", prompt=[*full, 5], echo=True, max_tokens=0)


def test_a_prompt_of_one_token_has_one_null(served: Served) -> None:
    logprobs = complete(served, prompt=[5], echo=True, max_tokens=0, logprobs=1)["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [None]


STREAMED: list[dict[str, Any]] = [
    {"max_tokens": 1},
    {"max_tokens": 12},
    {"max_tokens": 12, "logprobs": 2},
    {"max_tokens": 6, "logprobs": 2, "echo": True, "prompt": [PROMPT, "The"], "n": 2},
    {"max_tokens": 0, "logprobs": 1, "echo": True, "prompt": [PROMPT, "The"]},
    {"max_tokens": 30, "stop": ["e", " t"]},
]


@pytest.mark.parametrize("fields", STREAMED, ids=str)
def test_chunks_joined_equal_the_unstreamed_choices(served: Served, fields: dict[str, Any]) -> None:
    whole = complete(served, **LOOSE, **fields)
    chunks = stream(served, **LOOSE, **fields)
    joined: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        Completion.model_validate(chunk)
        [choice] = chunk["choices"]
        assert "usage" not in chunk
        seen = joined.setdefault(choice["index"], {**choice, "text": "", "logprobs": None})
        seen["text"] += choice["text"]
        if choice["logprobs"] is not None:
            before = seen["logprobs"] or dict.fromkeys(choice["logprobs"], [])
            seen["logprobs"] = {name: before[name] + value for name, value in choice["logprobs"].items()}
        seen |= {"finish_reason": choice["finish_reason"], "stop_reason": choice["stop_reason"]}
    assert [joined[index] for index in sorted(joined)] == whole["choices"]
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    per_token = len(whole["choices"]) if fields["max_tokens"] == 0 else whole["usage"]["completion_tokens"]
    assert len(chunks) == per_token, "one chunk per token, none extra"


def test_the_usage_chunk_comes_last_and_has_no_choices(served: Served) -> None:
    usage = complete(served, max_tokens=3, **LOOSE)["usage"]
    *chunks, last = stream(served, max_tokens=3, stream_options={"include_usage": True}, **LOOSE)
    assert (last["choices"], last["usage"]) == ([], usage)
    assert [chunk["usage"] for chunk in chunks] == [None] * 3
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = stream(served, max_tokens=3, stream_options=options, **LOOSE)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3]
    assert last["usage"] == usage


def test_openapi_describes_the_fields_that_are_checked(served: Served) -> None:
    post = served.client.request("GET", "/openapi.json").json()["paths"]["/v1/completions"]["post"]
    body = post["requestBody"]["content"]["application/json"]["schema"]
    assert set(COMPLETION_FIELDS) < set(body["properties"])
    assert body == completion_schema()
    assert "404" in post["responses"]
    assert set(post["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
