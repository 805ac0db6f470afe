"""A channel that puts something of its own around every call of another one.

It is no client interceptor, because those put a task and two queues between a stream's frames and the wire.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import grpc


class ChannelAround(grpc.aio.Channel):
    """Closes, and knows the state of, the channel inside."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    @abstractmethod
    def _calls(self, make: Callable[..., Any], *method: Any, **options: Any) -> Callable[..., Any]:
        """Return what begins calls of a method. make: the inner channel's function that does so; the other arguments
        are those that it takes."""

    def unary_unary(self, *method: Any, **options: Any) -> Any:
        return self._calls(self._channel.unary_unary, *method, **options)

    def unary_stream(self, *method: Any, **options: Any) -> Any:
        return self._calls(self._channel.unary_stream, *method, **options)

    def stream_unary(self, *method: Any, **options: Any) -> Any:
        return self._calls(self._channel.stream_unary, *method, **options)

    def stream_stream(self, *method: Any, **options: Any) -> Any:
        return self._calls(self._channel.stream_stream, *method, **options)

    @property
    def sent_bytes(self) -> int:
        """As `sent_bytes` returns it for this channel."""
        return sent_bytes(self._channel)

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    async def __aenter__(self) -> ChannelAround:
        return self

    async def __aexit__(self, *ending: object) -> None:
        await self.close()


def sent_bytes(channel: grpc.aio.Channel) -> int:
    """Return the bytes of all messages that were sent through a channel by now, 0 where nobody counts them: they are
    counted on the way to other hosts."""
    return channel.sent_bytes if isinstance(channel, ChannelAround) else 0
