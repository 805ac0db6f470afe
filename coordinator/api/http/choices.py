"""Answers several requests at once, as one stream of their pieces, each with the number of its choice."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from coordinator.answer import Answer, Piece, Request
from coordinator.engine.engine import Engine
from services.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class ChoicePart:
    """A piece of the answer of choice `index`, or at its end the whole answer."""

    index: int
    content: Piece | Answer


async def answer_all(engine: Engine, requests: Sequence[Request]) -> AsyncGenerator[ChoicePart]:
    """Answer all requests together; the first error, or closing the generator, ends them all.

    No more of them are begun at once than the engine runs at once, so that they don't fill its queue by themselves.
    Raises the first error; a refusal of the grammar names the client's field that it was made of.
    """
    if len(requests) == 1:
        async with contextlib.aclosing(_answer(engine, requests[0], 0)) as parts:
            async for part in parts:
                yield part
        return
    # Of what the client has not taken yet one piece waits here; the choices wait behind it.
    queue: asyncio.Queue[ChoicePart | BaseException | None] = asyncio.Queue(1)
    waiting = enumerate(requests)

    async def run() -> None:
        try:
            for index, request in waiting:
                async with contextlib.aclosing(_answer(engine, request, index)) as parts:
                    async for part in parts:
                        await queue.put(part)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.ensure_future(run()) for _ in range(min(len(requests), engine.load.max_running))]
    try:
        unfinished = len(tasks)
        while unfinished:
            received = await queue.get()
            if isinstance(received, BaseException):
                raise received
            if received is None:
                unfinished -= 1
            else:
                yield received
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _answer(engine: Engine, request: Request, index: int) -> AsyncGenerator[ChoicePart]:
    try:
        async with engine.answering(request) as generation, contextlib.aclosing(generation.pieces()) as pieces:
            async for piece in pieces:
                yield ChoicePart(index, piece)
            assert generation.answer is not None
            yield ChoicePart(index, generation.answer)
    except InvalidArgument as error:
        field = str(error.where.get("field", ""))
        if not field.startswith("grammar"):
            raise
        raise InvalidArgument(
            f"{request.grammar_field} cannot be used: {error.message.removeprefix(f'{field} cannot be used: ')}",
            reason=error.reason,
            field=request.grammar_field,
        ) from error
