"""A draft with what turns its hidden rows into tokens, for sessions of this worker and of others.

It checks that features and proposals follow the context, and decides between kernels and plain torch, which give the
same but for rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.errors import FailedPrecondition
from shard_worker.drafting.draft_head import DraftHead
from shard_worker.drafting.drafters import Draft, DraftRunner, DraftState
from shard_worker.drafting.embedding_rows import EmbeddingRows
from shard_worker.model.features import Features
from shard_worker.model.kernel_support import can_read
from shard_worker.weights.weight import Weight


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What to propose behind: the known token and its position.

    step: the target's step that the draft tokens are for. tokens: how many draft tokens are asked for.
    """

    step: int
    position: int
    token_id: int
    tokens: int


@dataclass(frozen=True, slots=True)
class CommittedRows:
    """Rows of one session that count from now on.

    state: the session's context. start: the first one's position. count: how many they are.
    """

    state: DraftState
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class DraftEngine:
    """A draft and the target's parts that it works with.

    embedding: the target's; None where another worker has it. head: the target's lm_head, or the draft's own; None
    where another worker has it. runner, batch_runner: the draft's kernels for one session and for several; None where
    plain torch serves.
    """

    draft: Draft
    embedding: EmbeddingRows | None = None
    head: DraftHead | None = None
    runner: DraftRunner | None = None
    batch_runner: DraftRunner | None = None

    def prepare(self, matrix: torch.Tensor | None = None) -> None:
        """Compile and capture what the first proposal would have to wait for.

        matrix: the target's embedding [vocab, hidden], where it is in a device's memory.
        """
        beside = matrix is not None and matrix.device == self.draft.device.torch_device
        for runner in (self.runner, self.batch_runner):
            if runner is not None and self.embedding is not None:
                [mask_row] = self.embedding((self.draft.config.mask_token_id,))
                runner.prepare(mask_row, matrix if beside else None)

    def append(self, state: DraftState, features: Features, start: int) -> None:
        """Take the features of a session's committed rows from position `start` on, as `append_together`."""
        self.append_together([CommittedRows(state, start, features.count)], features)

    def append_together(self, rows: Sequence[CommittedRows], features: Features) -> None:
        """Take the features of several sessions' committed rows, one session's behind the other's.

        Raises FailedPrecondition when the rows of one don't follow its context; then nothing is taken of any.
        """
        for one in rows:
            check_start(one.state, one.start)
        features.settle()
        states, counts = [one.state for one in rows], [one.count for one in rows]
        runner = self._runner(states, counts, [0] * len(rows))
        if runner is not None:
            runner.append(states, counts, self.draft.mix(features))
        else:
            self.draft.append(states, counts, features)

    def propose(self, state: DraftState, request: DraftRequest) -> tuple[int, ...]:
        """Return a session's draft tokens, as `propose_together`."""
        [draft_tokens] = self.propose_together([state], [request])
        return draft_tokens

    def propose_together(self, states: Sequence[DraftState], requests: Sequence[DraftRequest]) -> list[tuple[int, ...]]:
        """Return, for each session, the draft's token for each place behind the known one.

        Raises FailedPrecondition as `check_draft_request` does.
        """
        assert self.embedding is not None
        assert self.head is not None
        for state, request in zip(states, requests, strict=True):
            check_draft_request(self.draft, state, request.position, request.tokens)
        counts, known = [request.tokens for request in requests], [request.token_id for request in requests]
        rows = self.embedding((*known, self.draft.config.mask_token_id))
        runner = self._runner(states, [0] * len(states), counts)
        if runner is not None:
            return runner.propose(states, rows, counts, known)
        if self.batch_runner is not None and len(states) > 1:
            # Kernels take fewer sessions at a time.
            middle = len(states) // 2
            return [
                *self.propose_together(states[:middle], requests[:middle]),
                *self.propose_together(states[middle:], requests[middle:]),
            ]
        hidden = self.draft.propose(states, rows, counts)
        return self.head.choose(hidden, known, counts, self.embedding, states[0].batch_invariant_rows)

    def _runner(
        self, states: Sequence[DraftState], appended: Sequence[int], draft_tokens: Sequence[int]
    ) -> DraftRunner | None:
        """Return the kernels that take so many rows and draft tokens of these sessions, None where none do."""
        runners = (self.runner if len(states) == 1 else None, self.batch_runner)
        before = [0] * len(states)
        fitting = (one for one in runners if one is not None and one.takes(states, before, appended, draft_tokens))
        return next(fitting, None)

    def hidden(self, state: DraftState, position: int, embedded: torch.Tensor, tokens: int) -> torch.Tensor:
        """Return the hidden rows of the draft tokens, for another worker's lm_head: [tokens, hidden].

        embedded: as in `Draft.propose`, of this session alone. Raises FailedPrecondition as `check_draft_request` does.
        """
        check_draft_request(self.draft, state, position, tokens)
        return self.draft.propose([state], embedded, [tokens])


def make_engine(
    draft: Draft,
    embedding: EmbeddingRows,
    lm_head: Weight | None,
    *,
    graphs: bool,
    kernels: bool = True,
    sessions: int | None = None,
    cap: float | None = None,
) -> DraftEngine:
    """Join a draft with the target's embedding and lm_head. It computes by kernels where they can run.

    lm_head: [vocab, hidden], on the draft's device; not needed for a draft with a head of its own. graphs: whether
    kernels may run as captured CUDA graphs. kernels: whether there may be kernels at all. sessions: the most that
    kernels are asked for together; None where that is one at a time. cap: as of `ModelConfig.logit_cap`, the target's.
    """
    head = draft.own_head
    if head is None:
        assert lm_head is not None
        assert draft.chooser is not None
        head = DraftHead(lm_head, chooser=draft.chooser, cap=cap)
    matrix = head.weight
    if not kernels or matrix.dtype != draft.dtype or not draft.has_kernels or not can_read(draft.device, [matrix]):
        return DraftEngine(draft, embedding, head)
    alone = draft.make_runner(head, graphs=graphs)
    together = None if sessions is None else draft.make_runner(head, graphs=graphs, sessions=sessions)
    return DraftEngine(draft, embedding, head, alone, together)


def check_start(state: DraftState, start: int) -> None:
    """Check that features from position `start` on follow the context. Raises FailedPrecondition otherwise."""
    if start != state.length:
        raise FailedPrecondition(
            f"features start at position {start}, the draft's context ends at {state.length}",
            reason="OUT_OF_STEP",
            field="start_position",
        )


def check_draft_request(draft: Draft, state: DraftState, position: int, tokens: int) -> None:
    """Check that the context ends at the known token's position, and that the draft can propose that many tokens.

    Raises FailedPrecondition otherwise.
    """
    if position != state.length:
        raise FailedPrecondition(
            f"propose is for position {position}, the draft's context ends at {state.length}",
            reason="OUT_OF_STEP",
            field="position",
        )
    check_tokens(draft, tokens)


def check_tokens(draft: Draft, tokens: int) -> None:
    """Check that the draft can propose that many tokens. Raises FailedPrecondition otherwise."""
    most = draft.config.block_size - 1
    if not 1 <= tokens <= most:
        raise FailedPrecondition(f"propose asks for {tokens} tokens, this draft proposes 1 to {most}", field="tokens")
