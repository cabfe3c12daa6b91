"""The API key: denied by default, compared exactly; and no bind beyond loopback without one."""

from collections.abc import Iterator
from typing import Any

import pytest

from serving.http.auth import check_bind
from serving.http.routes import create_app
from tests.serving_checkpoint import Served, close, save_run, serve_run


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    service = serve_run(save_run(tmp_path_factory.mktemp("runs") / "tiny"), api_key="abc")
    yield service
    close(service)


def request(served: Served, path: str, *authorization: str, method: str = "GET") -> Any:
    headers = [("Authorization", value) for value in authorization]
    return served.client.request(method, path, headers=headers)


DENIED = [
    "Bearer ABC",
    "Bearer abcd",
    "Bearer ab",
    "Bearer ",
    "Bearer",
    "abc",
    "Basic abc",
    "Bearer  abc",
    "bearer",
]


@pytest.mark.parametrize("authorization", DENIED)
@pytest.mark.parametrize(
    "path", ["/docs", "/openapi.json", "/generate", "/unlisted", "/health/", "http://test//health"]
)
def test_another_key_is_denied_on_every_route(served: Served, path: str, authorization: str) -> None:
    response = request(served, path, authorization)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"


def test_every_route_but_two_is_denied(served: Served) -> None:
    routes = [(method, route.path) for route in create_app(served.service).routes for method in route.methods]
    assert ("POST", "/generate") in routes
    assert ("GET", "/docs") in routes
    answers = {(method, path): request(served, path, method=method).status_code for method, path in routes}
    is_open = {route for route, status in answers.items() if status != 401}
    assert is_open == {("GET", "/health"), ("GET", "/")}


def test_nothing_of_the_key_is_logged(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("DEBUG")
    monkeypatch.setattr(served.service, "health", lambda: 1 / 0)  # a fault: its traceback is logged
    for path in ("/openapi.json", "/health"):
        for authorization in ("Bearer abc", "Bearer abcd"):
            request(served, path, authorization)
    assert "ZeroDivisionError" in caplog.text
    assert "abc" not in caplog.text.replace("collections.abc", "")


def test_no_key_is_denied_and_two_are_too(served: Served) -> None:
    assert request(served, "/generate", method="POST").status_code == 401
    assert request(served, "/openapi.json", "Bearer abc", "Bearer abc").status_code == 401


def test_the_key_opens_every_route(served: Served) -> None:
    assert request(served, "/openapi.json", "Bearer abc").status_code == 200
    assert request(served, "/unlisted", "Bearer abc").status_code == 404
    response = served.client.request(
        "POST",
        "/generate",
        json={"prompt": "a", "max_new_tokens": 1},
        headers={"Authorization": "Bearer abc"},
    )
    assert response.status_code == 200


def test_health_and_the_page_need_no_key(served: Served) -> None:
    assert request(served, "/health").status_code == 200
    assert request(served, "/").status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "[::1]", "localhost", None])
def test_loopback_needs_no_key(host: str | None) -> None:
    check_bind(host, None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", ""])
@pytest.mark.parametrize("key", [None, ""])
def test_a_bind_beyond_loopback_wants_a_key(host: str, key: str | None) -> None:
    with pytest.raises(ValueError, match="API_KEY"):
        check_bind(host, key)
    check_bind(host, "secret")
