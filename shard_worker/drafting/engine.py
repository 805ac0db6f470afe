"""A draft with what turns its hidden rows into tokens, for sessions near and remote.

Checks that features and guesses follow the context. Decides between kernels and plain torch, which give the same but
for rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from services.errors import FailedPrecondition
from shard_worker.drafting.drafters import Draft, DraftRunner, DraftState
from shard_worker.drafting.embedding_rows import EmbeddingRows
from shard_worker.model.features import Features
from shard_worker.ops.linear import linear

Projection = Callable[[torch.Tensor], torch.Tensor]
"""Normed hidden rows [n, hidden] -> logits [n, vocab]."""


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What to guess after: the known token, its position, and how many tokens to guess."""

    step: int
    position: int
    token_id: int
    tokens: int


@dataclass(frozen=True, slots=True)
class DraftEngine:
    """embedding, project: None where another worker has the target's embedding and lm_head."""

    draft: Draft
    embedding: EmbeddingRows | None = None
    project: Projection | None = None
    runner: DraftRunner | None = None

    def prepare(self) -> None:
        """Compile and capture what the first guess would have to wait for."""
        if self.runner is not None and self.embedding is not None:
            [mask_row] = self.embedding((self.draft.config.mask_token_id,))
            self.runner.prepare(mask_row)

    def append(self, state: DraftState, features: Features, start: int) -> None:
        """Raises FailedPrecondition when the rows don't follow the context."""
        check_start(state, start)
        if self.runner is not None and self.runner.takes(state, features.count):
            self.runner.append(state, self.draft.mix(features))
        else:
            self.draft.append(state, features)

    def propose(self, state: DraftState, request: DraftRequest) -> tuple[int, ...]:
        """The draft's likeliest token for each place behind the known one. Raises as `check_guess` does."""
        assert self.embedding is not None
        assert self.project is not None
        check_draft_request(self.draft, state, request.position, request.tokens)
        rows = self.embedding((request.token_id, self.draft.config.mask_token_id))
        if self.runner is not None and self.runner.takes(state, 0):
            return self.runner.propose(state, rows, request.tokens)
        return tuple(self.project(self.draft.propose(state, rows, request.tokens)).argmax(-1).tolist())

    def hidden(self, state: DraftState, position: int, embedded: torch.Tensor, tokens: int) -> torch.Tensor:
        """Hidden rows of the guesses, for another worker's lm_head. Raises FailedPrecondition as `check_guess`."""
        check_draft_request(self.draft, state, position, tokens)
        return self.draft.propose(state, embedded, tokens)


def make_engine(draft: Draft, embedding: EmbeddingRows, head: torch.Tensor, *, graphs: bool) -> DraftEngine:
    """With the target's lm_head [vocab, hidden] on the draft's device; by kernels where they can run."""

    def project(hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden.to(head.dtype), head)

    if head.dtype != draft.dtype or not draft.has_kernels:
        return DraftEngine(draft, embedding, project)
    return DraftEngine(draft, embedding, project, draft.make_runner(head, graphs=graphs))


def check_start(state: DraftState, start: int) -> None:
    """Raises FailedPrecondition when features from position `start` on don't follow the context."""
    if start != state.length:
        raise FailedPrecondition(
            f"features start at position {start}, the draft's context ends at {state.length}",
            reason="OUT_OF_STEP",
            field="start_position",
        )


def check_draft_request(draft: Draft, state: DraftState, position: int, tokens: int) -> None:
    """Raises FailedPrecondition when the context ends elsewhere than at the known token."""
    if position != state.length:
        raise FailedPrecondition(
            f"propose is for position {position}, the draft's context ends at {state.length}",
            reason="OUT_OF_STEP",
            field="position",
        )
    most = draft.config.block_size - 1
    if not 1 <= tokens <= most:
        raise FailedPrecondition(f"propose asks for {tokens} tokens, this draft guesses 1 to {most}", field="tokens")
