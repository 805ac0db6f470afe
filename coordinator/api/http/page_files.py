"""The web page: a few files of the package, sent to anybody. They hold no secret; the APIs that it calls need a key.

Nothing on it comes from elsewhere and nothing can be put into it: its policy forbids other hosts and inline code.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import Response

FOLDER = Path(__file__).parent / "page"
PREFIX = "/page/"

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    # Another version of the server has other files.
    "Cache-Control": "no-cache",
}
_METHODS = ["GET", "HEAD"]


def routes(*, key_needed: bool) -> APIRouter:
    """Return the routes of the page and its files. key_needed: whether the page has to ask for an API key."""
    router = APIRouter(include_in_schema=False)
    # Only files that are there now can be asked for, by their names alone.
    files = {path.name: (path.read_bytes(), _TYPES[path.suffix]) for path in FOLDER.iterdir() if path.suffix in _TYPES}

    if key_needed:
        page_text, kind = files["index.html"]
        files["index.html"] = (
            page_text.replace(b'name="api-key" content="none"', b'name="api-key" content="needed"'),
            kind,
        )

    def reply(name: str) -> Response:
        if name not in files:
            raise HTTPException(404, "Not Found")
        content, kind = files[name]
        return Response(content, media_type=kind, headers=_HEADERS)

    @router.api_route("/", methods=_METHODS)
    async def page() -> Response:
        """The page itself."""
        return reply("index.html")

    @router.api_route(PREFIX + "{name}", methods=_METHODS)
    async def part(name: str) -> Response:
        """A file that belongs to the page."""
        return reply(name)

    return router
