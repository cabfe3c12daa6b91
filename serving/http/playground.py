"""GET /: the playground, one page that brings everything it needs and may talk to nobody but this service."""

import base64
import hashlib
import re
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import HTMLResponse

PAGE = Path(__file__).parent / "page" / "index.html"
_KEY_IS_WANTED = 'data-key="wanted"'


def add_page(app: FastAPI, *, is_key_wanted: bool) -> None:
    """Adds the route to an app; with `is_key_wanted` the page asks for the API key."""
    text = PAGE.read_text(encoding="utf-8")
    html = text if is_key_wanted else text.replace(_KEY_IS_WANTED, "", 1)
    headers = {
        "Content-Security-Policy": content_security_policy(html),
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }

    @app.get("/", response_class=HTMLResponse)
    async def playground() -> HTMLResponse:
        """The playground page."""
        return HTMLResponse(html, headers=headers)


def content_security_policy(html: str) -> str:
    """Returns a policy that allows the page's own script and style, by hash, and requests to its own server."""
    script, style = _hash(html, "script"), _hash(html, "style")
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash(html: str, element: str) -> str:
    """The CSP source of the page's only element of this name."""
    [content] = re.findall(rf"<{element}>(.*?)</{element}>", html, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    return f"'sha256-{digest}'"
