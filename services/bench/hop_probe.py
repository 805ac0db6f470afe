"""A worker that computes nothing, to measure what a step costs on its way to a stage and back.

Run as a program it serves the real StageService, whose sessions answer each step at once, and beside it a bare stream
of bytes to compare with. `HopProbe` is the client of both.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import click
import grpc

from services.errors import CLOSED, Unavailable
from services.layers import LayerRange
from services.messages.steps import (
    Commit,
    Event,
    Forward,
    Location,
    OpenSession,
    SnapshotRestore,
    SnapshotSave,
    StageIdentity,
    StepKind,
    StepLimit,
)
from services.messages.tensors import CHUNK_BYTES, WireTensor
from services.net.channel import connect
from services.net.security import OPEN
from services.net.server import Server
from services.processes.lifeline import die_with
from services.rpc.payload_transport import PayloadTransport
from services.rpc.peers import Peers
from services.rpc.shared_memory import SharedMemoryServicer
from services.rpc.stage import StageServicer, StageSession
from services.same_host.link import SharedLinks
from services.streams.direct_queue import DirectQueue
from services.streams.step_lane import StepLane

_BARE = "flashsplit.probe.Bare"
_LAYERS = LayerRange(0, 1)
MAX_BYTES = 1 << 30
"""The most bytes of one step."""

ROW_BYTES = 1 << 10
"""The size of the rows of a step's tensor, so that its shape stays within what a frame may have."""


class HopProbe:
    """Sends steps with a payload to a running probe."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def step_s(self, size_bytes: int, transport: PayloadTransport, repeat: int) -> list[float]:
        """Return the seconds from sending a step of `size_bytes` to its answer, `repeat` times, one step at a time."""
        peers = Peers(transport=transport)
        rows = max(1, size_bytes // ROW_BYTES)
        tensor = WireTensor("int32", (rows, ROW_BYTES // 4), bytes(rows * ROW_BYTES))
        try:
            stage = await peers.stage(self._address)
            opening = OpenSession("probe", "", 0, _LAYERS, (), rows + 1, rows, 1, rows)
            session = await stage.open(opening)
            events = session.events()
            times = []
            for step in range(repeat):
                began = time.perf_counter()
                await session.forward(Forward(step, 0, (), StepKind.PREFILL, activation=tensor))
                await anext(events)
                times.append(time.perf_counter() - began)
            await session.close()
            return times
        finally:
            await peers.close()

    async def bare_s(self, size_bytes: int, repeat: int) -> list[float]:
        """Return the same for a stream of plain bytes, in pieces of the size that is fastest with gRPC."""
        channel = await connect(self._address, timeout_s=5)
        piece, rest = bytes(min(size_bytes, CHUNK_BYTES)), size_bytes
        try:
            call = channel.stream_stream(f"/{_BARE}/Run")()
            times = []
            for _ in range(repeat):
                began, rest = time.perf_counter(), size_bytes
                while rest > 0:
                    await call.write(piece[: min(rest, CHUNK_BYTES)])
                    rest -= CHUNK_BYTES
                # An empty message asks for the answer.
                await call.write(b"")
                if await call.read() is grpc.aio.EOF:
                    raise Unavailable(f"{self._address} ended the bare stream", address=self._address)
                times.append(time.perf_counter() - began)
            call.cancel()
            return times
        finally:
            await channel.close()


class _Session(StageSession):
    """Answers each step with a commit at once."""

    max_tensor_bytes = MAX_BYTES
    max_feature_slices = 0
    step_lane = None

    def __init__(self, identity: StageIdentity) -> None:
        self.stages = (identity,)
        self._events: DirectQueue[Event] = DirectQueue()

    async def forward(self, forward: Forward) -> None:
        self._events.put(Commit(forward.step, 0, (), ()))

    async def limit_steps(self, limit: StepLimit) -> None:
        raise Unavailable("nothing follows a probe's step by itself")

    async def save_snapshot(self, save: SnapshotSave) -> None:
        raise Unavailable("a probe keeps nothing")

    async def restore_snapshot(self, restore: SnapshotRestore) -> None:
        raise Unavailable("a probe keeps nothing")

    async def events(self) -> AsyncIterator[Event]:
        while True:
            yield await self._events.get()

    def answer_at_once(self, take: Callable[[Event], bool]) -> None:
        self._events.take = take

    async def close(self, why: str = CLOSED) -> None:
        """Nothing to free."""


class _Stage:
    def __init__(self, address: str) -> None:
        self._identity = StageIdentity(Location(0, "probe", "none", address), _LAYERS)

    async def open(self, request: OpenSession, above: StepLane | None = None) -> StageSession:
        return _Session(self._identity)

    async def forget(self, session_id: str) -> None:
        """Nothing rests."""


class _Bare(grpc.GenericRpcHandler):
    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return grpc.stream_stream_rpc_method_handler(self._run) if details.method == f"/{_BARE}/Run" else None

    async def _run(self, _: object, context: grpc.aio.ServicerContext) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            if not message:
                await context.write(bytes(16))


@click.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.option("--listen", required=True)
@click.option("--lifeline-fd", type=int, required=True)
@click.option("--scratch", type=click.Path(path_type=Path))
def main(listen: str, lifeline_fd: int, scratch: Path | None) -> None:
    """Serve until stopped; of a worker's flags, those that say where to listen have an effect, the others none."""
    die_with(lifeline_fd, scratch)
    asyncio.run(_serve(listen))


async def _serve(listen: str) -> None:
    links = SharedLinks()

    def register_bare(server: grpc.aio.Server) -> str:
        server.add_generic_rpc_handlers((_Bare(),))
        return _BARE

    registrations = [StageServicer(_Stage(listen), links).register, SharedMemoryServicer(links).register]
    server = Server(listen, [*registrations, register_bare], security=OPEN)
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    await server.start()
    await stopping.wait()
    await server.stop(0)


if __name__ == "__main__":
    main()
