"""Items come to the reader in their order, whether they are handed over at once or read."""

from __future__ import annotations

import asyncio

from services.streams.direct_queue import DirectQueue


async def test_items_are_read_where_nobody_takes_them() -> None:
    queue = DirectQueue[int]()
    queue.put(1)
    queue.put(2)
    assert [await queue.get(), await queue.get()] == [1, 2]


async def test_items_are_handed_over_while_the_reader_waits() -> None:
    """And not while it is at one, nor behind one that waits for it."""
    queue, taken = DirectQueue[int](), list[int]()

    def take(item: int) -> bool:
        if item == 10:
            return False
        taken.append(item)
        return True

    queue.take = take
    read: list[int] = []
    at_one, go_on = asyncio.Event(), asyncio.Event()

    async def reader() -> None:
        while True:
            read.append(await queue.get())
            at_one.set()
            await go_on.wait()
            go_on.clear()

    reading = asyncio.ensure_future(reader())
    await asyncio.sleep(0)
    queue.put(1)
    assert (taken, read) == ([1], [])
    # What is not taken is read, and what comes behind it as well, until the reader asks for more.
    queue.put(10)
    queue.put(2)
    await at_one.wait()
    queue.put(3)
    assert (taken, read) == ([1], [10])
    for _ in range(3):
        go_on.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert read == [10, 2, 3]
    queue.put(4)
    assert (taken, read) == ([1, 4], [10, 2, 3])
    reading.cancel()
