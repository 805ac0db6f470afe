"""/docs: the description of the APIs as a page, Swagger UI, which needs no other host.

Its script comes with the package fastapi-offline. Nothing is loaded from elsewhere, nor could be; as it writes styles
into the page, its policy is looser than that of the server's own page.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import Response

PACKAGE = "fastapi_offline"
_OWN = Path(__file__).parent
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Another version of the server has other files.
    "Cache-Control": "no-cache",
}


def routes() -> APIRouter:
    """Return the routes of the page and of what it loads."""
    router = APIRouter(include_in_schema=False)
    spec = find_spec(PACKAGE)
    folders = [] if spec is None or spec.origin is None else [_OWN, Path(spec.origin).parent / "static"]
    # Only files that are there now can be asked for, by their names alone.
    files = {path.name: path for folder in folders for path in folder.iterdir() if path.suffix in _TYPES}

    def reply(name: str) -> Response:
        if not files:
            raise HTTPException(404, "This page needs the package fastapi-offline; /openapi.json has what it shows")
        if name not in files:
            raise HTTPException(404, "Not Found")
        return Response(files[name].read_bytes(), media_type=_TYPES[files[name].suffix], headers=_HEADERS)

    @router.get("/docs")
    async def docs() -> Response:
        """The page itself: the APIs, to be read and tried out."""
        return reply("docs.html")

    @router.get("/docs/{name}")
    async def part(name: str) -> Response:
        """A file that belongs to it."""
        return reply(name)

    return router
