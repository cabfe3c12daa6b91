"""The playground in a real headless Chromium, against a real HTTP server with a tiny model.

Real: browser, page, HTTP, engine. It skips where no Chromium is installed: `pip install ".[browser]"`, and either
`playwright install chromium` or the system's package. With SCREENSHOTS=FOLDER the pictures are kept.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving_checkpoint import save_run
from tests.serving_server import Server, http_server

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

pytestmark = pytest.mark.e2e
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        executable = shutil.which("chromium") or shutil.which("google-chrome")
        try:
            # As root, which a container often is, Chromium needs to be told to run without its own sandbox.
            started = driver.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no Chromium: {str(error).splitlines()[0]}")
        yield started
        started.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(tmp_path_factory.mktemp("runs") / "novels", max_seq_len=512)


@pytest.fixture(scope="module")
def server(runs: Path) -> Iterator[Server]:
    with http_server(runs) as running:
        yield running


class Visit:
    """A page of the playground, with all that it asked for and complained about."""

    def __init__(self, browser: Any, url: str, size: tuple[int, int], **options: Any) -> None:
        viewport = {"width": size[0], "height": size[1]}
        self.context = browser.new_context(viewport=viewport, **options)
        self.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=url)
        self.page = self.context.new_page()
        self.requested: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requested.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(url)
        playwright.expect(self.page.locator("#state")).to_have_text("ready")

    def generate(self) -> str:
        """Presses the button, waits for the end and returns the generated text."""
        self.page.click("#go")
        playwright.expect(self.page.locator("#facts")).to_contain_text("ended by", timeout=30_000)
        text: str = self.page.eval_on_selector_all(".token", "all => all.map(one => one.textContent).join('')")
        return text

    def set_slider(self, name: str, value: float) -> None:
        """Moves a slider as its user does, by the input event."""
        script = "(slider, value) => { slider.value = value; slider.dispatchEvent(new Event('input')); }"
        self.page.eval_on_selector(f"#{name}", script, value)

    def open_settings(self) -> None:
        if not self.page.locator("#temperature").is_visible():
            self.page.click("summary")

    def keep(self, name: str) -> None:
        if folder := os.environ.get("SCREENSHOTS"):
            self.page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)

    def fits(self) -> bool:
        """Whether nothing is wider than the window."""
        return bool(self.page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_a_visitor_generates_stops_changes_reuses_and_sees_errors(
    browser: Any, server: Server, size: str, scheme: str
) -> None:
    visit = Visit(browser, server.url, SIZES[size], color_scheme=scheme)
    page = visit.page
    visit.keep(f"{size}-{scheme}-1-start")
    page.fill("#prompt", "Once upon a time the small grey parrot said")
    visit.open_settings()
    visit.set_slider("max_new_tokens", 60)
    visit.set_slider("temperature", 1.5)
    first = visit.generate()
    assert first
    seed = re.search(r"seed (\d+)", page.inner_text("#facts"))
    assert seed is not None
    assert re.search(r"first token \d+ ms", page.inner_text("#facts"))
    assert re.search(r"rate [\d.]+ tokens/s", page.inner_text("#facts"))

    page.click("#reuse")
    assert page.input_value("#seed") == seed[1], "all of its digits"
    assert visit.generate() == first
    visit.set_slider("temperature", 0)
    assert visit.generate() != first

    page.locator(".token").nth(3).click()
    assert page.locator("#popup li").count() >= 8
    visit.keep(f"{size}-{scheme}-2-alternatives")
    before = page.eval_on_selector_all(".token", "all => all.slice(0, 3).map(one => one.textContent).join('')")
    chosen = page.locator("#popup li:not(.chosen) button").first
    chosen.click()
    playwright.expect(page.locator("#facts")).to_contain_text("ended by", timeout=30_000)
    after = page.eval_on_selector_all(".token", "all => all.map(one => one.textContent).join('')")
    assert after.startswith(before)

    page.check("#shade")
    visit.keep(f"{size}-{scheme}-3-shaded")
    page.fill("#prompt", "")
    page.click("#go")
    assert "empty" in page.inner_text("#error")
    visit.keep(f"{size}-{scheme}-4-error")
    assert visit.fits()
    assert {url.split("/", 3)[2] for url in visit.requested} == {server.url.removeprefix("http://")}
    assert visit.complaints == []
    visit.context.close()


def test_stop_ends_the_text_and_frees_the_slot(browser: Any, server: Server) -> None:
    visit = Visit(browser, server.url, SIZES["desktop"])
    page = visit.page
    visit.set_slider("max_new_tokens", 450)
    visit.set_slider("repetition_penalty", 1.5)
    page.fill("#seed", "1")  # a text that does not end by itself
    page.click("#go")
    page.wait_for_selector(".token", state="attached")  # its text may be a line break
    page.click("#stop")
    playwright.expect(page.locator("#facts")).to_contain_text("ended by you")
    page.wait_for_function("fetch('health').then(r => r.json()).then(h => h.running === 0)")
    assert visit.complaints == []
    visit.context.close()


def test_the_keyboard_is_enough(browser: Any, server: Server) -> None:
    visit = Visit(browser, server.url, SIZES["desktop"])
    page = visit.page
    visit.set_slider("max_new_tokens", 20)
    page.focus("#prompt")
    page.keyboard.press("Control+Enter")
    playwright.expect(page.locator("#facts")).to_contain_text("ended by", timeout=30_000)
    page.focus(".token[tabindex='0']")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert page.is_visible("#popup")
    assert page.evaluate("document.activeElement.closest('#popup') !== null")
    page.keyboard.press("Escape")
    assert not page.is_visible("#popup")
    visit.context.close()


def test_the_copied_command_repeats_the_text(browser: Any, server: Server) -> None:
    visit = Visit(browser, server.url, SIZES["desktop"])
    page = visit.page
    page.fill("#prompt", "It's the king's \"old\" ship\nand")
    page.fill("#seed", "9223372036854775807")
    page.click("#curl")
    command = page.evaluate("navigator.clipboard.readText()")
    assert command.startswith(f"curl -sN '{server.url}/generate'")
    text = visit.generate()
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True).stdout
    assert json.loads(answer)["text"] == text
    visit.context.close()


def test_with_keys_on_the_page_asks_for_one_and_says_when_it_is_wrong(browser: Any, runs: Path) -> None:
    with http_server(runs, api_key="abc") as server:
        visit = Visit(browser, server.url, SIZES["phone"])
        page = visit.page
        page.click("#go")
        assert "API key" in page.inner_text("#error")
        visit.keep("phone-light-5-key")
        page.fill("#key", "wrong")
        page.click("#go")
        playwright.expect(page.locator("#error")).to_contain_text("valid API key")
        page.fill("#key", "abc")
        assert visit.generate()
        assert not page.is_visible("#error")
        visit.context.close()
