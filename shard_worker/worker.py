"""A worker process put together: its devices, the thread that computes on them, its roles and its store of snapshots.

It implements `services.rpc.worker.WorkerPort`, and knows no role by name: what a role loads, describes and serves is
the role's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import platform
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from typing import Any

import structlog
import torch

from services.errors import FailedPrecondition, FlashsplitError, Unavailable, Unimplemented
from services.freed_memory import return_freed_memory
from services.messages.description import DeviceDescription, Role, WorkerDescription
from services.messages.holder import LEASE_S, ORPHAN_TIMEOUT_S, Holder
from services.messages.loading import LoadPart, LoadProgress
from services.messages.measure import DeviceSpeed, MeasureRequest
from services.messages.snapshots import SnapshotOwner
from services.messages.steps import Location
from services.model.checkpoint_files import read_config
from services.net.security import OPEN, Security
from services.net.server import Registration
from services.processes.device_memory import MEMORY_SHARE
from services.rpc.liveness import DEVICE_HUNG, Life, LivenessServicer
from services.rpc.payload_transport import PayloadTransport
from services.rpc.peers import Peers
from services.rpc.shared_memory import SharedMemoryServicer
from services.rpc.snapshots import SnapshotServicer
from services.rpc.worker import WorkerServicer
from services.same_host.link import SharedLinks
from shard_worker.cache.page_pool import PagePool
from shard_worker.device.devices import Device, describe
from shard_worker.device.executor import DeviceThread
from shard_worker.device.watchdog import LOOK_S, Watchdog
from shard_worker.lease import Lease
from shard_worker.measure.probe import measure
from shard_worker.roles import KEPT_ROWS_BYTES, MAX_ROWS, RoleResources, WorkerRole, make_role
from shard_worker.snapshots.keeper import SnapshotKeeper
from shard_worker.snapshots.store import SnapshotStore
from shard_worker.snapshots.transfer import SnapshotTransfer

PROGRESS_INTERVAL_S = 0.1
"""Between two reports of how far a load is, and two looks at whether sessions have ended."""

ORPHAN_LOOK_S = 0.25
"""Between two looks at whether the process is gone that had the worker load something."""

SESSIONS_GRACE_S = 2.0
"""How long sessions whose client has just gone may take to end, before a load is refused because of them."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What the command line says.

    paths: checkpoint directories on this host, which win over those that a coordinator names; by the name of the field
    that they replace, like `model_path`. threads: for computing on the CPU; None for one a core. snapshot_budget_bytes:
    host memory for the state of prefixes. kept_rows_bytes: host memory for rows that were sent to the next stage, which
    are sent again where that is lost; 0 to keep none. memory_share: of each device's memory, that which weights,
    captured steps and sessions may take together. orphan_timeout_s: how long what is loaded and kept stays once the
    process is gone that had it loaded; math.inf for ever. on_broken: called on the device's thread when a GPU can do
    nothing more in this process.
    """

    devices: tuple[Device, ...]
    roles: tuple[Role, ...]
    paths: Mapping[str, str] = field(default_factory=dict)
    threads: int | None = None
    snapshot_budget_bytes: int = 0
    kept_rows_bytes: int = KEPT_ROWS_BYTES
    memory_share: float = MEMORY_SHARE
    security: Security = OPEN
    transport: PayloadTransport = PayloadTransport.AUTO
    cuda_graphs: bool = True
    orphan_timeout_s: float = ORPHAN_TIMEOUT_S
    on_broken: Callable[[], None] = lambda: None


class Worker:
    """One worker.

    address: where others reach it, known once it listens. roles: what it offers, by name. life: what it tells of itself
    with its heartbeats.
    """

    def __init__(self, config: WorkerConfig, lease: Lease | None = None) -> None:
        """lease: whose the worker is; None for a new one's."""
        self._config = config
        self._thread = DeviceThread(config.threads, config.on_broken)
        self._peers = Peers(
            security=config.security,
            transport=config.transport,
            caller=lambda: f"the worker at {self.address}",
            watcher=self._thread,
        )
        self.life = Life()
        self._lease = lease or Lease()
        self._links = SharedLinks()
        self._sharing = SharedMemoryServicer(self._links, self._thread)
        self._snapshots = SnapshotStore(config.snapshot_budget_bytes)
        self._loading = asyncio.Lock()
        self._host = socket.gethostname()
        self.address = ""
        self._pools = {device: PagePool() for device in config.devices}
        roles: dict[Role, WorkerRole[Any]] = {}
        self.roles: Mapping[Role, WorkerRole[Any]] = roles
        resources = RoleResources(
            thread=self._thread,
            devices=config.devices,
            peers=self._peers,
            location=self._location,
            store=self._snapshots,
            links=self._links,
            paths=config.paths,
            graphs=config.cuda_graphs,
            pools=self._pools,
            roles=roles,
            lease=self._lease,
            kept_rows_bytes=config.kept_rows_bytes,
        )
        for name in config.roles:
            roles[name] = make_role(name, resources)

    def registrations(self) -> list[Registration]:
        """The gRPC services to serve: the worker's own and those of its roles."""
        transfer = SnapshotTransfer(self._snapshots, self._keepers)
        return [
            WorkerServicer(self, self._lease.check).register,
            LivenessServicer(self.life, self._peers, self._lease.listening).register,
            SnapshotServicer(transfer, self._links, self._lease.check).register,
            self._sharing.register,
            *(service for role in self.roles.values() for service in role.registrations()),
        ]

    async def watch(self) -> AsyncIterator[bool]:
        """Watch over the device until cancelled. Yields False when it hangs, and True when it goes on.

        Meanwhile sessions and calls get an error that says so, and so do the heartbeats.
        """
        watchdog = Watchdog(self._thread)
        while True:
            await asyncio.sleep(LOOK_S)
            seconds = watchdog.look()
            if seconds is not None and self.life.trouble is None:
                error = self._hung(seconds)
                log.error("device.hangs", why=error.message)
                self.life.trouble = error
                self._thread.give_up(error)
                for role in self.roles.values():
                    role.fail_sessions(error)
                yield False
            elif seconds is None and self.life.trouble is not None:
                log.warning("device.goes_on")
                self.life.trouble = None
                self._thread.take_back()
                yield True

    async def free_when_orphaned(self) -> None:
        """Free all that is loaded and kept whenever the process that had it loaded has been gone for the configured
        time; until cancelled."""
        while True:
            await asyncio.sleep(ORPHAN_LOOK_S)
            if self._is_orphaned:
                async with self._loading:
                    # Another process may have taken the worker while this waited.
                    if self._is_orphaned:
                        await self._free_all()

    @property
    def _is_orphaned(self) -> bool:
        # A lease that still runs is waited for: its holder may come back within it.
        return self._lease.left_for_s >= max(self._config.orphan_timeout_s, LEASE_S)

    async def _free_all(self) -> None:
        """Free all that is loaded and kept; without effect, to be tried again, where sessions do not end."""
        gone_s = self._lease.left_for_s
        for role in self.roles.values():
            role.fail_sessions(Unavailable("the process is gone that had this worker load what the session is of"))
            if not await _sessions_ended(role):
                return
        freed_bytes = self._snapshots.held_bytes
        for role in self.roles.values():
            if role.snapshot_owner is not None:
                self._snapshots.clear(role.snapshot_owner)

        def unload() -> None:
            for role in self.roles.values():
                role.unload()
            # What was captured refers to itself.
            gc.collect()
            self._leave_pools()
            return_freed_memory()
            if any(device.is_gpu for device in self._config.devices):
                torch.cuda.empty_cache()

        await self._thread.submit_long(unload)
        self._lease.end()
        log.info("worker.orphaned", gone_s=round(gone_s, 1), prefix_bytes=freed_bytes)

    def _hung(self, seconds: float) -> FlashsplitError:
        place = self._location(None)
        return Unavailable(
            f"the device {place.device} of {place.host} hangs: it has not done with its work for {seconds:.0f} s, long "
            "after its time",
            reason=DEVICE_HUNG,
            host=place.host,
            device=place.device,
            address=place.address,
        )

    def _check_device(self) -> None:
        """Raise the error that says that the device hangs, where it does."""
        if (error := self.life.trouble) is not None:
            raise error.copied()

    async def describe(self) -> WorkerDescription:
        self._check_device()
        loaded: dict[str, Any] = {role.description_field: role.describe() for role in self.roles.values()}
        busy_ns, counted_ns = self._thread.busy_time.read()
        return WorkerDescription(
            host=self._host,
            process_id=os.getpid(),
            devices=tuple(self._describe(device) for device in self._config.devices),
            roles=self._config.roles,
            flashsplit_version=metadata.version("flashsplit"),
            torch_version=torch.__version__,
            python_version=platform.python_version(),
            open_sessions=self._open_sessions(),
            max_tensor_bytes=MAX_ROWS * 65536,
            snapshot_bytes=self._snapshots.held_bytes,
            snapshot_budget_bytes=self._snapshots.budget_bytes,
            session_bytes=sum(role.session_bytes for role in self.roles.values()),
            batches=next((role.batch_counts for role in self.roles.values() if role.batch_counts is not None), None),
            busy_ns=busy_ns,
            counted_ns=counted_ns,
            **loaded,
        )

    async def load(
        self, part: LoadPart, holder: Holder | None = None, *, ends_sessions: bool = False
    ) -> AsyncIterator[LoadProgress | WorkerDescription]:
        role = self.roles.get(part.role)
        if role is None:
            raise Unimplemented(
                f"this worker does not offer the role {part.role}: start it with --roles {part.role}",
                reason="ROLE_MISSING",
            )
        part = role.localize(part)
        self._check_device()
        async with self._loading:
            self._lease.check(None if holder is None else holder.holder_id)
            if role.part == part:
                self._lease.take(holder)
                yield await self.describe()
                return
            if ends_sessions:
                role.fail_sessions(Unavailable("this worker gets another part: the chain of the session is lost"))
            if not await _sessions_ended(role):
                raise FailedPrecondition(
                    f"{role.open_sessions} sessions are open on what this worker holds: end them before loading "
                    "something else",
                    reason="SESSIONS_OPEN",
                )
            self._lease.take(holder)
            log.info("load.started", part=asdict(part))
            if role.snapshot_owner is not None:
                # The prefixes in the store belong to the model that goes.
                self._snapshots.clear(role.snapshot_owner)
            with self.life.patience():
                await self._thread.submit_long(self._leave_pools)
                try:
                    async for progress in self._run_load(role, part):
                        yield progress
                    await self._thread.submit_long(role.prepare)
                finally:
                    await self._thread.submit_long(self._take_pools)
            log.info("load.finished")
            yield await self.describe()

    async def measure(self, wanted: MeasureRequest) -> tuple[DeviceSpeed, ...]:
        async with self._loading:
            self._check_idle()
            config = read_config(self._config.paths.get("model_path", wanted.model_path))
            await self._thread.submit_long(self._leave_pools)
            try:
                return tuple(
                    [await self._thread.submit_long(measure, device, config, wanted) for device in self._config.devices]
                )
            finally:
                await self._thread.submit_long(self._take_pools)

    async def echo(self, payload: bytes) -> int:
        self._check_idle()
        return await self._thread.submit(len, payload)

    async def leave(self) -> None:
        """Say that the worker was told to stop, and go on while another one takes its place."""
        await self.life.leave(lambda: self._lease.is_listened_to)

    async def end_links_when_idle(self) -> None:
        """Stop sharing memory and calls of batches with callers once none of them has a session.

        For a worker that takes no new sessions.
        """
        while self._open_sessions():
            await asyncio.sleep(PROGRESS_INTERVAL_S)
        self._sharing.end()
        for role in self.roles.values():
            role.end_links()

    async def close(self) -> None:
        """Leave the peers and the devices. Safe to call twice."""
        await self._peers.close()
        self._thread.shutdown()

    async def _run_load(self, role: WorkerRole[Any], part: LoadPart) -> AsyncIterator[LoadProgress]:
        loop = asyncio.get_running_loop()
        latest = LoadProgress(0, 0)

        def on_progress(loaded: int, total: int) -> None:
            nonlocal latest
            latest = LoadProgress(loaded, total)

        job = self._thread.submit_long(role.load, part, on_progress)
        reported = latest
        deadline = loop.time()
        while not job.done():
            deadline += PROGRESS_INTERVAL_S
            await asyncio.wait([job], timeout=max(0.0, deadline - loop.time()))
            if latest != reported:
                reported = latest
                yield reported
        job.result()

    def _describe(self, device: Device) -> DeviceDescription:
        """Describe a device; memory that was taken for pages counts as free as long as no page has it."""
        described, pool = describe(device), self._pools[device]
        return replace(
            described,
            free_bytes=described.free_bytes + pool.unused_bytes,
            pool_bytes=pool.size_bytes or 0,
            pool_used_bytes=pool.used_bytes if pool.size_bytes else 0,
        )

    def _leave_pools(self) -> None:
        """Have the memory of pages free for weights; runs on the device thread."""
        for pool in self._pools.values():
            pool.leave()

    def _take_pools(self) -> None:
        """Take the memory that is left for pages, where what is loaded has sessions; runs on the device thread."""
        for device, pool in self._pools.items() if self._keepers() else ():
            pool.take_share(self._config.memory_share, device)
            log.info("pages.taken", device=device.name, bytes=pool.size_bytes)

    def _keepers(self) -> Mapping[SnapshotOwner, SnapshotKeeper]:
        keepers = [role.keeper for role in self.roles.values()]
        return {keeper.owner: keeper for keeper in keepers if keeper is not None}

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
        return sum(role.open_sessions for role in self.roles.values())


async def _sessions_ended(role: WorkerRole[Any]) -> bool:
    """Wait up to SESSIONS_GRACE_S for a role's sessions to end. Returns whether none is open."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SESSIONS_GRACE_S):
            while role.open_sessions:
                await asyncio.sleep(PROGRESS_INTERVAL_S)
    return not role.open_sessions
