"""Coroutines that a session begins and does not wait for."""

from __future__ import annotations

import asyncio

from shard_worker.session.background import BackgroundTasks


async def test_an_error_of_any_kind_is_handed_over() -> None:
    """No error is lost, even one that the project does not know; the others go on."""
    errors: list[Exception] = []
    done: list[int] = []
    tasks = BackgroundTasks(errors.append)

    async def fail() -> None:
        raise ZeroDivisionError

    async def work(number: int) -> None:
        await asyncio.sleep(0)
        done.append(number)

    tasks.begin(work, 1)
    tasks.begin(fail)
    tasks.begin(work, 2)
    await tasks.settle()
    assert done == [1, 2]
    assert [type(error) for error in errors] == [ZeroDivisionError]


async def test_settling_leaves_as_many_as_may_remain() -> None:
    """Waiting ends as soon as no more than the given number still run."""
    release = [asyncio.Event(), asyncio.Event()]
    tasks = BackgroundTasks(lambda _: None)
    done: list[int] = []

    async def wait(index: int) -> None:
        await release[index].wait()
        done.append(index)

    for index in range(2):
        tasks.begin(wait, index)
    await tasks.settle(2)
    assert done == []
    release[1].set()
    await tasks.settle(1)
    assert done == [1]
    release[0].set()
    await tasks.settle()
    assert done == [1, 0]


async def test_cancelling_is_no_error() -> None:
    """Cancelled coroutines end, and nothing is reported of them."""
    errors: list[Exception] = []
    tasks = BackgroundTasks(errors.append)
    tasks.begin(asyncio.Event().wait)  # type: ignore[arg-type]
    tasks.cancel()
    await tasks.settle()
    assert errors == []
