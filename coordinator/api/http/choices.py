"""Answers several requests at once, as one stream of their pieces, each with the number of its choice."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence

from coordinator.answer import Answer, ChoicePart, Piece, Request
from coordinator.engine.engine import Engine
from services.errors import InvalidArgument


async def answer_all(
    engine: Engine,
    requests: Sequence[Request],
    told: Sequence[ChoicePart] = (),
    on_turn: Callable[[], None] = lambda: None,
) -> AsyncGenerator[ChoicePart]:
    """Answer all requests together; the first error, or closing the generator, ends them all.

    No more of them are begun at once than the engine runs at once, so that they don't fill its queue by themselves.
    told: what was told of the answers before, behind which they go on. on_turn: called when one's turn has come.
    Raises the first error; a refusal of the grammar names the client's field that it was made of.
    """
    whole, pieces = set[int](), [list[Piece]() for _ in requests]
    for part in told:
        if isinstance(part.content, Answer):
            whole.add(part.index)
        else:
            pieces[part.index].append(part.content)
    left = [
        _answer(engine, request, index, pieces[index], on_turn)
        for index, request in enumerate(requests)
        if index not in whole
    ]
    if len(left) == 1:
        async with contextlib.aclosing(left[0]) as parts:
            async for part in parts:
                yield part
        return
    # Of what the client has not taken yet one piece waits here; the choices wait behind it.
    queue: asyncio.Queue[ChoicePart | BaseException | None] = asyncio.Queue(1)
    waiting = iter(left)

    async def run() -> None:
        try:
            for parts in waiting:
                async with contextlib.aclosing(parts):
                    async for part in parts:
                        await queue.put(part)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.ensure_future(run()) for _ in range(min(len(left), engine.load.max_running))]
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


async def _answer(
    engine: Engine, request: Request, index: int, told: Sequence[Piece], on_turn: Callable[[], None]
) -> AsyncGenerator[ChoicePart]:
    try:
        async with engine.answering(request, told) as generation, contextlib.aclosing(generation.pieces()) as pieces:
            on_turn()
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
