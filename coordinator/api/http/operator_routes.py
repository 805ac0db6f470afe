"""The routes for operators and clients' tools: health, readiness, metrics, version, tokens."""

from __future__ import annotations

import asyncio
from importlib import metadata
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, PlainTextResponse, Response

from coordinator.api.engine_requests import check_model, max_counted_tokens, plain_prompt, render, text_of
from coordinator.api.http.chat_exchange import Talk, ToolUse
from coordinator.api.http.documented import BODY_ERRORS, METRICS, NOT_READY, QUERY_ERRORS
from coordinator.api.http.json_bodies import JsonRoute
from coordinator.api.http.metrics import CONTENT_TYPE, Metrics
from coordinator.api.http.schemas import DetokenizeRequest, DrainRequest, TokenizeRequest
from coordinator.engine.engine import Engine
from coordinator.engine.handover import Handover
from coordinator.status.report import DRAIN_PATH, Drained
from coordinator.text.tokenizer import read_settings, special_tokens
from services.errors import InvalidArgument
from services.model.text_files import TOKENIZER_CONFIG
from services.text_threads import on_text_thread


def routes(engine: Engine, metrics: Metrics) -> APIRouter:
    """Return the routes for operators and clients' tools."""
    router = APIRouter(route_class=JsonRoute)

    @router.get("/health", tags=["Operations"], responses={**QUERY_ERRORS, **NOT_READY})
    async def health(ready: bool = False) -> JSONResponse:
        """The process is there; with `ready`, the same as /ready, for probes that have no key."""
        well = engine.ready or not ready
        return JSONResponse({"status": "ok" if well else "not ready"}, 200 if well else 503)

    @router.get("/ready", tags=["Operations"], responses={**QUERY_ERRORS, **NOT_READY})
    async def ready() -> JSONResponse:
        """A request would be taken: workers are there, and the server isn't shutting down. `degraded` says why not all
        of them are, where others have taken over their layers; it is null otherwise."""
        load = engine.load
        body = {
            "ready": engine.ready,
            "running": load.running,
            "waiting": load.waiting,
            "draining": load.draining,
            "degraded": engine.cluster.degraded,
        }
        return JSONResponse(body, 200 if engine.ready else 503)

    @router.get(
        "/metrics", tags=["Operations"], response_class=PlainTextResponse, responses={**QUERY_ERRORS, **METRICS}
    )
    async def scrape() -> Response:
        """Prometheus metrics."""
        return Response(await metrics.text(), media_type=CONTENT_TYPE)

    @router.get("/version", tags=["Operations"], responses=QUERY_ERRORS)
    async def version() -> dict[str, str]:
        return {"version": metadata.version("flashsplit")}

    handover = Handover(engine)

    @router.post(DRAIN_PATH, tags=["Operations"], responses=BODY_ERRORS)
    async def drain(body: DrainRequest) -> Drained:
        """Another worker takes the place of one that is to be switched off, with its weights, its kept prefixes and
        the state of the answers that run: these pause, lose nothing and compute nothing twice. Answers when it is
        done; a worker that this server started has ended by then."""
        done = await handover.drain(body.worker, body.to)
        return Drained(
            worker=done.worker,
            to=done.place,
            prefixes=done.prefixes,
            paused_ms=1e3 * done.paused_s,
            computed_anew=done.anew,
        )

    @router.post("/tokenize", tags=["Tokens"], responses=BODY_ERRORS)
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        """A text's or a chat's token ids."""
        check_model(engine, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidArgument("give exactly one of prompt and messages", field="prompt")
        tokens = await _tokens(engine, body)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": engine.max_model_len}

    @router.post("/detokenize", tags=["Tokens"], responses=BODY_ERRORS)
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        """Token ids as text."""
        check_model(engine, body.model)
        return {"prompt": await text_of(engine, body.tokens, "tokens")}

    @router.get("/tokenizer_info", tags=["Tokens"], responses=QUERY_ERRORS)
    async def tokenizer_info() -> dict[str, Any]:
        """The tokenizer's settings, special tokens and chat template, as its checkpoint has them."""
        return await asyncio.to_thread(_tokenizer_settings, engine)

    return router


def _tokenizer_settings(engine: Engine) -> dict[str, Any]:
    files = engine.files
    settings = read_settings(files.path, TOKENIZER_CONFIG) | special_tokens(files.path)
    return settings | ({} if files.chat_template is None else {"chat_template": files.chat_template.source})


async def _tokens(engine: Engine, body: TokenizeRequest) -> list[int]:
    most = max_counted_tokens(engine)
    if body.prompt is not None:
        prompt = await plain_prompt(engine, body.prompt, add_special_tokens=body.add_special_tokens, most=most)
        return list(prompt.token_ids)
    use, opened = ToolUse(body.tools or []), body.add_generation_prompt
    talk = Talk(body.messages or [], use, body.chat_template_kwargs, body.continue_final_message, opened)
    chat, _ = await on_text_thread(len(talk.messages), talk.in_template, engine)
    return list((await render(engine, chat, most=most)).token_ids)
