"""A worker process's parts put together: devices, their thread, roles, and what is loaded.

Implements `services.rpc.worker.WorkerPort`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from importlib import metadata

import structlog
import torch

from services.errors import FailedPrecondition, InvalidArgument, Unimplemented
from services.messages.description import FeatureTransport, HeadPlace, Role, WorkerDescription
from services.messages.measure import DeviceSpeed, MeasureRequest
from services.messages.snapshots import SnapshotOwner
from services.messages.steps import Location
from services.model.checkpoint_files import read_config
from services.net.security import OPEN, Security
from services.net.server import Registration
from services.rpc.compress import CompressServicer
from services.rpc.draft import DraftServicer
from services.rpc.payload_transport import PayloadTransport
from services.rpc.peers import Peers
from services.rpc.shared_memory import SharedMemoryServicer
from services.rpc.snapshots import SnapshotServicer
from services.rpc.stage import StageServicer
from services.rpc.worker import LoadDrafter, LoadProgress, LoadTarget, Part, WorkerServicer
from services.same_host.link import SharedLinks
from shard_worker.device.devices import Device, describe
from shard_worker.device.executor import DeviceThread
from shard_worker.measure.probe import measure
from shard_worker.roles.compress import CompressRole
from shard_worker.roles.draft import DraftRole
from shard_worker.roles.target import MAX_ROWS, TargetRole
from shard_worker.snapshots.keeper import SnapshotKeeper
from shard_worker.snapshots.store import SnapshotStore
from shard_worker.snapshots.transfer import SnapshotTransfer

PROGRESS_INTERVAL_S = 0.1

SESSIONS_GRACE_S = 2.0
"""For sessions whose client has just gone, before a load is refused because of them."""

AnyRole = TargetRole | DraftRole | CompressRole

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What the command line says. The paths in it win over those that a coordinator names."""

    devices: tuple[Device, ...]
    roles: tuple[Role, ...]
    model_path: str | None = None
    draft_path: str | None = None
    drafter_path: str | None = None
    threads: int | None = None
    snapshot_budget_bytes: int = 0
    security: Security = OPEN
    transport: PayloadTransport = PayloadTransport.AUTO
    cuda_graphs: bool = True
    on_broken: Callable[[], None] = lambda: None
    """Called on the device's thread when a GPU can do nothing more in this process."""


class Worker:
    """One worker. `address` is where peers reach it, known once it listens."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._thread = DeviceThread(config.threads, config.on_broken)
        self._peers = Peers(
            security=config.security,
            transport=config.transport,
            caller=lambda: f"the worker at {self.address}",
            watcher=self._thread,
        )
        self._links = SharedLinks()
        self._sharing = SharedMemoryServicer(self._links, self._thread)
        self._snapshots = SnapshotStore(config.snapshot_budget_bytes)
        self._loading = asyncio.Lock()
        self.address = ""
        host = socket.gethostname()
        self._host = host
        self._draft: DraftRole | None = None
        self._target: TargetRole | None = None
        self._compress: CompressRole | None = None
        if Role.COMPRESS in config.roles:
            self._compress = CompressRole(self._thread, config.devices[0])
        if Role.DRAFT in config.roles:
            # Beside a stage the draft sits where the head is: on the last device.
            self._draft = DraftRole(
                self._thread, config.devices[-1], self._location, self._snapshots, graphs=config.cuda_graphs
            )
        if Role.TARGET in config.roles:
            self._target = TargetRole(
                self._thread,
                config.devices,
                self._peers,
                self._location,
                self._draft,
                self._snapshots,
                graphs=config.cuda_graphs,
            )

    def registrations(self) -> list[Registration]:
        """What to serve."""
        transfer = SnapshotTransfer(self._snapshots, self._keepers)
        services: list[Registration] = [
            WorkerServicer(self).register,
            SnapshotServicer(transfer, self._links).register,
            self._sharing.register,
        ]
        if self._target is not None:
            services.append(StageServicer(self._target, self._links).register)
        if self._draft is not None:
            services.append(DraftServicer(self._draft, self._links).register)
        if self._compress is not None:
            services.append(CompressServicer(self._compress).register)
        return services

    async def describe(self) -> WorkerDescription:
        return WorkerDescription(
            host=self._host,
            process_id=os.getpid(),
            devices=tuple(describe(device) for device in self._config.devices),
            roles=self._config.roles,
            flashsplit_version=metadata.version("flashsplit"),
            torch_version=torch.__version__,
            python_version=platform.python_version(),
            target=self._target.describe() if self._target is not None else None,
            draft=self._draft.describe() if self._draft is not None else None,
            open_sessions=self._open_sessions(),
            max_tensor_bytes=MAX_ROWS * 65536,
            snapshot_bytes=self._snapshots.held_bytes,
            snapshot_budget_bytes=self._snapshots.budget_bytes,
            drafter=self._compress.describe() if self._compress is not None else None,
            session_bytes=sum(role.session_bytes for role in (self._target, self._draft) if role is not None),
        )

    async def load(self, part: Part) -> AsyncIterator[LoadProgress | WorkerDescription]:
        role, part = self._role_for(part)
        async with self._loading:
            if role.loaded is not None and role.loaded.part == part:
                yield await self.describe()
                return
            if not await _sessions_ended(role):
                raise FailedPrecondition(
                    f"{role.open_sessions} sessions are open on what this worker holds: end them before loading "
                    "something else",
                    reason="SESSIONS_OPEN",
                )
            log.info("load.started", part=str(part))
            if not isinstance(role, CompressRole):
                # What is kept belongs to the model that goes.
                self._snapshots.clear(SnapshotOwner.STAGE if role is self._target else SnapshotOwner.DRAFT)
            async for progress in self._run_load(role, part):
                yield progress
            if self._target is not None and not isinstance(role, CompressRole):
                await self._thread.submit(self._target.prepare)
            log.info("load.finished")
            yield await self.describe()

    async def measure(self, wanted: MeasureRequest) -> tuple[DeviceSpeed, ...]:
        async with self._loading:
            self._check_idle()
            config = read_config(self._config.model_path or wanted.model_path)
            return tuple(
                [await self._thread.submit(measure, device, config, wanted) for device in self._config.devices]
            )

    async def echo(self, payload: bytes) -> int:
        self._check_idle()
        return await self._thread.submit(len, payload)

    async def end_links_when_idle(self) -> None:
        """Stop sharing memory with callers once none of them has a session: for a worker that takes no new ones."""
        while self._open_sessions():
            await asyncio.sleep(PROGRESS_INTERVAL_S)
        self._sharing.end()

    async def close(self) -> None:
        """Leave the peers and the devices. Safe to call twice."""
        await self._peers.close()
        self._thread.shutdown()

    async def _run_load(self, role: AnyRole, part: Part) -> AsyncIterator[LoadProgress]:
        loop = asyncio.get_running_loop()
        latest = LoadProgress(0, 0)

        def on_progress(loaded: int, total: int) -> None:
            nonlocal latest
            latest = LoadProgress(loaded, total)

        job = self._thread.submit(role.load, part, on_progress)
        reported = latest
        deadline = loop.time()
        while not job.done():
            deadline += PROGRESS_INTERVAL_S
            await asyncio.wait([job], timeout=max(0.0, deadline - loop.time()))
            if latest != reported:
                reported = latest
                yield reported
        job.result()

    def _role_for(self, part: Part) -> tuple[AnyRole, Part]:
        config = self._config
        if isinstance(part, LoadDrafter):
            if self._compress is None:
                raise _role_missing(Role.COMPRESS)
            return self._compress, replace(part, drafter_path=config.drafter_path or part.drafter_path)
        if isinstance(part, LoadTarget):
            if self._target is None:
                raise _role_missing(Role.TARGET)
            capture = part.capture
            if capture is not None:
                capture = replace(capture, draft_path=config.draft_path or capture.draft_path)
                if capture.transport is FeatureTransport.SUM and not capture.draft_path:
                    raise InvalidArgument("draft_path is missing: give this worker --draft", field="--draft")
            model_path = config.model_path or part.model_path
            return self._target, replace(part, model_path=model_path, capture=capture)
        if self._draft is None:
            raise _role_missing(Role.DRAFT)
        if part.head_place is HeadPlace.SHARED and self._target is None:
            raise FailedPrecondition(
                "this worker has no stage beside the draft: use head place loaded or projected",
                field="head_place",
            )
        return self._draft, replace(
            part,
            draft_path=config.draft_path or part.draft_path,
            model_path=config.model_path or part.model_path,
        )

    def _keepers(self) -> Mapping[SnapshotOwner, SnapshotKeeper]:
        roles = {SnapshotOwner.STAGE: self._target, SnapshotOwner.DRAFT: self._draft}
        return {
            owner: role.loaded.keeper for owner, role in roles.items() if role is not None and role.loaded is not None
        }

    def _location(self, stage: int | None) -> Location:
        device = "+".join(device.name for device in self._config.devices)
        return Location(stage, self._host, device, self.address)

    def _check_idle(self) -> None:
        if self._open_sessions():
            raise FailedPrecondition(
                f"{self._open_sessions()} sessions are open on this worker: measuring would make them wait and the "
                "figures wrong; measure when none is",
                reason="SESSIONS_OPEN",
            )

    def _open_sessions(self) -> int:
        return sum(role.open_sessions for role in (self._target, self._draft, self._compress) if role is not None)


async def _sessions_ended(role: AnyRole) -> bool:
    """Whether no session is open; those whose client has just gone have a moment to end."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SESSIONS_GRACE_S):
            while role.open_sessions:
                await asyncio.sleep(PROGRESS_INTERVAL_S)
    return not role.open_sessions


def _role_missing(role: Role) -> Unimplemented:
    return Unimplemented(
        f"this worker does not offer the role {role}: start it with --roles {role}",
        reason="ROLE_MISSING",
    )
