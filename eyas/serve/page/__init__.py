"""The page at `/`: static files, with headers under which a browser runs no other script and sends
requests to no other server.

The page uses the same API as any client, with the key that its user enters.
"""

from __future__ import annotations

from pathlib import Path

from starlette.responses import Response
from starlette.routing import Route

from eyas.page import STYLESHEET

FOLDER = Path(__file__).parent
FILES = {
    "/": (FOLDER / "index.html", "text/html"),
    "/page/house.css": (STYLESHEET, "text/css"),
    "/page/page.css": (FOLDER / "page.css", "text/css"),
    "/page/icon.svg": (FOLDER / "icon.svg", "image/svg+xml"),
}
FILES |= {f"/page/{file.name}": (file, "text/javascript") for file in sorted(FOLDER.glob("*.js"))}
# With trusted types nothing on the page can turn a text into HTML, whatever a model writes.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def page_routes() -> list[Route]:
    """A route for each file, which is read once. They need no key: they hold nothing of model or
    traffic.
    """
    return [
        Route(path, Response(file.read_bytes(), 200, _HEADERS, media_type), methods=["GET"])
        for path, (file, media_type) in FILES.items()
    ]
