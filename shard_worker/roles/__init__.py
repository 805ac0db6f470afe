"""What a worker can be, a module or a folder each, named after the role and found by that name.

A role module has `make_role(resources) -> WorkerRole`. A new role is one new module here, beside its service in
`services.rpc` and its name in `services.messages.description.Role`; the worker itself knows no role.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Generic, TypeVar

from services.errors import FlashsplitError
from services.messages.description import BatchCounts, Role
from services.messages.snapshots import SnapshotOwner
from services.messages.steps import Location
from services.net.server import Registration
from services.rpc.peers import Peers
from services.same_host.link import NO_LINKS, SharedLinks
from shard_worker.cache.page_pool import PagePool
from shard_worker.device.devices import Device
from shard_worker.device.executor import DeviceThread
from shard_worker.lease import Lease
from shard_worker.snapshots.keeper import SnapshotKeeper
from shard_worker.snapshots.store import SnapshotStore

MAX_ROWS = 8192
"""Most rows of a tensor that a role takes: a step's, or features for a draft."""

KEPT_ROWS_BYTES = 64 << 20
"""What may be kept by default of rows that were sent to the next stage."""

PartT = TypeVar("PartT", bound=Any)


@dataclass(frozen=True, slots=True)
class RoleResources:
    """What a worker lends to its roles.

    thread: the one that computes. devices: all of the worker's, at least one. location: where the worker stands, for a
    stage's number or for None. paths: checkpoint directories on this host by the field of a load part that they
    replace, like `model_path`. graphs: whether steps may run as CUDA graphs. pools: where each
    device's pages come from. roles: the worker's roles by name, each other's neighbours; complete once all of them are
    made. lease: whose the worker is. kept_rows_bytes: what may be kept of rows that were sent to the next stage, to be
    sent again where that is lost; 0 to keep none.
    """

    thread: DeviceThread
    devices: tuple[Device, ...]
    peers: Peers
    location: Callable[[int | None], Location]
    store: SnapshotStore
    links: SharedLinks = NO_LINKS
    paths: Mapping[str, str] = field(default_factory=dict)
    graphs: bool = True
    pools: Mapping[Device, PagePool] = field(default_factory=dict)
    roles: Mapping[Role, WorkerRole[Any]] = field(default_factory=dict)
    lease: Lease = field(default_factory=Lease)
    kept_rows_bytes: int = KEPT_ROWS_BYTES


class WorkerRole(ABC, Generic[PartT]):
    """One role of one worker: what it holds, and the services that it offers. PartT: the load part that it takes."""

    description_field: ClassVar[str]
    """The field of `WorkerDescription` that `describe` fills."""

    snapshot_owner: ClassVar[SnapshotOwner | None] = None
    """Whose prefixes leave the store when another part is loaded."""

    def __init__(self, resources: RoleResources) -> None:
        self.resources = resources

    @property
    @abstractmethod
    def part(self) -> PartT | None:
        """What is loaded now, as `load` was asked for it."""

    @property
    @abstractmethod
    def open_sessions(self) -> int:
        """Sessions, or calls, that use what is loaded."""

    @property
    def session_bytes(self) -> int:
        """Memory that open sessions take by now."""
        return 0

    @property
    def batch_counts(self) -> BatchCounts | None:
        """What steps it has computed; None where it computes none."""
        return None

    @property
    def keeper(self) -> SnapshotKeeper | None:
        """The way of what is loaded to the store of prefixes; None without one."""
        return None

    @abstractmethod
    def registrations(self) -> list[Registration]:
        """The gRPC services that serve this role."""

    def end_links(self) -> None:
        """End calls that last beyond the sessions for which they were begun; none is open any more."""

    @abstractmethod
    def describe(self) -> object | None:
        """What is loaded, for `WorkerDescription`; None when nothing is."""

    def localize(self, part: PartT) -> PartT:
        """The part with this host's own paths in place of those that a coordinator names.

        Raises InvalidArgument or FailedPrecondition when this worker cannot load it.
        """
        paths = self.resources.paths
        return replace(part, **{item.name: paths[item.name] for item in fields(part) if item.name in paths})

    def fail_sessions(self, error: FlashsplitError) -> None:
        """End the sessions that wait for the device in another way than by a job: it hangs, as the error says."""
        return None

    @abstractmethod
    def load(self, part: PartT, on_progress: Callable[[int, int], None]) -> None:
        """Load a part, in place of what is loaded; runs on the device thread.

        on_progress: called with bytes read so far and in all. A load that fails leaves nothing loaded.
        """

    @abstractmethod
    def unload(self) -> None:
        """Hold nothing any more, where no session is open; runs on the device thread."""

    def prepare(self) -> None:
        """Compile and capture what the first step would wait for, after a load; runs on the device thread."""
        return None


def make_role(name: Role, resources: RoleResources) -> WorkerRole[Any]:
    """Make the role of this name."""
    role: WorkerRole[Any] = importlib.import_module(f"{__name__}.{name}").make_role(resources)
    return role
