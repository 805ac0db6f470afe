"""Connections to other workers, opened on first use and kept: one for steps and one for snapshots an address."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc

from services.channel import connect
from services.compress import RemoteCompressor
from services.draft import RemoteDraft
from services.errors import Unavailable
from services.security import OPEN, Security
from services.snapshot_service import RemoteSnapshots
from services.stage import RemoteStage
from services.worker import RemoteWorker


class Peers:
    """The workers that this process talks to. Every method raises Unavailable when one doesn't answer in time.

    caller: how this process calls itself in that sentence, where others read it.
    """

    def __init__(
        self, timeout_s: float = 5.0, *, security: Security = OPEN, caller: Callable[[], str] | None = None
    ) -> None:
        self._timeout_s, self._security, self._caller = timeout_s, security, caller
        self._channels: dict[tuple[str, str], grpc.aio.Channel] = {}
        self._connecting: dict[tuple[str, str], asyncio.Lock] = {}

    async def worker(self, address: str) -> RemoteWorker:
        return RemoteWorker(await self._channel(address), address)

    async def stage(self, address: str) -> RemoteStage:
        return RemoteStage(await self._channel(address), address)

    async def draft(self, address: str) -> RemoteDraft:
        return RemoteDraft(await self._channel(address), address)

    async def compressor(self, address: str) -> RemoteCompressor:
        return RemoteCompressor(await self._channel(address), address)

    async def snapshots(self, address: str) -> RemoteSnapshots:
        """On a connection of its own: a snapshot must not sit in front of a step."""
        return RemoteSnapshots(await self._channel(address, "snapshots"), address)

    async def lost(self, address: str) -> Unavailable:
        """Wait until the connection for steps breaks, or cannot be made; the sentence that says so."""
        try:
            channel = await self._channel(address)
        except Unavailable as error:
            return error
        await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        return Unavailable(
            f"the connection to the worker at {address} broke", reason="WORKER_UNREACHABLE", address=address
        )

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
            if known is None:
                known = await self._connect(address)
            self._channels[key] = known
            return self._channels[key]

    async def _connect(self, address: str) -> grpc.aio.Channel:
        try:
            return await connect(address, timeout_s=self._timeout_s, security=self._security)
        except Unavailable as error:
            if self._caller is not None:
                error.message = f"{self._caller()}: {error.message}"
            raise
