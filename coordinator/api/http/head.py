"""HEAD requests: whatever has an answer to GET has the same one without its body to HEAD, as probes send it."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.api.http.status_routes import EVENTS_PATH


class HeadAsGet:
    """Asks an application by GET where a client asks by HEAD, but for the events, which never end."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD" or scope["path"] == EVENTS_PATH:
            await self._app(scope, receive, send)
            return

        async def head(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, head)
