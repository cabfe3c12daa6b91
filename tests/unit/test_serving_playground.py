"""GET /: what the page may do, without a browser."""

import re

import pytest

from serving.http.playground import PAGE, content_security_policy
from serving.http.schemas import SIMPLE_FIELDS
from tests.serving_checkpoint import close, save_run, serve_run

HTML = PAGE.read_text(encoding="utf-8")


def test_the_page_is_served_with_a_policy_that_forbids_other_hosts(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = save_run(tmp_path_factory.mktemp("runs") / "tiny")
    for key, is_asked in ((None, False), ("abc", True)):
        served = serve_run(folder, api_key=key)
        response = served.client.request("GET", "/")
        close(served)
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/html")
        assert ('data-key="wanted"' in response.text.split("\n")[1]) is is_asked
        policy = response.headers["content-security-policy"]
        assert policy == content_security_policy(response.text)
        assert "default-src 'none'" in policy
        assert "connect-src 'self'" in policy
        assert "unsafe" not in policy


def test_the_page_names_no_other_host_and_loads_no_file() -> None:
    hosts = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+", HTML))
    assert hosts == {"http://www.w3.org"}, "only the namespace of the icon"
    assert not re.search(r"\bsrc=|@import|\burl\(", HTML)


def test_no_style_or_handler_stands_in_an_attribute() -> None:
    """The policy allows the two elements by their hash, and nothing in attributes."""
    assert not re.search(r"<[^>]+\s(?:style|on\w+)=", HTML.split("<script>")[0])


def test_the_sliders_are_fields_with_their_defaults_and_within_their_limits() -> None:
    rows = re.findall(r'^  \["(\w+)", "[^"]+", ([-\d.]+), ([-\d.]+), [\d.]+, ([-\d.]+)\],$', HTML, flags=re.MULTILINE)
    assert len(rows) == 8
    for name, low, high, default in rows:
        field = SIMPLE_FIELDS[name]
        assert field.check(name, _number(low)) == float(low)
        assert field.check(name, _number(high)) == float(high)
        if field.default is not None:
            assert field.default == float(default)


def _number(text: str) -> float:
    return float(text) if "." in text else int(text)
