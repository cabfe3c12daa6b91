"""The OpenAPI schema is true: requests made from it, right and wrong ones, are answered as it says."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from serving.http.routes import create_app
from tests.serving_checkpoint import close, save_run, serve_run

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    served = serve_run(save_run(tmp_path_factory.mktemp("runs") / "tiny", max_seq_len=32))
    yield schemathesis.openapi.from_asgi("/openapi.json", create_app(served.service))
    close(served)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.value)
def test_answers_are_what_the_schema_says(described: Any, mode: GenerationMode) -> None:
    checked = 0
    for result in described.get_all_operations():
        operation = result.ok()
        if mode is GenerationMode.NEGATIVE and not len(operation.body):
            continue  # nothing can be wrong with a request that has no body

        @settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        @given(operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            case.call_and_validate(checks=CHECKS, timeout=60)

        check()
        checked += 1
    assert checked >= 4


@pytest.mark.parametrize(
    ("path", "wished"),
    [
        ("/generate", {"text": "One day", "max_new_tokens": 8, "logprobs": 2}),
        ("/generate", {"text": "One day", "max_new_tokens": 8, "stop": ["e"]}),
        ("/v1/completions", {"model": "tiny", "prompt": "One day", "max_tokens": 8, "logprobs": 2}),
        ("/v1/completions", {"model": "tiny", "prompt": "One day", "stream_options": {"include_usage": True}}),
    ],
)
def test_events_of_a_stream_are_what_the_schema_says(described: Any, path: str, wished: dict[str, Any]) -> None:
    case = described[path]["POST"].Case(body={**wished, "stream": True}, media_type="application/json")
    response = case.call_and_validate(checks=CHECKS)
    assert response.status_code == 200, response.text
    assert response.text.endswith("data: [DONE]\n\n")
