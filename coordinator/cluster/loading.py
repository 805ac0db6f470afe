"""Has each worker load its part of a model, and says which part it was where that fails.

It knows the checkpoints and the workers' services, and starts and ends no worker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from coordinator.cluster.placement import StagePlan
from services.errors import FailedPrecondition, FlashsplitError
from services.messages.description import FeatureTransport, HeadPlace, Role, WorkerDescription
from services.messages.holder import LEASE_S, WORKER_HELD
from services.messages.loading import FeatureCapture, LoadDraft, LoadProgress, LoadTarget
from services.model.draft_target import DraftAndTarget
from services.model.quantization import Quantization
from services.rpc.peers import Peers

T = TypeVar("T")

LEASE_SLACK_S = 1.0
"""How much longer than its lease a worker is waited for: it may hear of its holder's end a moment later."""


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """What to load.

    model and draft: absolute paths; a remote worker may have copies elsewhere (`--model`, `--draft` there). dtype: the
    element type of weights; None for the checkpoint's own. head_place: where the hidden rows of a draft with a worker
    of its own become tokens. transport: how features travel to the draft.
    """

    model: Path
    draft: Path | None
    dtype: str | None
    head_place: HeadPlace = HeadPlace.LOADED
    transport: FeatureTransport = FeatureTransport.SUM
    kv_dtype: str | None = None
    """The element type of the target's keys and values; None for that of the weights."""
    quantization: Quantization | None = None
    draft_quantization: Quantization | None = None
    """How the target's and the draft's matrices are packed while they are loaded; None for as the checkpoints have
    them."""
    rope_scaling: str | None = None
    """What takes the place of the scaling of RoPE in the target's configuration, as `parse_rope_scaling` returned it;
    None for its own."""


class LoadReporter:
    """Hears how far each worker's loading is. This one does nothing."""

    def progress(self, worker: str, loaded_bytes: int, total_bytes: int) -> None:
        """Note that a worker, e.g. "stage 0 (cpu)", has read so many bytes of so many."""


class Loader:
    """Has workers load their parts. Raises what the workers' services raise, the part's name before the message."""

    def __init__(
        self, peers: Peers, checkpoints: Checkpoints, reporter: LoadReporter, batch_invariant_rows: int | None = None
    ) -> None:
        """batch_invariant_rows: as of `LoadTarget`."""
        self._peers, self._checkpoints, self._reporter = peers, checkpoints, reporter
        self._batch_invariant_rows = batch_invariant_rows

    @property
    def names(self) -> DraftAndTarget:
        """What the draft and the target are called; only where there is a draft."""
        return DraftAndTarget(str(self._checkpoints.draft), str(self._checkpoints.model))

    async def load_stage(
        self, part_name: str, plan: StagePlan, address: str, *, ends_sessions: bool = False
    ) -> WorkerDescription:
        """Have a worker load a stage, and return its description. part_name: what it is called, like "stage 0".
        ends_sessions: those that are open there on another stage end, and do not refuse it.

        Also raises FailedPrecondition for a worker without the role, and for one that keeps keys and values in another
        type than it was told, packs matrices otherwise, scales RoPE otherwise, or has experts elsewhere.
        """
        checkpoints = self._checkpoints
        worker = await self._peers.worker(address)
        try:
            description = await worker.describe()
        except FlashsplitError as error:
            raise with_name(error, f"{part_name} ({plan.place})") from error
        name = f"{part_name} ({description.device} on {description.host}, {plan.place})"
        if Role.TARGET not in description.roles:
            raise FailedPrecondition(
                f"{name} does not offer the role target: start that worker with --roles target", address=address
            )
        capture = None
        if checkpoints.draft is not None:
            capture = FeatureCapture(str(checkpoints.draft), checkpoints.transport)
        part = LoadTarget(
            str(checkpoints.model),
            plan.layers,
            checkpoints.dtype,
            capture,
            checkpoints.kv_dtype,
            checkpoints.quantization,
            checkpoints.rope_scaling,
            plan.host_experts,
            self._batch_invariant_rows,
        )
        try:
            progress = self._progress(f"{part_name} ({description.device})")
            loaded = await when_free(lambda: worker.load(part, progress, ends_sessions=ends_sessions))
        except FlashsplitError as error:
            raise with_name(error, name) from error
        if loaded.target is not None and loaded.target.kv_dtype != checkpoints.kv_dtype:
            # A release from before there was such a choice ignores it.
            raise FailedPrecondition(
                f"{name} keeps keys and values in {loaded.target.kv_dtype or loaded.target.dtype}, not in "
                f"{checkpoints.kv_dtype}: it runs flashsplit {loaded.flashsplit_version}; give all hosts the same "
                "release, or leave out --kv-dtype",
                reason="DTYPE_MISMATCH",
                field="kv_dtype",
                address=address,
            )
        if loaded.target is not None:
            _check_packed(name, loaded, loaded.target.quantization, checkpoints.quantization, "--quantize", address)
            _check_rope(name, loaded, loaded.target.rope_scaling, checkpoints.rope_scaling, address)
            _check_experts(name, loaded, loaded.target.host_experts, plan.host_experts, address)
        return loaded

    async def load_draft(self, address: str, *, beside: bool) -> WorkerDescription:
        """Have a worker load the draft, and return its description.

        beside: the worker holds the last stage too, whose head the draft shares.
        """
        checkpoints = self._checkpoints
        assert checkpoints.draft is not None
        worker = await self._peers.worker(address)
        try:
            device = (await worker.describe()).device
        except FlashsplitError as error:
            raise with_name(error, f"draft ({address})") from error
        part = LoadDraft(
            draft_path=str(checkpoints.draft),
            model_path=str(checkpoints.model),
            head_place=HeadPlace.SHARED if beside else checkpoints.head_place,
            feature_transport=checkpoints.transport,
            dtype=checkpoints.dtype,
            quantization=checkpoints.draft_quantization,
            target_quantization=checkpoints.quantization,
        )
        name = f"draft ({device}, {address})"
        try:
            loaded = await when_free(lambda: worker.load(part, self._progress(f"draft ({device})")))
        except FlashsplitError as error:
            raise with_name(error, name) from error
        if loaded.draft is not None:
            asked = checkpoints.draft_quantization
            _check_packed(name, loaded, loaded.draft.quantization, asked, "--quantize-draft", address)
        return loaded

    def _progress(self, name: str) -> Callable[[LoadProgress], None]:
        return lambda progress: self._reporter.progress(name, progress.loaded_bytes, progress.total_bytes)


def _check_packed(
    name: str,
    worker: WorkerDescription,
    held: Quantization | None,
    asked: Quantization | None,
    field: str,
    address: str,
) -> None:
    """Raise FailedPrecondition where a worker packs matrices otherwise than it was told: a release from before there
    was such a choice ignores it."""
    if held != asked:
        raise FailedPrecondition(
            f"{name} holds matrices {'as the checkpoint has them' if held is None else f'packed to {held}'}, not "
            f"{'as the checkpoint has them' if asked is None else f'packed to {asked}'}: it runs flashsplit "
            f"{worker.flashsplit_version}; give all hosts the same release, or leave out {field}",
            reason="PACKING_MISMATCH",
            field=field,
            address=address,
        )


def _check_rope(name: str, worker: WorkerDescription, held: str | None, asked: str | None, address: str) -> None:
    """Raise FailedPrecondition where a worker scales RoPE otherwise than it was told, as `_check_packed`."""
    if held != asked:
        raise FailedPrecondition(
            f"{name} scales RoPE as {held or 'the checkpoint says'}, not as {asked or 'the checkpoint says'}: it runs "
            f"flashsplit {worker.flashsplit_version}; give all hosts the same release, or leave out --rope-scaling",
            reason="ROPE_MISMATCH",
            field="--rope-scaling",
            address=address,
        )


def _check_experts(name: str, worker: WorkerDescription, held: float, asked: float, address: str) -> None:
    """Raise FailedPrecondition where a worker has another share of the experts in the host's memory than it was told,
    as `_check_packed`."""
    if held != asked:
        raise FailedPrecondition(
            f"{name} has {held:g} of the experts in the host's memory, not {asked:g}: it runs flashsplit "
            f"{worker.flashsplit_version}; give all hosts the same release, or leave out --expert-devices",
            reason="EXPERTS_MISMATCH",
            field="--expert-devices",
            address=address,
        )


async def when_free(call: Callable[[], Awaitable[T]]) -> T:
    """Return what a call of a worker returns; where another process holds the worker, call again for as long as one
    that has just ended would hold it.

    Errors as those of the call.
    """
    deadline = time.monotonic() + LEASE_S + LEASE_SLACK_S
    while True:
        try:
            return await call()
        except FailedPrecondition as error:
            if error.reason != WORKER_HELD or time.monotonic() > deadline:
                raise
            await asyncio.sleep(LEASE_SLACK_S / 2)


def with_name(error: FlashsplitError, name: str) -> FlashsplitError:
    """Put the name of the part that failed before an error's message, and return the error."""
    error.message = f"{name}: {error.message}"
    return error
