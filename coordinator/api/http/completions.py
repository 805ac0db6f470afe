"""/v1/completions: OpenAI's API for plain prompts, of text or of token ids."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from coordinator.answer import Answer, Request
from coordinator.api.engine_requests import check_model
from coordinator.api.http.body_conversion import choices_of, compression_params, make_request, plain_prompts
from coordinator.api.http.choices import answer_all
from coordinator.api.http.documented import ANSWER, OPENAI_ERRORS
from coordinator.api.http.json_bodies import JsonRoute
from coordinator.api.http.logprobs import completion_logprobs
from coordinator.api.http.replies import event_stream, unless_gone
from coordinator.api.http.schemas import CompletionRequest
from coordinator.api.http.structured import answer_bound
from coordinator.api.http.usage import timings_of, usage_of
from coordinator.engine.engine import Engine


def routes(engine: Engine) -> APIRouter:
    """Return the routes of this API."""
    router = APIRouter(tags=["OpenAI"], route_class=JsonRoute, responses=OPENAI_ERRORS)

    @router.post("/v1/completions", response_model=None, responses=ANSWER)
    async def completions(body: CompletionRequest, http: HttpRequest) -> Response:
        """The continuation of one or more prompts."""
        check_model(engine, body.model)
        bound = answer_bound(body, body.response_format)
        compression = compression_params(body)
        prompts = await unless_gone(http, plain_prompts(engine, body.prompt, compression, structured=bound is not None))
        requests = [
            choice
            for number, prompt in enumerate(prompts)
            for choice in choices_of(
                make_request(engine, body, prompt, body.max_tokens, logprobs=body.logprobs, bound=bound, chat=False),
                body.n,
                number * body.n,
            )
        ]
        head = {
            "id": f"cmpl-{requests[0].request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model or engine.name,
        }
        echoes = [_text(engine, request.prompt_ids) if body.echo else "" for request in requests]
        if body.stream:
            usage = body.stream_options is not None and body.stream_options.include_usage
            return await event_stream(http, _stream(engine, requests, body.n, head, echoes, usage=usage))
        return JSONResponse(await unless_gone(http, _whole(engine, requests, body.n, head, echoes)))

    return router


def _text(engine: Engine, token_ids: tuple[int, ...]) -> str:
    tokenizer = engine.files.tokenizer
    return "" if tokenizer is None else tokenizer.decode(token_ids)


def _choice(index: int, text: str, finish_reason: str | None, logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


async def _whole(
    engine: Engine, requests: list[Request], count: int, head: dict[str, Any], echoes: list[str]
) -> dict[str, Any]:
    answers: dict[int, Answer] = {}
    async for part in answer_all(engine, requests):
        if isinstance(part.content, Answer):
            answers[part.index] = part.content
    ordered = [answers[index] for index in range(len(requests))]
    choices = [
        _choice(
            index,
            echoes[index] + (answer.text or ""),
            answer.finish_reason,
            completion_logprobs(engine.files.tokenizer, answer.token_ids, answer.logprobs or (), len(echoes[index])),
        )
        for index, answer in enumerate(ordered)
    ]
    return {**head, "choices": choices, "usage": usage_of(answers, count), "timings": timings_of(ordered[0])}


async def _stream(
    engine: Engine, requests: list[Request], count: int, head: dict[str, Any], echoes: list[str], *, usage: bool
) -> AsyncGenerator[dict[str, Any] | str]:
    # The last chunk has the usage; null in the others says that it will come.
    head = {**head, "usage": None} if usage else head
    answers: dict[int, Answer] = {}
    unsent_echoes = dict(enumerate(echoes))
    offsets = [len(echo) for echo in echoes]
    async for part in answer_all(engine, requests):
        if isinstance(part.content, Answer):
            answers[part.index] = part.content
            choice = _choice(part.index, unsent_echoes.pop(part.index, ""), part.content.finish_reason)
            yield {**head, "choices": [choice], "timings": timings_of(part.content)}
            continue
        text = unsent_echoes.pop(part.index, "") + part.content.text
        offset = offsets[part.index]
        logprobs = completion_logprobs(engine.files.tokenizer, part.content.token_ids, part.content.logprobs, offset)
        if logprobs is not None:
            offsets[part.index] += sum(map(len, logprobs["tokens"]))
        if text or logprobs is not None:
            yield {**head, "choices": [_choice(part.index, text, None, logprobs)]}
    if usage:
        yield {**head, "choices": [], "usage": usage_of(answers, count)}
    yield "[DONE]"
