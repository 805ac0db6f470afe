"""Has each worker load its part of a model, and says which part it was where that fails.

Knows the checkpoints and the workers' services; starts and ends nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from coordinator.cluster.placement import StagePlan
from services.errors import FailedPrecondition, FlashsplitError
from services.messages.description import FeatureTransport, HeadPlace, Role, WorkerDescription
from services.messages.loading import FeatureCapture, LoadDraft, LoadProgress, LoadTarget
from services.rpc.peers import Peers


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """What to load. Paths are absolute; a remote worker may hold its own copies (`--model`, `--draft` there)."""

    model: Path
    draft: Path | None
    dtype: str | None
    head_place: HeadPlace = HeadPlace.LOADED
    transport: FeatureTransport = FeatureTransport.SUM
    kv_dtype: str | None = None
    """Of the target's keys and values; None for that of the weights."""


class LoadReporter:
    """Hears of loading: one bar a worker. The default keeps silent."""

    def progress(self, worker: str, loaded_bytes: int, total_bytes: int) -> None:
        """`worker` is e.g. "stage 0 (cpu)"."""


class Loader:
    """Raises what the workers' services raise, the part's name before it."""

    def __init__(self, peers: Peers, checkpoints: Checkpoints, reporter: LoadReporter) -> None:
        self._peers, self._checkpoints, self._reporter = peers, checkpoints, reporter

    async def stage(self, index: int, plan: StagePlan, address: str) -> WorkerDescription:
        """Also raises FailedPrecondition for a worker without the role, or that keeps keys and values otherwise."""
        checkpoints = self._checkpoints
        worker = await self._peers.worker(address)
        try:
            before = await worker.describe()
        except FlashsplitError as error:
            raise named(error, f"stage {index} ({plan.place})") from error
        name = f"stage {index} ({before.device} on {before.host}, {plan.place})"
        if Role.TARGET not in before.roles:
            raise FailedPrecondition(
                f"{name} does not offer the role target: start that worker with --roles target", address=address
            )
        capture = None
        if checkpoints.draft is not None:
            capture = FeatureCapture(str(checkpoints.draft), checkpoints.transport)
        part = LoadTarget(str(checkpoints.model), plan.layers, checkpoints.dtype, capture, checkpoints.kv_dtype)
        try:
            loaded = await worker.load(part, self._bar(f"stage {index} ({before.device})"))
        except FlashsplitError as error:
            raise named(error, name) from error
        if loaded.target is not None and loaded.target.kv_dtype != checkpoints.kv_dtype:
            # One from before there was such a choice passes over what it doesn't know.
            raise FailedPrecondition(
                f"{name} keeps keys and values in {loaded.target.kv_dtype or loaded.target.dtype}, not in "
                f"{checkpoints.kv_dtype}: it runs flashsplit {loaded.flashsplit_version}; give all hosts the same "
                "release, or leave out --kv-dtype",
                reason="DTYPE_MISMATCH",
                field="kv_dtype",
                address=address,
            )
        return loaded

    async def draft(self, address: str, *, beside: bool) -> WorkerDescription:
        """beside: the worker holds the last stage too, whose head the draft shares."""
        checkpoints = self._checkpoints
        assert checkpoints.draft is not None
        worker = await self._peers.worker(address)
        try:
            device = (await worker.describe()).device
        except FlashsplitError as error:
            raise named(error, f"draft ({address})") from error
        part = LoadDraft(
            draft_path=str(checkpoints.draft),
            model_path=str(checkpoints.model),
            head_place=HeadPlace.SHARED if beside else checkpoints.head_place,
            feature_transport=checkpoints.transport,
            dtype=checkpoints.dtype,
        )
        try:
            return await worker.load(part, self._bar(f"draft ({device})"))
        except FlashsplitError as error:
            raise named(error, f"draft ({device}, {address})") from error

    def _bar(self, name: str) -> Callable[[LoadProgress], None]:
        return lambda progress: self._reporter.progress(name, progress.loaded_bytes, progress.total_bytes)


def named(error: FlashsplitError, name: str) -> FlashsplitError:
    """The error, of something with this name."""
    error.message = f"{name}: {error.message}"
    return error
