"""What the HTTP server answers while the model is being loaded: its port is taken by then, and nobody waits in vain."""

from __future__ import annotations

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from coordinator.api.http.errors import to_http
from services.errors import Unavailable


class UntilLoaded:
    """An application that refuses every request (503), also that for its health, until `app` is there to answer.

    app: the application that answers from then on; None while there is none.
    """

    def __init__(self) -> None:
        self.app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            error = to_http(Unavailable("the model is being loaded: try again in a moment", reason="LOADING"))
            await JSONResponse(error.body(scope["path"]), error.status, error.headers)(scope, receive, send)
