"""Steps that are ready before they come: those that follow a batch's by themselves, in a chain of several stages.

They are prepared while the device computes the batch, so that it can begin with them as soon as they come from the
stages beside this one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.messages.steps import Forward
from services.messages.tensors import WireTensor
from shard_worker.batches.stepping import BatchRow, SteppingSession
from shard_worker.stage.batch_runner import PlacedStep


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """Steps that follow a batch's. placed: what the stage has placed of them, if anything."""

    rows: list[BatchRow]
    placed: PlacedStep | None = None


class PreparedSteps:
    """The steps that follow each batch; everything here is called on the device thread."""

    def __init__(self) -> None:
        self._batches: dict[SteppingSession, PreparedBatch] = {}
        """Those of each batch in turn, by the first one's session."""

    def __len__(self) -> int:
        """How many batches they follow."""
        return len(self._batches)

    def put(self, before: Iterable[BatchRow], prepared: PreparedBatch | None) -> None:
        """Keep the steps that follow those of a batch, in place of what was prepared for its sessions before."""
        for row in before:
            self._batches.pop(row.session, None)
        if prepared is not None:
            self._batches[prepared.rows[0].session] = prepared

    def take(
        self, steps: Sequence[tuple[SteppingSession, Forward]], activation: WireTensor | None = None
    ) -> PreparedBatch | None:
        """Take out what was prepared for steps that have come, and return it with what came: None where it is not for
        these, all of them and in their order. activation: of all rows, where the steps have none of their own."""
        prepared = self._batches.pop(steps[0][0], None) if steps else None
        if prepared is None or len(prepared.rows) != len(steps):
            return None
        if activation is not None and activation.shape[0] != len(steps):
            return None
        rows: list[BatchRow] = []
        left = activation
        for row, (session, came) in zip(prepared.rows, steps, strict=True):
            hidden = came.activation if activation is None else activation
            if row.session is not session or not session.is_prepared(row.forward, came, hidden):
                return None
            if activation is None:
                left = came.activation
                if left is not None and left.shape[0] != 1:
                    return None
            # The first one is given all rows, which lie side by side, and the others none.
            given = row.given.with_tokens(came.token_ids, left)
            rows.append(BatchRow(row.session, row.forward if hidden is None else came, given, None))
            left = None
        return PreparedBatch(rows, prepared.placed)

    def forget(self, session: SteppingSession) -> None:
        """Drop what was prepared with a session that is closed, and so its memory."""
        for first, prepared in [*self._batches.items()]:
            if any(row.session is session for row in prepared.rows):
                del self._batches[first]
