"""How the last stage reaches the draft: a draft in the same process, or one behind a stream.

Both take features of committed rows and, when asked, answer with guesses. They differ in where the work runs, not in
what it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from services.draft import DraftSession, Propose
from services.errors import CLOSED, FailedPrecondition
from services.steps import FeatureSlice, Location, SnapshotPart, SnapshotRestore, SnapshotSave
from services.tensors import WireTensor
from shard_worker.drafters.dflash import Draft, DraftState
from shard_worker.dtypes import from_wire, to_wire
from shard_worker.embedding_rows import EmbeddingRows
from shard_worker.executor import DeviceThread
from shard_worker.features import Features
from shard_worker.session_record import SessionRecord
from shard_worker.snapshot_keeper import SnapshotKeeper

Projection = Callable[[torch.Tensor], torch.Tensor]
"""Normed hidden rows [n, hidden] -> logits [n, vocab]."""


@dataclass(frozen=True, slots=True)
class Guess:
    """What to guess after: the known token, its position, and how many tokens to guess."""

    step: int
    position: int
    token_id: int
    tokens: int


class DraftLink(Protocol):
    """One session's way to its draft."""

    held_bytes: int
    """Memory that it takes in this process."""

    remote: bool

    async def advance(self, features: Features, start: int, guess: Guess | None) -> tuple[int, ...]:
        """Take features of committed rows from position `start` on; then guess, if asked."""

    async def save_snapshot(self, save: SnapshotSave) -> SnapshotPart:
        """Keep the state behind the features so far."""

    async def restore_snapshot(self, restore: SnapshotRestore) -> SnapshotPart:
        """Begin from a kept state. Raises NotFound when it isn't kept."""

    async def close(self, why: str = CLOSED) -> None:
        """Free the draft's session. why: what ended it, in a word for the log."""


def advance(
    draft: Draft,
    state: DraftState,
    features: Features,
    start: int,
    guess: Guess | None,
    embedding: EmbeddingRows,
    project: Projection,
) -> tuple[int, ...]:
    """Append features, then guess if asked. Runs on the device thread."""
    if not features.empty:
        append(draft, state, features, start)
    return () if guess is None else guess_tokens(draft, state, guess, embedding, project)


def guess_tokens(
    draft: Draft, state: DraftState, guess: Guess, embedding: EmbeddingRows, project: Projection
) -> tuple[int, ...]:
    """The draft's likeliest token for each place behind the known one. Raises FailedPrecondition as `check_guess`."""
    check_guess(draft, state, guess.position, guess.tokens)
    rows = embedding((guess.token_id, draft.config.mask_token_id))
    hidden = draft.propose(state, rows, guess.tokens)
    return tuple(project(hidden).argmax(-1).tolist())


def append(draft: Draft, state: DraftState, features: Features, start: int) -> None:
    """Raises FailedPrecondition when the rows don't follow the context."""
    check_start(state, start)
    draft.append(state, features)


def check_start(state: DraftState, start: int) -> None:
    """Raises FailedPrecondition when features from position `start` on don't follow the context."""
    if start != state.length:
        raise FailedPrecondition(
            f"features start at position {start}, the draft's context ends at {state.length}",
            reason="OUT_OF_STEP",
            field="start_position",
        )


def check_guess(draft: Draft, state: DraftState, position: int, tokens: int) -> None:
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


async def save_draft(keeper: SnapshotKeeper, state: DraftState, save: SnapshotSave, location: Location) -> SnapshotPart:
    """Raises FailedPrecondition when the features end elsewhere."""
    if save.length != state.length:
        raise FailedPrecondition(
            f"length is {save.length}, the draft's context has {state.length} tokens",
            reason="OUT_OF_STEP",
            field="length",
        )
    return await keeper.save(save, state.views(), location)


async def restore_draft(
    keeper: SnapshotKeeper, state: DraftState, restore: SnapshotRestore, location: Location
) -> SnapshotPart:
    """Errors as in `SnapshotKeeper.restore`; FailedPrecondition after the first features."""
    if state.length:
        raise FailedPrecondition(
            f"the draft's context has {state.length} tokens already: restore comes first", reason="OUT_OF_STEP"
        )
    part = await keeper.restore(restore, state.views(), location)
    state.length = restore.length
    return part


class LocalDraftLink:
    """A draft on the last stage's own devices, sharing its lm_head and embedding."""

    remote = False

    def __init__(
        self,
        thread: DeviceThread,
        draft: Draft,
        state: DraftState,
        embedding: EmbeddingRows,
        project: Projection,
        keeper: SnapshotKeeper,
        location: Location,
        record: SessionRecord,
    ) -> None:
        self._thread, self._draft, self._state = thread, draft, state
        self._embedding, self._project = embedding, project
        self._keeper, self._location, self._record = keeper, location, record
        self.held_bytes = state.size_bytes

    async def advance(self, features: Features, start: int, guess: Guess | None) -> tuple[int, ...]:
        self._record.steps += guess is not None
        return await self._thread.submit(
            self._record.timed,
            advance,
            self._draft,
            self._state,
            features,
            start,
            guess,
            self._embedding,
            self._project,
        )

    async def save_snapshot(self, save: SnapshotSave) -> SnapshotPart:
        return await save_draft(self._keeper, self._state, save, self._location)

    async def restore_snapshot(self, restore: SnapshotRestore) -> SnapshotPart:
        return await restore_draft(self._keeper, self._state, restore, self._location)

    async def close(self, why: str = CLOSED) -> None:
        self._record.end(why, self._state.length)


class RemoteDraftLink:
    """A draft in another worker. `embedding` and `project` serve one that has neither table nor head of its own."""

    held_bytes, remote = 0, True

    def __init__(
        self,
        thread: DeviceThread,
        session: DraftSession,
        device: torch.device,
        projected: bool,
        mask_token_id: int,
        embedding: EmbeddingRows,
        project: Projection,
    ) -> None:
        self._thread, self._session, self._device = thread, session, device
        self._projected, self._mask_token_id = projected, mask_token_id
        self._embedding, self._project = embedding, project

    async def advance(self, features: Features, start: int, guess: Guess | None) -> tuple[int, ...]:
        for piece in await self._thread.submit(slices_to_wire, features, start):
            await self._session.feature_slice(piece)
        if guess is None:
            return ()
        embed = None
        if self._projected:
            embed = await self._thread.submit(self._embed, guess.token_id)
        answer = await self._session.propose(Propose(guess.step, guess.position, guess.token_id, guess.tokens, embed))
        if not isinstance(answer, WireTensor):
            return answer
        return await self._thread.submit(self._choose, answer)

    async def save_snapshot(self, save: SnapshotSave) -> SnapshotPart:
        return await self._session.save_snapshot(save)

    async def restore_snapshot(self, restore: SnapshotRestore) -> SnapshotPart:
        return await self._session.restore_snapshot(restore)

    async def close(self, why: str = CLOSED) -> None:
        await self._session.close(why)

    def _embed(self, token_id: int) -> WireTensor:
        return to_wire(self._embedding((token_id, self._mask_token_id)))

    def _choose(self, hidden: WireTensor) -> tuple[int, ...]:
        return tuple(self._project(from_wire(hidden, self._device)).argmax(-1).tolist())


def slices_to_wire(features: Features, start: int) -> list[FeatureSlice]:
    """The sum as one slice, plain slices in capture order."""
    pieces = []
    if features.total is not None:
        pieces.append(FeatureSlice(start, to_wire(features.total)))
    for index in sorted(features.slices):
        pieces.append(FeatureSlice(start, to_wire(features.slices[index]), index))
    return pieces
