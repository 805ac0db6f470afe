"""The draft's next block, issued together with the step that it follows, before the host knows the step's outcome.

Which rows count is decided on the device. The host waits twice, for few numbers: for the outcome, with which it
answers, and later for the guesses. Only for tokens that are the likeliest, and a draft beside the last stage.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import torch

from shard_worker.cache.segment_caches import SegmentCaches
from shard_worker.drafting.drafters import DraftRunner, DraftState
from shard_worker.model.kernels.accept import STOPS, accept
from shard_worker.stage.step_runner import ROW_COUNTS, StepRunner


class Ahead:
    """One session's. embedding: the target's, on the same device as all the rest."""

    def __init__(
        self,
        step: StepRunner,
        draft: DraftRunner,
        state: DraftState,
        embedding: torch.Tensor,
        stop_tokens: AbstractSet[int],
    ) -> None:
        self._step, self._draft, self._state, self._embedding = step, draft, state, embedding
        device = embedding.device
        self._stops = torch.tensor([*stop_tokens, *[-1] * STOPS][:STOPS], device=device)
        pinned = device.type != "cpu"
        self._outcome = torch.zeros(1 + ROW_COUNTS[-1], dtype=torch.int64, device=device)
        self._told, self._guessed = (
            torch.zeros(1 + ROW_COUNTS[-1], dtype=torch.int64, pin_memory=pinned) for _ in range(2)
        )
        self._known, self._ready = (_event(device) for _ in range(2))
        self._asked = 0

    @property
    def issued(self) -> bool:
        """Whether guesses are on their way."""
        return self._asked > 0

    def takes(self, rows: int) -> bool:
        """Whether a block can follow a step of so many rows."""
        return self._draft.takes(self._state, rows)

    def issue(
        self, caches: SegmentCaches, argmax: torch.Tensor, total: torch.Tensor, draft_tokens: int, *, uncommitted: bool
    ) -> list[int]:
        """Behind a step just queued: count its rows, and guess. Returns the tokens that the step produced.

        likeliest: of its rows, [n]. total: float32 [n, hidden], the sum of the rows' features. caches: the stage's,
        whose recurrent layers advance where the step's rows were deferred.
        """
        with self._draft.device.current():
            return self._issue(caches, argmax, total, draft_tokens, uncommitted)

    def _issue(
        self, caches: SegmentCaches, argmax: torch.Tensor, total: torch.Tensor, draft_tokens: int, uncommitted: bool
    ) -> list[int]:
        rows = len(argmax)
        made = next(count for count in ROW_COUNTS if count >= rows)
        draft, state = self._draft, self._state
        draft.send_append_parameters(state, rows)
        draft.send_block_parameters(state, draft_tokens, behind=rows)
        outcome = self._outcome[: 1 + made]
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
        self._told[: 1 + made].copy_(outcome, non_blocking=True)
        _record(self._known)
        draft.launch_append(total)
        guessed = draft.launch_block()
        self._guessed[: len(guessed)].copy_(guessed, non_blocking=True)
        _record(self._ready)
        # Behind the guesses, which somebody waits for; before the next step, which needs it.
        if uncommitted:
            self._step.commit(caches, outcome)
        self._asked = draft_tokens
        _wait(self._known)
        count = int(self._told[0])
        state.length += count
        return self._told[1 : 1 + count].tolist()

    def draft_tokens(self) -> tuple[int, ...]:
        """Wait for what `issue` asked for."""
        _wait(self._ready)
        asked, self._asked = self._asked, 0
        return tuple(self._guessed[1 : 1 + asked].tolist())


def _event(device: torch.device) -> torch.cuda.Event | None:
    return torch.cuda.Event() if device.type != "cpu" else None  # type: ignore[no-untyped-call]


def _record(event: torch.cuda.Event | None) -> None:
    if event is not None:
        event.record()


def _wait(event: torch.cuda.Event | None) -> None:
    if event is not None:
        event.synchronize()
