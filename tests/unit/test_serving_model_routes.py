"""/v1/models, the tokenizer routes and /metrics."""

from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serving_checkpoint import MAX_SEQ_LEN, Served, close, save_run, serve_run

TEXTS = ["Once upon a time", "naïve 😀 e\u0301 漢字", " two  spaces ", "a\n\nb\t", "</s>", ""]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    service = serve_run(save_run(tmp_path_factory.mktemp("runs") / "tiny"))
    yield service
    close(service)


def get(served: Served, path: str) -> Any:
    response = served.client.request("GET", path)
    assert response.status_code == 200, response.text
    return response.json()


def post(served: Served, path: str, body: Any, status: int = 200) -> Any:
    response = served.client.request("POST", path, json=body)
    assert response.status_code == status, response.text
    return response.json()


def test_the_one_model_is_listed_and_found_by_its_id(served: Served) -> None:
    models = get(served, "/v1/models")
    [card] = models["data"]
    assert (models["object"], card["object"], card["id"]) == ("list", "model", "tiny")
    assert card["max_model_len"] == MAX_SEQ_LEN
    assert get(served, "/v1/models/tiny") == card
    for other in ("Tiny", "a/b", "tiny/"):
        missing = served.client.request("GET", f"/v1/models/{other}")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("add_special_tokens", [None, False, True])
def test_detokenize_undoes_tokenize(served: Served, text: str, add_special_tokens: bool | None) -> None:
    tokenizer = served.service.engine().served.tokenizer
    answer = post(served, "/tokenize", {"prompt": text, "add_special_tokens": add_special_tokens, "model": "tiny"})
    assert answer["tokens"] == tokenizer.encode_prompt(text)
    assert answer["count"] == len(answer["tokens"])
    assert post(served, "/detokenize", {"tokens": answer["tokens"]}) == {"prompt": tokenizer.normalize(text)}


BAD: list[tuple[str, Any]] = [
    ("/tokenize", {}),
    ("/tokenize", {"prompt": None}),
    ("/tokenize", {"prompt": ["a"]}),
    ("/tokenize", {"prompt": "a" * 65_537}),
    ("/tokenize", {"prompt": "a", "add_special_tokens": 1}),
    ("/tokenize", []),
    ("/detokenize", {}),
    ("/detokenize", {"tokens": 5}),
    ("/detokenize", {"tokens": ["5"]}),
    ("/detokenize", {"tokens": [True]}),
    ("/detokenize", {"tokens": [5, -1]}),
    ("/detokenize", {"tokens": [10**30]}),
]


@pytest.mark.parametrize(("path", "body"), BAD, ids=lambda value: str(value)[:40])
def test_a_wrong_body_is_a_400_in_the_one_shape(served: Served, path: str, body: Any) -> None:
    error = post(served, path, body, status=400)["error"]
    assert set(error) == {"message", "type", "param", "code"}


def test_tokenizer_info_names_the_control_tokens(served: Served) -> None:
    info = get(served, "/tokenizer_info")
    assert (info["eos_token"], info["eos_token_id"], info["bos_token"]) == ("</s>", 2, "<s>")
    assert info["vocab_size"] == served.service.engine().served.tokenizer.vocab_size
    assert (info["add_bos_token"], info["model_max_length"]) == (False, MAX_SEQ_LEN)


def scrape(served: Served) -> dict[tuple[str, str], float]:
    """Samples by name and the one label beside the model's."""
    response = served.client.request("GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            other = [value for name, value in sample.labels.items() if name not in ("model_name", "le")]
            samples[sample.name, "".join(other)] = sample.value
    return samples


def test_metrics_count_what_was_answered(tmp_path: Any) -> None:
    served = serve_run(save_run(tmp_path / "tiny"), num_slots=2)
    body = {"prompt": "Once", "ignore_eos": True, "seed": 1}
    answer = served.client.generate(**body, max_new_tokens=5, n=2).json()
    served.client.generate(**body, max_new_tokens=3, stream=True)
    served.client.generate(prompt="")
    score = {"prompt": "Once upon", "max_tokens": 0, "echo": True, "logprobs": 1}
    scored = post(served, "/v1/completions", score)["usage"]["prompt_tokens"]
    samples = scrape(served)
    close(served)
    once = answer["usage"]["prompt_tokens"]
    assert samples["rayjob:prompt_tokens_total", ""] == once * 2 + scored
    assert samples["rayjob:generation_tokens_total", ""] == 5 * 2 + 3
    assert samples["rayjob:request_success_total", "length"] == 4
    assert samples["rayjob:request_errors_total", "empty_prompt"] == 1
    assert samples["rayjob:time_to_first_token_seconds_count", ""] == 2
    assert samples["rayjob:time_per_output_token_seconds_count", ""] == 3
    assert samples["rayjob:e2e_request_latency_seconds_count", ""] == 2
    assert samples["rayjob:request_queue_time_seconds_count", ""] == 2
    total_s = samples["rayjob:e2e_request_latency_seconds_sum", ""]
    assert total_s >= samples["rayjob:time_to_first_token_seconds_sum", ""] > 0
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    assert [samples[f"rayjob:{name}", ""] for name in gauges] == [0, 0, 0]
