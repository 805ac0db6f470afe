"""The compress role: holds a small model and reads prompts with it, one layer at a time between other work."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass

from services.errors import FailedPrecondition
from services.messages.compression import Compressed, CompressProgress, CompressRequest
from services.messages.description import DrafterDescription
from services.messages.loading import LoadDrafter
from services.net.server import Registration
from services.rpc.compress import CompressServicer
from shard_worker.device.dtypes import dtype_to_name
from shard_worker.pflash.drafter import Drafter, check_prompt, load_drafter
from shard_worker.pflash.selection import MIN_TOKENS, kept_ranges, select_chunks
from shard_worker.roles import RoleResources, WorkerRole
from shard_worker.weights.opening import open_checkpoint


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """A drafter, and the part that it was loaded by."""

    part: LoadDrafter
    drafter: Drafter


class CompressRole(WorkerRole[LoadDrafter]):
    """Implements `services.rpc.compress.CompressPort`."""

    description_field = "drafter"

    def __init__(self, resources: RoleResources) -> None:
        super().__init__(resources)
        self._thread, self._device = resources.thread, resources.devices[0]
        self.loaded: LoadedDrafter | None = None
        self._running = 0

    @property
    def part(self) -> LoadDrafter | None:
        return None if self.loaded is None else self.loaded.part

    @property
    def open_sessions(self) -> int:
        return self._running

    def registrations(self) -> list[Registration]:
        return [CompressServicer(self, self.resources.lease.check).register]

    def load(self, part: LoadDrafter, on_progress: Callable[[int, int], None]) -> None:
        """Load a drafter. Raises what `load_drafter` raises."""
        self.loaded = None
        checkpoint = open_checkpoint(part.drafter_path, "--prefill-drafter")
        self.loaded = LoadedDrafter(part, load_drafter(checkpoint, self._device, part.dtype, on_progress))

    def unload(self) -> None:
        self.loaded = None

    def describe(self) -> DrafterDescription | None:
        if self.loaded is None:
            return None
        drafter = self.loaded.drafter
        return DrafterDescription(
            fingerprint=drafter.fingerprint,
            vocab_size=drafter.config.vocab_size,
            num_layers=drafter.config.num_layers,
            max_position=drafter.config.max_position,
            dtype=dtype_to_name(drafter.segment.dtype),
            weight_bytes=drafter.weight_bytes,
        )

    async def compress(self, request: CompressRequest) -> AsyncGenerator[CompressProgress | Compressed]:
        """Read a prompt: yield the layers done after each one, and at last the token ranges to keep.

        Raises FailedPrecondition when the drafter of the request is not loaded, and what `check_prompt` raises.
        """
        loaded = self.loaded
        if loaded is None:
            raise FailedPrecondition("no drafter is loaded on this worker", reason="NOT_LOADED")
        drafter = loaded.drafter
        if drafter.fingerprint != request.fingerprint:
            raise FailedPrecondition(
                f"this worker holds drafter {drafter.fingerprint}, the request is for {request.fingerprint}",
                reason="FINGERPRINT_MISMATCH",
                field="fingerprint",
            )
        check_prompt(drafter, request.token_ids)
        length = len(request.token_ids)
        if length < MIN_TOKENS:
            yield Compressed(((0, length),), 0)
            return
        self._running += 1
        try:
            forward_ns = 0
            scoring = drafter.score(request.token_ids)
            while True:
                result, elapsed_ns = await self._thread.submit(_timed_step, scoring)
                forward_ns += elapsed_ns
                if isinstance(result, list):
                    break
                yield CompressProgress(result, drafter.config.num_layers)
            chunks = select_chunks(result, request.token_ids, request.keep_ratio)
            yield Compressed(tuple(kept_ranges(chunks, length)), forward_ns)
        finally:
            self._running -= 1


def _timed_step(scoring: Iterator[int | list[float]]) -> tuple[int | list[float], int]:
    """Compute one more layer of `Drafter.score`. Returns what it yields, and the nanoseconds that it took."""
    started_ns = time.monotonic_ns()
    return next(scoring), time.monotonic_ns() - started_ns


def make_role(resources: RoleResources) -> CompressRole:
    """Make the role; the worker finds this function by the module's name."""
    return CompressRole(resources)
