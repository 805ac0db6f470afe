"""The way of steps that were computed together, between two hosts: one gRPC call for all their sessions.

Device threads hand over what they send and take what comes; the event loop reads and writes the call. The call's own
frames, by which it begins, are none of this module's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from services.messages.batch_frames import BatchAnswer, PreparedFrame, StepBatch
from services.messages.steps import Forward
from services.streams.batch_members import BatchMembers, MemberT
from services.streams.step_lane import StepLane


class BatchStream(BatchMembers[MemberT]):
    """One end of the call. Use `close` when it is over."""

    def __init__(self) -> None:
        """Must be called on the event loop."""
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._outgoing: asyncio.Queue[StepBatch | Sequence[BatchAnswer] | None] = asyncio.Queue()
        self.closed = False

    def send_steps(self, batch: StepBatch, prepared: PreparedFrame | None = None) -> bool:
        # It is written when the next step may have overwritten what this one left.
        own = bytes(memoryview(batch.activation.data).cast("B"))
        return self._send(replace(batch, activation=replace(batch.activation, data=own)))

    def send_answers(self, answers: Sequence[BatchAnswer]) -> bool:
        return self._send(answers)

    async def outgoing(self) -> AsyncIterator[StepBatch | Sequence[BatchAnswer]]:
        """Yield what is to be written, until the stream is closed."""
        while (frame := await self._outgoing.get()) is not None:
            yield frame

    def close(self) -> None:
        """Take and send nothing any more. Safe to call twice."""
        self.closed = True
        self._outgoing.put_nowait(None)

    def _send(self, frame: StepBatch | Sequence[BatchAnswer]) -> bool:
        if self.closed:
            return False
        # The loop may be over, and with it who would want to know.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._outgoing.put_nowait, frame)
        return True


class TogetherOnly(StepLane):
    """The lane of a session whose steps, or their answers, go past its stream only together with those of others."""

    def __init__(self, stream_id: int, batches: BatchMembers[Any]) -> None:
        self.stream_id, self.batches = stream_id, batches

    def expect(self, *_: object, **__: object) -> None:
        """Expect nothing."""

    def prepare(self, forward: Forward) -> None:
        """Prepare nothing."""

    def listen(self, *_: object, **__: object) -> None:
        """Hear of nothing."""

    def send(self, *_: object, **__: object) -> bool:
        """Return that the step has to go another way."""
        return False

    def close(self) -> None:
        """Take no more steps. Safe to call twice."""
        if self.batches is not None:
            self.batches.leave(self.stream_id)
