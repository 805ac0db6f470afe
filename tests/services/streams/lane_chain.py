"""Lanes of two sessions over a real link between two threads, for tests of steps that go through them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

from services.errors import FlashsplitError
from services.messages.steps import FeatureSlice, Forward, StepKind
from services.messages.tensors import WireTensor
from services.rpc.shared_memory import ClientLink
from services.same_host.link import PIECE_BYTES, RING_BYTES, SEGMENT_BYTES, SharedLink, SharedLinks
from services.streams.step_lane import MIN_SHARED_BYTES, StepLane
from tests.services.fakes import until
from tests.services.thread_watcher import ThreadWatcher

MAX_TENSOR_BYTES = PIECE_BYTES
MAX_SLICES = 12
MOST_PIECES = (SEGMENT_BYTES - RING_BYTES) // PIECE_BYTES - 1
"""Of the largest pieces, each with its header, there is room for so many in the steps' part of a segment."""
NEXT = Forward(8, 20, (5, 6), StepKind.VERIFY, 0, more=3)


def step(*sizes: int, number: int = 7) -> Forward:
    """With an activation and feature slices of so many bytes."""
    activation, *features = (WireTensor("float16", (size // 2,), os.urandom(size)) for size in sizes)
    slices = tuple(FeatureSlice(19, one, index or None) for index, one in enumerate(features))
    return Forward(number, 19, (3, 4), StepKind.DECODE, 5, activation, slices, more=9)


class End:
    """One side of a link: its thread, and lanes of it."""

    def __init__(self, link: Callable[[], SharedLink], watcher: ThreadWatcher) -> None:
        self._link, self.watcher = link, watcher
        self.lanes: dict[int, StepLane] = {}
        self.steps: dict[int, list[Forward]] = {}
        self.begun: list[tuple[Forward, bool]] = []
        self.failures: list[FlashsplitError] = []

    @property
    def link(self) -> SharedLink:
        return self._link()

    def join(self, stream_id: int, **limits: int) -> None:
        socket = self.link.step_socket
        assert socket is not None
        lane = self.lanes[stream_id] = StepLane(self.link, socket, stream_id)
        steps = self.steps[stream_id] = []

        def begun(step: Forward, whole: bool) -> None:
            self.begun.append((step.with_own_memory(), whole))

        lane.listen(steps.append, self.failures.append, on_begun=begun, **limits)

    def send(self, forward: Forward, stream_id: int = 1, wait_for_features: Callable[[], object] | None = None) -> bool:
        return self.watcher.call(lambda: self.lanes[stream_id].send(forward, wait_for_features))

    def send_raw(self, message: bytes) -> bool:
        socket = self.link.step_socket
        return self.watcher.call(lambda: socket is not None and socket.send(1, message))

    async def next(self, stream_id: int = 1) -> Forward:
        await until(lambda: bool(self.steps[stream_id] or self.failures), 5)
        assert self.failures == []
        return self.steps[stream_id].pop(0)


class LaneChain:
    """Who sends activations down and who sends the next steps up, with lanes of two sessions between them."""

    def __init__(self, client: ClientLink, links: SharedLinks, watchers: tuple[ThreadWatcher, ThreadWatcher]) -> None:
        self.client = client
        there = links.get(client.link.link_id)
        self.above, self.below = End(lambda: client.link, watchers[0]), End(lambda: there, watchers[1])

    async def join(self) -> None:
        await until(lambda: self.below.link.step_socket is not None)
        for stream_id in (1, 2):
            self.above.join(stream_id)
            self.below.join(stream_id, max_tensor_bytes=MAX_TENSOR_BYTES, max_feature_slices=MAX_SLICES)

    async def refusal(self) -> FlashsplitError:
        """Of the next message; nothing was taken, and the step behind it is."""
        await until(lambda: bool(self.below.failures), 5)
        [error] = self.below.failures
        self.below.failures.clear()
        assert self.below.steps[1] == []
        expected = step(2 * MIN_SHARED_BYTES, 100)
        assert self.above.send(expected)
        assert await self.below.next() == expected
        return error


@contextlib.contextmanager
def two_watchers() -> Any:
    watchers = ThreadWatcher(), ThreadWatcher()
    yield watchers
    for watcher in watchers:
        watcher.end()


def set_fields(message: Any, change: dict[str, Any]) -> None:
    """Set fields of a message; lists in place of repeated ones."""
    for name, value in change.items():
        if isinstance(value, list):
            getattr(message, name)[:] = value
        else:
            setattr(message, name, value)
