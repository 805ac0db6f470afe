"""The draft's next block, issued together with the step that it follows, before the host knows the step's outcome.

Which rows count is decided on the device. The host waits twice, for few numbers: for the outcome, with which it
answers, and later for the draft tokens. It is only for greedy sessions, and for a draft beside the last stage.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import torch

from shard_worker.cache.segment_caches import SegmentCaches
from shard_worker.drafting.drafters import DraftRunner, DraftState
from shard_worker.model.kernels.accept import STOPS, accept
from shard_worker.stage.step_runner import ROW_COUNTS, StepRunner


class Ahead:
    """Issues the blocks of one session. It owns the page-locked memory that outcomes and draft tokens arrive in."""

    def __init__(
        self,
        step: StepRunner,
        draft: DraftRunner,
        state: DraftState,
        embedding: torch.Tensor,
        stop_tokens: AbstractSet[int],
    ) -> None:
        """embedding: the target's, [vocab, hidden], on the draft's device. stop_tokens: at most STOPS."""
        self._step, self._draft, self._state, self._embedding = step, draft, state, embedding
        device = embedding.device
        self._stops = torch.tensor([*stop_tokens, *[-1] * STOPS][:STOPS], device=device)
        pinned = device.type != "cpu"
        self._outcome = torch.zeros(1 + ROW_COUNTS[-1], dtype=torch.int64, device=device)
        self._outcome_host, self._proposed_host = (
            torch.zeros(1 + ROW_COUNTS[-1], dtype=torch.int64, pin_memory=pinned) for _ in range(2)
        )
        self._decided, self._ready = (_event(device) for _ in range(2))
        self._proposing = 0

    @property
    def issued(self) -> bool:
        """Whether draft tokens are on their way."""
        return self._proposing > 0

    def takes(self, rows: int) -> bool:
        """Return whether a block can follow a step of so many rows."""
        return self._draft.takes(self._state, rows)

    def issue(
        self, caches: SegmentCaches, argmax: torch.Tensor, total: torch.Tensor, draft_tokens: int, *, uncommitted: bool
    ) -> list[int]:
        """Queue deciding which rows of the step just queued count, and the draft's block behind them.

        Returns the tokens that the step produced, for which it waits. caches: the stage's, whose recurrent layers
        advance where the step's rows are uncommitted. argmax: the most probable token of each row, int64 [n]. total:
        float32 [n, hidden], the sum of the rows' features. draft_tokens: how many are to be proposed.
        """
        with self._draft.device.current():
            return self._issue(caches, argmax, total, draft_tokens, uncommitted)

    def _issue(
        self, caches: SegmentCaches, argmax: torch.Tensor, total: torch.Tensor, draft_tokens: int, uncommitted: bool
    ) -> list[int]:
        rows = len(argmax)
        tile_rows = next(count for count in ROW_COUNTS if count >= rows)
        draft, state = self._draft, self._state
        draft.send_append_parameters(state, rows)
        draft.send_block_parameters(state, draft_tokens, behind=rows)
        outcome = self._outcome[: 1 + tile_rows]
        accept(
            self._step.parameters,
            argmax,
            self._stops,
            outcome,
            draft.appending,
            draft.proposing,
            self._embedding,
            draft.known_row,
        )
        self._outcome_host[: 1 + tile_rows].copy_(outcome, non_blocking=True)
        _record(self._decided)
        draft.launch_append(total)
        proposed = draft.launch_block()
        self._proposed_host[: len(proposed)].copy_(proposed, non_blocking=True)
        _record(self._ready)
        # Behind the draft tokens, which somebody waits for; before the next step, which needs it.
        if uncommitted:
            self._step.commit(caches, outcome)
        self._proposing = draft_tokens
        _wait(self._decided)
        count = int(self._outcome_host[0])
        state.length += count
        return self._outcome_host[1 : 1 + count].tolist()

    def draft_tokens(self) -> tuple[int, ...]:
        """Wait for the draft tokens that `issue` asked for, and return them."""
        _wait(self._ready)
        count, self._proposing = self._proposing, 0
        return tuple(self._proposed_host[1 : 1 + count].tolist())


def _event(device: torch.device) -> torch.cuda.Event | None:
    return torch.cuda.Event() if device.type != "cpu" else None  # type: ignore[no-untyped-call]


def _record(event: torch.cuda.Event | None) -> None:
    if event is not None:
        event.record()


def _wait(event: torch.cuda.Event | None) -> None:
    if event is not None:
        event.synchronize()
