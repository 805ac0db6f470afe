"""/v1/completions: OpenAI's API for plain prompts, of text or of token ids."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from coordinator.answer import Answer, Piece, Request
from coordinator.api.engine_requests import check_model
from coordinator.api.http.body_conversion import (
    choices_of,
    compression_params,
    make_request,
    most_tokens,
    plain_prompts,
    truncated,
)
from coordinator.api.http.documented import ANSWER, OPENAI_ERRORS
from coordinator.api.http.field_decisions import Api, refuse_fields
from coordinator.api.http.json_bodies import JsonRoute
from coordinator.api.http.kept_answers import KeptAnswers
from coordinator.api.http.logprobs import CompletionLogprobs, vllm_prompt_logprobs
from coordinator.api.http.replies import SentEvent, json_event
from coordinator.api.http.reply_form import Parts
from coordinator.api.http.replying import reply
from coordinator.api.http.schemas import CompletionRequest
from coordinator.api.http.structured import answer_bound
from coordinator.api.http.usage import timings_of, usage_of
from coordinator.api.http.written_json import WrittenList
from coordinator.engine.engine import Engine
from coordinator.text.prompt import Prompt
from coordinator.text.tokenizer import Tokenizer
from services.errors import InvalidArgument
from services.messages.inference_types import PromptToken


def routes(engine: Engine, answers: KeptAnswers) -> APIRouter:
    """Return the routes of this API."""
    router = APIRouter(tags=["OpenAI"], route_class=JsonRoute, responses=OPENAI_ERRORS)

    @router.post("/v1/completions", response_model=None, responses=ANSWER)
    async def completions(body: CompletionRequest, http: HttpRequest) -> Response:
        """The continuation of one or more prompts."""
        check_model(engine, body.model)
        refuse_fields(Api.COMPLETIONS, body)
        count = _candidates(body)
        if body.echo and body.suffix:
            raise InvalidArgument(
                "echo is true, and suffix is given: what the model reads then is no text that the answer could go on "
                "from; leave one of them out",
                field="echo",
            )
        bound, prompt_logprobs = await answer_bound(body, body.response_format), _prompt_logprobs(body)
        compression = compression_params(body, prompt_logprobs)

        async def form() -> CompletionReply:
            prompts = await plain_prompts(
                engine,
                body.prompt,
                compression,
                suffix=body.suffix,
                add_special_tokens=body.add_special_tokens,
                structured=bound is not None,
                most=most_tokens(engine, body),
            )
            requests: list[Request] = []
            echoes: list[str] = []
            for prompt in (truncated(engine, body, prompt, body.max_tokens) for prompt in prompts):
                request = await make_request(
                    engine,
                    body,
                    prompt,
                    body.max_tokens,
                    # The best are known by the log-probabilities of their tokens.
                    logprobs=0 if body.logprobs is None and count > body.n else body.logprobs,
                    prompt_logprobs=prompt_logprobs,
                    bound=bound,
                    chat=False,
                )
                echoes.append(_text(engine.files.tokenizer, prompt) if body.echo else "")
                requests += choices_of(request, count, len(requests))
                # A thousand prompts hold up no other client.
                await asyncio.sleep(0)
            head = {
                "id": f"cmpl-{requests[0].request_id}",
                "object": "text_completion",
                "created": int(time.time()),
                "model": body.model or engine.name,
            }
            usage = body.stream_options is not None and body.stream_options.include_usage
            wish = _Wish(body.logprobs, body.prompt_logprobs, body.echo, body.skip_special_tokens)
            return CompletionReply(requests, echoes, count, body.n, head, wish, usage)

        return await reply(http, answers, form, stream=body.stream)

    return router


def _candidates(body: CompletionRequest) -> int:
    """Return how many answers to make to each prompt: `best_of` of them, of which the best `n` are told.

    Raises InvalidArgument for fewer than are to be told, and for a stream, which would tell of each before it is known
    whether it is one of the best.
    """
    count = body.n if body.best_of is None else body.best_of
    if count < body.n:
        raise InvalidArgument(f"best_of is {count}; it must be at least n, which is {body.n}", field="best_of")
    if count > body.n and body.stream:
        raise InvalidArgument(
            f"best_of is {count} in a stream; it must be n, which is {body.n}: leave out stream, or best_of",
            field="best_of",
        )
    return count


def _best(answers: Sequence[Answer], count: int) -> list[int]:
    """Return the indices of so many answers: those of the highest mean log-probability of a token, the best first."""

    def mean(index: int) -> float:
        logprobs = answers[index].logprobs or ()
        return sum(entry.logprob for entry in logprobs) / max(1, len(logprobs))

    return sorted(range(len(answers)), key=mean, reverse=True)[:count]


def _prompt_logprobs(body: CompletionRequest) -> int | None:
    """Return how many of the most probable tokens to report at the places of the prompt's, None for no
    log-probabilities of the prompt: what `prompt_logprobs` asks for and what `echo` with `logprobs` does."""
    asked = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return max((count for count in asked if count is not None), default=None)


def _text(tokenizer: Tokenizer | None, prompt: Prompt) -> str:
    """Return a prompt's text as the client wrote it, or that of its token ids."""
    if prompt.text or tokenizer is None:
        return prompt.text
    return tokenizer.decode(prompt.token_ids, skip_special_tokens=False)


@dataclass(frozen=True, slots=True)
class _Wish:
    """What a client wants to be told: the fields of the body that have these names."""

    logprobs: int | None
    prompt_logprobs: int | None
    echo: bool
    skip_special_tokens: bool


class _Choice:
    """Makes the objects of one choice: one for all of it, or one after the other for parts of it."""

    def __init__(self, tokenizer: Tokenizer | None, wish: _Wish, index: int, echo: str) -> None:
        """echo: the prompt's text, where it is asked for."""
        self._tokenizer, self._wish, self._index = tokenizer, wish, index
        self._logprobs = CompletionLogprobs(
            tokenizer, wish.logprobs or 0, len(echo), skip_special_tokens=wish.skip_special_tokens
        )
        # What the first object says of the prompt.
        self._echo = echo
        self._echoed_logprobs: dict[str, WrittenList] = {}
        self._prompt_logprobs = WrittenList()

    @property
    def holds_prompt(self) -> bool:
        """Whether the next object tells the log-probabilities of a prompt, which may be many."""
        return bool(self._echoed_logprobs or self._prompt_logprobs)

    async def take_prompt(self, prompt: Sequence[PromptToken]) -> None:
        """Take the prompt's next tokens, all of which come before the first object is made."""
        if prompt:
            await asyncio.to_thread(self._take_prompt, prompt)

    def _take_prompt(self, prompt: Sequence[PromptToken]) -> None:
        wish = self._wish
        if wish.echo and wish.logprobs is not None:
            for name, entries in self._logprobs.of_prompt(prompt).items():
                self._echoed_logprobs.setdefault(name, WrittenList()).extend(entries)
        if wish.prompt_logprobs is not None:
            self._prompt_logprobs.extend(vllm_prompt_logprobs(self._tokenizer, prompt, wish.prompt_logprobs))

    def made_of(self, piece: Piece, finish_reason: str | None = None) -> dict[str, Any]:
        """Return the object of the answer's next piece; the first one begins with what was asked of the prompt."""
        text, self._echo = self._echo + piece.text, ""
        logprobs: Mapping[str, Any] = self._echoed_logprobs
        self._echoed_logprobs = {}
        if piece.logprobs and self._wish.logprobs is not None:
            of_answer = self._logprobs.of_answer(piece.token_ids, piece.logprobs)
            for name, echoed in logprobs.items():
                echoed.extend(of_answer[name])
            logprobs = logprobs or of_answer
        made = {"index": self._index, "text": text, "logprobs": logprobs or None, "finish_reason": finish_reason}
        if self._prompt_logprobs:
            made["prompt_logprobs"], self._prompt_logprobs = self._prompt_logprobs, WrittenList()
        return made


@dataclass(frozen=True, slots=True)
class CompletionReply:
    """How the answers to plain prompts are told. requests: those of the first prompt, then those of the second and so
    on. echoes: what each prompt's answers begin with. count: answers to each prompt. told: how many of them a whole
    reply tells. head: what every object begins with. usage: whether a stream tells it."""

    requests: list[Request]
    echoes: list[str]
    count: int
    told: int
    head: dict[str, Any]
    wish: _Wish
    usage: bool

    @property
    def name(self) -> str:
        """See `ReplyForm`."""
        return str(self.head["id"])

    def _choices(self, engine: Engine) -> list[_Choice]:
        tokenizer = engine.files.tokenizer
        return [
            _Choice(tokenizer, self.wish, index, self.echoes[index // self.count])
            for index in range(len(self.requests))
        ]

    async def whole(self, engine: Engine, parts: Parts) -> dict[str, Any]:
        """See `ReplyForm`."""
        choices, count, told = self._choices(engine), self.count, self.told
        answers: dict[int, Answer] = {}
        async for part in parts:
            if isinstance(part.content, Answer):
                answers[part.index] = part.content
            else:
                await choices[part.index].take_prompt(part.content.prompt)
        made: list[dict[str, Any]] = []
        for first in range(0, len(choices), count):
            of_prompt = [answers[index] for index in range(first, first + count)]
            for index in _best(of_prompt, told) if told < count else range(count):
                answer = of_prompt[index]
                piece = Piece(answer.token_ids, answer.text or "", answer.logprobs or ())
                choice = await asyncio.to_thread(choices[first + index].made_of, piece, answer.finish_reason)
                made.append(choice | {"index": len(made)})
        return {**self.head, "choices": made, "usage": usage_of(answers, count), "timings": timings_of(answers[0])}

    async def stream(self, engine: Engine, parts: Parts) -> AsyncGenerator[SentEvent]:
        """See `ReplyForm`."""
        choices, usage = self._choices(engine), self.usage
        # The last chunk has the usage; null in the others says that it will come.
        head = {**self.head, "usage": None} if usage else self.head
        answers: dict[int, Answer] = {}
        async for part in parts:
            choice, content = choices[part.index], part.content
            if isinstance(content, Answer):
                answers[part.index] = content
                long, end = choice.holds_prompt, choice.made_of(Piece(()), content.finish_reason)
                chunk = {**head, "choices": [end], "timings": timings_of(content)}
                yield await json_event(chunk) if long else chunk
            elif content.prompt:
                await choice.take_prompt(content.prompt)
            else:
                long, made = choice.holds_prompt, choice.made_of(content)
                if long or made["text"] or made["logprobs"]:
                    chunk = {**head, "choices": [made]}
                    yield await json_event(chunk) if long else chunk
        if usage:
            yield {**head, "choices": [], "usage": usage_of(answers, self.count)}
        yield "[DONE]"
