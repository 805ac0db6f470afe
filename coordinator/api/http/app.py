"""The HTTP application: its routes, the check of API keys, errors in each API's form, limits on bodies."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass
from importlib import metadata

import structlog
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.api.api_keys import ApiKeys
from coordinator.api.http import (
    anthropic,
    api_page,
    chat,
    completions,
    model_list,
    operator_routes,
    page_files,
    responses,
    status_routes,
)
from coordinator.api.http.allowed_hosts import EVERY_HOST, AllowedHosts, is_loopback_name
from coordinator.api.http.errors import HttpError, error_reply, invalid_body, logged, speaks_anthropic
from coordinator.api.http.head import HeadAsGet
from coordinator.api.http.kept_answers import KeptAnswers
from coordinator.api.http.metrics import Metrics
from coordinator.api.http.replies import ClientGone
from coordinator.api.http.reply_forms import new_answers
from coordinator.api.http.request_bodies import RequestBodies
from coordinator.engine.engine import Engine
from coordinator.status.board import Board
from services.net.client_server import CLIENT_TIMEOUT_S
from services.telemetry import logs
from services.telemetry.trace_context import Call, calling

OPEN_PATHS = frozenset({"/health", "/"})
"""Paths that need no API key, as the page's own files don't."""

POLLED = frozenset({"/health", "/ready", "/metrics", status_routes.PATH})
"""Paths that probes and watchers ask for all the time; their requests are logged for debugging only."""

log = structlog.get_logger()


def create_app(
    engine: Engine,
    keys: ApiKeys,
    board: Board,
    *,
    vllm_metrics: bool = False,
    access_log: bool = True,
    cors_origins: Sequence[str] = (),
    client_timeout_s: float = CLIENT_TIMEOUT_S,
    hosts: AllowedHosts = EVERY_HOST,
    answers: KeptAnswers | None = None,
) -> FastAPI:
    """Return the HTTP APIs over an engine, and the page that uses them.

    vllm_metrics: whether metrics have vLLM's names too. access_log: whether each request has a line in the log.
    cors_origins: web sites whose pages may use the APIs. client_timeout_s: how long clients may take to send the body
    of a request. hosts: by which names they may call the server. answers: those that clients may ask for again; None
    for ones that are kept in memory.
    """
    answers = answers or new_answers(engine)
    app = FastAPI(
        title="flashsplit",
        version=metadata.version("flashsplit"),
        description="One LLM, served from whatever GPUs its owner has: OpenAI's and Anthropic's APIs.",
        docs_url=None,
        redoc_url=None,
    )
    metrics = Metrics(engine, board, vllm_names=vllm_metrics)
    routers = [
        operator_routes.routes(engine, metrics),
        status_routes.routes(engine, board),
        page_files.routes(key_needed=bool(keys)),
        api_page.routes(),
        model_list.routes(engine),
        *(part.routes(engine, answers) for part in (chat, completions, responses, anthropic)),
    ]
    for router in routers:
        app.include_router(router)
    app.add_exception_handler(Exception, _failed)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    routes = [*app.routes, *(route for router in routers for route in router.routes)]
    paths = frozenset(route.path for route in routes if isinstance(route, Route))
    app.add_middleware(HeadAsGet)
    door = Door(keys, hosts, RequestBodies(engine.max_prompt_tokens, client_timeout_s))
    app.add_middleware(RequestMiddleware, door=door, metrics=metrics, paths=paths, access_log=access_log)
    if cors_origins:
        # Outside of all else: a browser asks beforehand, without a key, and reads refusals too.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "request-id", "retry-after"],
        )
    return app


@dataclass(frozen=True, slots=True)
class Door:
    """Who is let in, and with how much. The state of a request that is let in says whose it is, as `ApiKeys.check`."""

    keys: ApiKeys
    hosts: AllowedHosts
    bodies: RequestBodies

    def check(self, request: Request) -> None:
        """Raises HttpRefusal for a name that the server does not go by, Unauthenticated for a missing or wrong key."""
        self.hosts.check(request.headers.getlist("host"))
        if request.url.path not in OPEN_PATHS and not request.url.path.startswith(page_files.PREFIX):
            headers = request.headers
            request.state.owner = self.keys.check(headers.get("authorization", ""), headers.get("x-api-key", ""))


class RequestMiddleware:
    """What happens around every request: its id, what the door says, errors, one line in the log."""

    def __init__(self, app: ASGIApp, door: Door, metrics: Metrics, paths: Set[str], *, access_log: bool) -> None:
        """paths: those of all routes, by which requests are counted. access_log: whether each has a line in the log."""
        self._app, self._door, self._metrics, self._paths = app, door, metrics, paths
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        request_id = _clean(request.headers.get("x-request-id", "")) or secrets.token_hex(12)
        scope.setdefault("state", {})["request_id"] = request_id
        with calling(request_id, request.headers.getlist("traceparent")) as call:
            await self._answer(request, call, receive, send)

    async def _answer(self, request: Request, call: Call, receive: Receive, send: Send) -> None:
        scope, started, begun, status = request.scope, time.monotonic(), False, 0

        async def answer(message: Message) -> None:
            nonlocal begun, status
            if message["type"] == "http.response.start":
                begun, status = True, message["status"]
                names = (b"x-request-id", *([b"request-id"] if speaks_anthropic(request) else []))
                own = [*((name, call.request_id.encode()) for name in names), *_only_tls(request)]
                message["headers"] = [*message["headers"], *own]
            await send(message)

        try:
            try:
                self._door.check(request)
                async with self._door.bodies.bounded(request, receive) as bounded:
                    await self._app(scope, bounded, answer)
            except ClientGone:
                status = 499
            except Exception as error:
                if begun:
                    raise
                await _respond(request, error)(scope, receive, answer)
        finally:
            self._metrics.count_reply(request.method, self._route_path(scope), status)
            quiet = not self._access_log or request.url.path in POLLED
            (log.debug if quiet else logs.access_log.info)(
                "http.request",
                request_id=call.request_id,
                trace_id=call.trace.trace_id,
                method=request.method,
                path=request.url.path,
                status=status,
                prompt_tokens=call.tokens.prompt,
                completion_tokens=call.tokens.completion,
                ms=round((time.monotonic() - started) * 1e3, 1),
            )

    def _route_path(self, scope: Scope) -> str:
        """Return the path of the route that a request is for, "other" for one that there is none for."""
        # A request that was refused before it came to its route is known by its own path.
        path = str(getattr(scope.get("route"), "path", scope["path"]))
        return path if path in self._paths else "other"


async def _failed(request: Request, error: Exception) -> Response:
    return _respond(request, error)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    known = invalid_body(error)
    return error_reply(request, known)


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    known = HttpError(error.status_code, f"{error.detail}: {request.method} {request.url.path}", kind, kind)
    reply = error_reply(request, known)
    reply.headers.update(error.headers or {})
    return reply


def _respond(request: Request, error: BaseException) -> Response:
    if isinstance(error, ClientGone):
        return Response(status_code=499)
    known = logged(error, "http.failed", request.url.path)
    return error_reply(request, known)


def _only_tls(request: Request) -> list[tuple[bytes, bytes]]:
    """Return the header that tells browsers to come by TLS only, where the client has come so.

    They remember it for a name, whatever the port, so it is not said of names that other servers of a host share.
    """
    if request.scope.get("scheme") != "https" or is_loopback_name(request.headers.getlist("host")):
        return []
    return [(b"strict-transport-security", b"max-age=31536000")]


def _clean(text: str) -> str:
    """Return a client's own id, or "" for one that cannot stand in a header and a log line."""
    return text if len(text) <= 128 and text.isascii() and text.isprintable() else ""
