"""What a session uses of the worker on which it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.messages.steps import StageIdentity
from shard_worker.batches.step_batches import StepBatches
from shard_worker.device.executor import DeviceThread
from shard_worker.drafting.draft_batches import DraftBatches
from shard_worker.session.batch_edges import BatchEdges
from shard_worker.session.device_events import DeviceEvents
from shard_worker.session.resting import RestingSessions
from shard_worker.snapshots.keeper import SnapshotKeeper
from shard_worker.stage.stage import Stage

if TYPE_CHECKING:
    from shard_worker.session.session import TargetSession


@dataclass(frozen=True, slots=True)
class SessionHost:
    """What a session uses of the worker on which it runs.

    thread: the thread that owns the devices. keeper: keeps the prefixes of the stage's sessions. identity: how the
    stage presents itself to the coordinator. sessions: the open sessions, to which each adds itself until it closes.
    batches: computes steps of those sessions that wait at the same time. drafting: does what their drafts beside the
    stage have to do. edges: what they exchange with the stages beside it together. events: what the device thread
    tells the event loop of them. resting: where their memory is left when a stage behind this one is lost.
    """

    thread: DeviceThread
    stage: Stage
    keeper: SnapshotKeeper
    identity: StageIdentity
    sessions: set[TargetSession]
    batches: StepBatches
    drafting: DraftBatches
    edges: BatchEdges
    events: DeviceEvents
    resting: RestingSessions
