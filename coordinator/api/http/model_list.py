"""/v1/models: the names of the served model, in OpenAI's form or, for clients of Anthropic's API, in that one."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request

from coordinator.api.engine_requests import check_model
from coordinator.api.http.documented import BODY_ERRORS
from coordinator.api.http.errors import speaks_anthropic
from coordinator.api.http.json_bodies import JsonRoute
from coordinator.engine.engine import Engine
from services.errors import InvalidArgument


def routes(engine: Engine) -> APIRouter:
    """Return the routes that name the model."""
    router = APIRouter(route_class=JsonRoute, tags=["OpenAI", "Anthropic"])

    @router.get("/v1/models", responses=BODY_ERRORS)
    async def models(
        http: Request,
        limit: Annotated[int, Query(ge=1, le=1000)] = 20,
        after_id: str | None = None,
        before_id: str | None = None,
    ) -> dict[str, Any]:
        """All names. With the header `anthropic-version` in pages of `limit`, behind or before a name."""
        names = (engine.name, *engine.aliases)
        if not speaks_anthropic(http):
            return {"object": "list", "data": [_openai(engine, name) for name in names]}
        first = 0 if after_id is None else _index(names, after_id, "after_id") + 1
        end = len(names) if before_id is None else _index(names, before_id, "before_id")
        page = names[first:end][-limit:] if before_id is not None else names[first:end][:limit]
        return {
            "data": [_anthropic(engine, name) for name in page],
            "has_more": len(page) < end - first,
            "first_id": page[0] if page else None,
            "last_id": page[-1] if page else None,
        }

    @router.get("/v1/models/{name:path}", responses=BODY_ERRORS)
    async def model(http: Request, name: str) -> dict[str, Any]:
        """One name."""
        check_model(engine, name)
        return _anthropic(engine, name) if speaks_anthropic(http) else _openai(engine, name)

    return router


def _index(names: tuple[str, ...], name: str, field: str) -> int:
    if name not in names:
        raise InvalidArgument(f"{field} {name!r} is none of {', '.join(names)}", field=field)
    return names.index(name)


def _openai(engine: Engine, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": engine.created,
        "owned_by": "flashsplit",
        "root": engine.name,
        "max_model_len": engine.max_model_len,
        "default_sampling": engine.files.defaults.numbers(),
    }


def _anthropic(engine: Engine, name: str) -> dict[str, Any]:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(engine.created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": engine.max_model_len,
        "max_tokens": engine.max_model_len,
    }
