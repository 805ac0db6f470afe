"""Toy workers of this process on Unix sockets, which end with the test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from services.messages.description import Role
from tests.coordinator.cluster.toy_worker import ToyHost

Hosts = Callable[..., Awaitable[list[ToyHost]]]


@pytest.fixture
async def hosts(tmp_path: Path) -> AsyncIterator[Hosts]:
    """Start so many toy workers, with these roles each."""
    started: list[ToyHost] = []

    async def start(count: int, *roles: Role) -> list[ToyHost]:
        begun = [
            ToyHost(f"unix:{tmp_path}/{len(started) + index}.sock", roles or (Role.TARGET, Role.DRAFT))
            for index in range(count)
        ]
        started.extend(begun)
        for host in begun:
            await host.start()
        return begun

    yield start
    for host in started:
        await host.stop()
