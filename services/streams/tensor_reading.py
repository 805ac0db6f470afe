"""What the two session services share: reading chunked tensors, and two loops that live and die together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import grpc

from services.errors import InvalidArgument
from services.messages.tensors import IncomingTensor, TensorAssembler, WireTensor
from services.same_host.link import NO_LINKS, SharedLinks


async def read_tensors(
    stream: Any, incoming: Sequence[IncomingTensor], links: SharedLinks = NO_LINKS
) -> list[WireTensor]:
    """Read chunk frames until all tensors of a frame are whole. Raises InvalidArgument for any other frame."""
    assembler = TensorAssembler(incoming, links)
    while not assembler.complete:
        frame = await stream.read()
        if frame is grpc.aio.EOF or frame.WhichOneof("frame") != "chunk":
            raise InvalidArgument("the pieces of a tensor are missing: expected a chunk", field="frame")
        assembler.add(frame.chunk)
    return assembler.tensors()


async def first_done(*loops: Coroutine[Any, Any, None]) -> None:
    """Run loops together until the first ends, cancel the others, and return or raise as that one did.

    Where several end at once, the one named first counts.
    """
    tasks = [asyncio.ensure_future(loop) for loop in loops]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        first = next(task for task in tasks if task.done())
    finally:
        for task in tasks:
            task.cancel()
        # Also takes note of the errors that don't count.
        await asyncio.gather(*tasks, return_exceptions=True)
    first.result()
