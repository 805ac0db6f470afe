"""Several answers at once, as one stream of what comes: each piece with the number of its choice."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from coordinator.answer import Answer, Piece, Request
from coordinator.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class Came:
    """A piece of choice `index`, or its finished answer."""

    index: int
    what: Piece | Answer


async def answer_all(engine: Engine, requests: Sequence[Request]) -> AsyncGenerator[Came]:
    """Answer all requests together. The first error ends them all and is raised; so does closing the generator.

    As many as the engine runs at once are begun at once, so that they don't fill its queue by themselves.
    """
    if len(requests) == 1:
        async with contextlib.aclosing(_answer(engine, requests[0], 0)) as events:
            async for event in events:
                yield event
        return
    queue: asyncio.Queue[Came | BaseException | None] = asyncio.Queue()
    turns = asyncio.Semaphore(engine.load.max_running)

    async def run(request: Request, index: int) -> None:
        try:
            async with turns, contextlib.aclosing(_answer(engine, request, index)) as events:
                async for event in events:
                    queue.put_nowait(event)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.ensure_future(run(request, index)) for index, request in enumerate(requests)]
    try:
        left = len(tasks)
        while left:
            came = await queue.get()
            if isinstance(came, BaseException):
                raise came
            if came is None:
                left -= 1
            else:
                yield came
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _answer(engine: Engine, request: Request, index: int) -> AsyncGenerator[Came]:
    async with engine.answering(request) as generation, contextlib.aclosing(generation.pieces()) as pieces:
        async for piece in pieces:
            yield Came(index, piece)
        assert generation.answer is not None
        yield Came(index, generation.answer)
