"""A worker without weights, behind a worker's real services: what it holds is what it was told to load.

In a test's own process `ToyHost` serves one at an address. As a program (`LAUNCH`) it stands for local workers: it
takes a worker's flags, heeds those that say how to be reached, and dies while loading where the dtype is DYING.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

from services.errors import Unavailable
from services.messages.description import Role, WorkerDescription
from services.messages.holder import Holder
from services.messages.loading import LoadDraft, LoadPart, LoadProgress, LoadTarget
from services.net.server import Server
from services.processes.launch import Launch
from services.processes.lifeline import die_with
from services.rpc.liveness import Life, LivenessServicer
from services.rpc.snapshots import SnapshotServicer
from services.rpc.stage import StageServicer
from services.rpc.worker import WorkerServicer
from tests.services.fakes import WORKER, FakeSnapshots, FakeStage, FakeWorker

ROOT = Path(__file__).parents[3]

MODEL, DRAFT = Path("/models/target"), Path("/models/draft")
"""Checkpoints, of which toy workers read nothing."""

LAYERS = 12
"""How many layers every toy model has."""

DYING = "float16"
"""A worker that is told to load weights of this type writes EXCEPTION_LINE and exits with code 3."""

EXCEPTION_LINE = (
    '{"level": "error", "event": "load.failed", "exception": [{"exc_type": "RuntimeError", "exc_value": "no room"}]}'
)

LAUNCH = Launch(
    threads=1,
    commands={
        "cpu": ("env", f"PYTHONPATH={ROOT}:{ROOT}/proto", sys.executable, "-m", "tests.coordinator.cluster.toy_worker")
    },
)
"""Starts toy workers in place of local ones."""


class ToyWorker(FakeWorker):
    """A worker that holds what it has loaded. dies: whether loading DYING ends the process.

    knows_kv_dtype, knows_quantization, knows_rope_scaling, knows_host_experts: False for one of a release before keys
    and values had a type of their own, before matrices were packed while they are loaded, before RoPE was scaled as a
    command says, and before experts could be in the host's memory.
    """

    def __init__(self, roles: tuple[Role, ...] = (Role.TARGET, Role.DRAFT), *, dies: bool = False) -> None:
        super().__init__(replace(WORKER, roles=roles, target=None, draft=None, process_id=os.getpid()))
        self._dies = dies
        self.knows_kv_dtype = self.knows_quantization = self.knows_rope_scaling = self.knows_host_experts = True
        self.fingerprint = "f00d"

    async def describe(self) -> WorkerDescription:
        return self.description

    async def load(
        self, part: LoadPart, holder: Holder | None, *, ends_sessions: bool
    ) -> AsyncIterator[LoadProgress | WorkerDescription]:
        self.ends_sessions.append(ends_sessions)
        yield LoadProgress(1, 4)
        if self.fault is not None:
            raise self.fault
        if self._dies and part.dtype == DYING:
            print(EXCEPTION_LINE, flush=True)
            os._exit(3)
        self.loaded.append(part)
        if isinstance(part, LoadTarget):
            assert WORKER.target is not None
            target = replace(
                WORKER.target,
                fingerprint=self.fingerprint,
                layers=part.layers,
                num_layers=LAYERS,
                dtype=part.dtype or "bfloat16",
                kv_dtype=part.kv_dtype if self.knows_kv_dtype else None,
                quantization=part.quantization if self.knows_quantization else None,
                rope_scaling=part.rope_scaling if self.knows_rope_scaling else None,
                host_experts=part.host_experts if self.knows_host_experts else 0.0,
            )
            self.description = replace(self.description, target=target)
        elif isinstance(part, LoadDraft):
            assert WORKER.draft is not None
            draft = replace(WORKER.draft, quantization=part.quantization if self.knows_quantization else None)
            self.description = replace(self.description, draft=draft)
        yield LoadProgress(4, 4)
        yield self.description


class ToyPeers:
    """A worker's connections to others, as far as these are watched. `fault`: what is wrong with all of them."""

    def __init__(self) -> None:
        self.fault: Unavailable | None = None
        self._changed = asyncio.Event()

    def fail(self, fault: Unavailable) -> None:
        """Lose them all."""
        self.fault = fault
        self._changed.set()

    async def reach(self, address: str, lost_after_s: float | None = None) -> None:
        if self.fault is not None:
            raise self.fault

    async def lost(self, address: str) -> Unavailable:
        await self._changed.wait()
        assert self.fault is not None
        return self.fault


class ToyHost:
    """A toy worker in this process, its fakes for a test to look at, and its server, which can be stopped and begun."""

    def __init__(self, address: str, roles: tuple[Role, ...] = (Role.TARGET, Role.DRAFT)) -> None:
        self.address, self._roles = address, roles
        self.worker, self.stage, self.snapshots = ToyWorker(roles), FakeStage(), FakeSnapshots()
        self.life, self.peers = Life(), ToyPeers()
        self._server: Server | None = None

    async def start(self) -> None:
        """Listen, as a worker that holds nothing yet."""
        fresh = ToyWorker(self._roles)
        fresh.fingerprint, fresh.fault = self.worker.fingerprint, self.worker.fault
        self.worker, self.life = fresh, Life()
        servicers = WorkerServicer(self.worker), StageServicer(self.stage), SnapshotServicer(self.snapshots)
        liveness = LivenessServicer(self.life, self.peers)
        self._server = Server(self.address, [servicer.register for servicer in (*servicers, liveness)])
        await self._server.start()

    async def stop(self) -> None:
        """Be gone, at once. Safe to call twice."""
        if self._server is not None:
            server, self._server = self._server, None
            self.life.end()
            await server.stop(0)


async def _serve(address: str, roles: tuple[Role, ...]) -> None:
    liveness = LivenessServicer(Life(), ToyPeers())
    servicers = WorkerServicer(ToyWorker(roles, dies=True)), StageServicer(FakeStage()), liveness
    server = Server(address, [servicer.register for servicer in servicers])
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    await server.start()
    await stopping.wait()
    await server.stop(0)


def main() -> None:
    """Serve until told to stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", required=True)
    parser.add_argument("--roles", required=True)
    parser.add_argument("--lifeline-fd", type=int, required=True)
    parser.add_argument("--scratch", type=Path)
    flags, _ = parser.parse_known_args()
    die_with(flags.lifeline_fd, flags.scratch)
    asyncio.run(_serve(flags.listen, tuple(Role(role) for role in flags.roles.split(","))))


if __name__ == "__main__":
    main()
