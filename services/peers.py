"""Connections to other workers, opened on first use and kept: one for steps and one for snapshots an address."""

from __future__ import annotations

import asyncio

import grpc

from services.channel import connect
from services.draft import RemoteDraft
from services.snapshot_service import RemoteSnapshots
from services.stage import RemoteStage
from services.worker import RemoteWorker


class Peers:
    """The workers that this process talks to. Every method raises Unavailable when one doesn't answer in time."""

    def __init__(self, timeout_s: float = 5.0) -> None:
        self._timeout_s = timeout_s
        self._channels: dict[tuple[str, str], grpc.aio.Channel] = {}
        self._connecting: dict[tuple[str, str], asyncio.Lock] = {}

    async def worker(self, address: str) -> RemoteWorker:
        return RemoteWorker(await self._channel(address), address)

    async def stage(self, address: str) -> RemoteStage:
        return RemoteStage(await self._channel(address), address)

    async def draft(self, address: str) -> RemoteDraft:
        return RemoteDraft(await self._channel(address), address)

    async def snapshots(self, address: str) -> RemoteSnapshots:
        """On a connection of its own: a snapshot must not sit in front of a step."""
        return RemoteSnapshots(await self._channel(address, "snapshots"), address)

    async def close(self) -> None:
        """Close all connections; running calls end."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    async def _channel(self, address: str, use: str = "steps") -> grpc.aio.Channel:
        key = address, use
        async with self._connecting.setdefault(key, asyncio.Lock()):
            known = self._channels.pop(key, None)
            if known is not None and known.get_state() != grpc.ChannelConnectivity.READY:
                # A worker that was gone is asked anew, without waiting out the old channel's back-off.
                await known.close()
                known = None
            self._channels[key] = known or await connect(address, timeout_s=self._timeout_s)
            return self._channels[key]
