"""Connections to other workers, one channel an address, opened on first use and kept."""

from __future__ import annotations

import asyncio

import grpc

from services.channel import connect
from services.draft import RemoteDraft
from services.stage import RemoteStage
from services.worker import RemoteWorker


class Peers:
    """The workers that this process talks to. Every method raises Unavailable when one doesn't answer in time."""

    def __init__(self, timeout_s: float = 5.0) -> None:
        self._timeout_s = timeout_s
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._connecting: dict[str, asyncio.Lock] = {}

    async def worker(self, address: str) -> RemoteWorker:
        return RemoteWorker(await self._channel(address), address)

    async def stage(self, address: str) -> RemoteStage:
        return RemoteStage(await self._channel(address), address)

    async def draft(self, address: str) -> RemoteDraft:
        return RemoteDraft(await self._channel(address), address)

    async def close(self) -> None:
        """Close all connections; running calls end."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    async def _channel(self, address: str) -> grpc.aio.Channel:
        async with self._connecting.setdefault(address, asyncio.Lock()):
            known = self._channels.pop(address, None)
            if known is not None and known.get_state() != grpc.ChannelConnectivity.READY:
                # A worker that was gone is asked anew, without waiting out the old channel's back-off.
                await known.close()
                known = None
            self._channels[address] = known or await connect(address, timeout_s=self._timeout_s)
            return self._channels[address]
