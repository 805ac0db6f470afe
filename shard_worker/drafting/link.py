"""How the last stage reaches the draft: a draft in the same process, or one behind a stream.

Both take features of committed rows and, when asked, answer with draft tokens: a draft in the same process on the
device thread, where `draft_batches` does the work of all sessions together, the other one from the event loop.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from services.errors import CLOSED, FailedPrecondition, FlashsplitError
from services.messages.draft_session import Propose
from services.messages.steps import FeatureSlice, Location, SnapshotPart, SnapshotRestore, SnapshotSave
from services.messages.tensors import WireTensor
from services.rpc.draft import DraftSession
from shard_worker.device.dtypes import Leaving, from_wire, to_wire
from shard_worker.device.executor import DeviceThread
from shard_worker.drafting.draft_head import DraftHead
from shard_worker.drafting.drafters import DraftState
from shard_worker.drafting.embedding_rows import EmbeddingRows
from shard_worker.drafting.engine import DraftEngine, DraftRequest
from shard_worker.model.features import Features, joined
from shard_worker.session_record import SessionRecord
from shard_worker.snapshots.keeper import SnapshotKeeper

if TYPE_CHECKING:
    from shard_worker.drafting.ahead import Ahead, BlocksAhead

MOST_KEPT_ROWS = 256
"""Rows whose features wait for the draft at most."""


class DraftElsewhere(Protocol):
    """One session's way to a draft in another worker."""

    @property
    def held_bytes(self) -> int:
        """Memory that the session's draft state takes in this process by now."""

    async def advance(self, features: Features, start: int, request: DraftRequest | None) -> tuple[int, ...]:
        """Take features of committed rows from position `start` on; then propose, where `request` asks for it.

        Returns the draft tokens, none without a request.
        """

    async def save_snapshot(self, save: SnapshotSave) -> SnapshotPart:
        """Keep the state behind the features so far. Raises FailedPrecondition when they end elsewhere."""

    async def restore_snapshot(self, restore: SnapshotRestore) -> SnapshotPart:
        """Begin from a kept state.

        Raises NotFound when it isn't kept, FailedPrecondition after the first features.
        """

    async def close(self, why: str = CLOSED) -> None:
        """Free the draft's session. why: what ended it, in a word for the log."""


async def save_draft(keeper: SnapshotKeeper, state: DraftState, save: SnapshotSave, location: Location) -> SnapshotPart:
    """Keep a session's draft state. Raises FailedPrecondition when its features end elsewhere."""
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
    """Begin a session's draft state from a kept one.

    Raises FailedPrecondition after the first features, and what `SnapshotKeeper.restore` raises.
    """
    if state.length:
        raise FailedPrecondition(
            f"the draft's context has {state.length} tokens already: restore comes first", reason="OUT_OF_STEP"
        )
    part = await keeper.restore(restore, state.views(), location)
    state.length = restore.length
    return part


class LocalDraftLink:
    """One session's way to a draft on the last stage's own devices, which shares its lm_head and embedding.

    engine: the draft. state: the session's context in it. ahead, ahead_together: what issues a block together with the
    step before it, for the session alone and for those of a step of several, where that can be done.
    """

    def __init__(
        self,
        engine: DraftEngine,
        state: DraftState,
        keeper: SnapshotKeeper,
        location: Location,
        record: SessionRecord,
        ahead: Ahead | None = None,
        ahead_together: BlocksAhead | None = None,
    ) -> None:
        self.engine, self.state, self.ahead, self.ahead_together = engine, state, ahead, ahead_together
        self._keeper, self._location, self._record = keeper, location, record
        self._kept: list[Features] = []
        """Features of the committed rows behind the context, step by step."""
        self._kept_rows = 0

    @property
    def held_bytes(self) -> int:
        return self.state.size_bytes + sum(features.size_bytes for features in self._kept)

    # --- on the device thread

    @property
    def cuts_blocks(self) -> bool:
        """Whether a block may have fewer tokens than it was asked for."""
        return self.engine.head is not None and self.engine.head.chooser.cuts_blocks

    @property
    def takes_rows_later(self) -> bool:
        """Whether features wait until a block is asked for; kernels take them at once."""
        return self.engine.runner is None

    def keep(self, features: Features, start: int) -> bool:
        """Keep the features of committed rows from position `start` on until a block is asked for, and say whether that
        is done: a session that asks for none then pays nearly nothing for its draft. What does not follow is left to be
        refused."""
        if not self.takes_rows_later or features.empty or start != self.state.length + self._kept_rows:
            return False
        count = features.count
        if self._kept_rows + count > MOST_KEPT_ROWS:
            return False
        self._kept.append(features.own())
        self._kept_rows += count
        return True

    def with_kept(self, features: Features, start: int) -> tuple[Features, int]:
        """Return the features that were kept and these behind them, and the position of the first row."""
        kept, self._kept, self._kept_rows = self._kept, [], 0
        if not kept:
            return features, start
        return joined([*kept, *([] if features.empty else [features])]), self.state.length

    def catch_up(self) -> None:
        """Take what was kept into the context."""
        features, start = self.with_kept(Features(), self.state.length)
        if not features.empty:
            self.engine.append(self.state, features, start)

    def cut(self, length: int) -> bool:
        """Let another session's context be this one's first `length` tokens, and say whether that can be done. Nothing
        that was begun for this session changes its length any more."""
        if not self.state.shortest <= length <= self.state.length:
            return False
        self.state = copy.copy(self.state)
        self.state.length = length
        return True

    # --- on the event loop

    def count(self, blocks: int, elapsed_ns: int) -> None:
        """Count blocks that were proposed, and the time that the session's part in them took; on the device thread."""
        self._record.steps += blocks
        self._record.forward_ns += elapsed_ns

    async def save_snapshot(self, save: SnapshotSave) -> SnapshotPart:
        return await save_draft(self._keeper, self.state, save, self._location)

    async def restore_snapshot(self, restore: SnapshotRestore) -> SnapshotPart:
        return await restore_draft(self._keeper, self.state, restore, self._location)

    async def close(self, why: str = CLOSED) -> None:
        self._record.end(why, self.state.length)


class KeptFeatures(Protocol):
    """What a draft elsewhere was sent, which the draft of a later session can be sent again."""

    @property
    def first(self) -> int | None:
        """From this position on the rows are kept; None where there was no room for them."""

    def add_rows(self, pieces: Sequence[FeatureSlice]) -> None:
        """Keep rows, as they are sent."""

    def rows(self, first: int, last: int) -> list[FeatureSlice]:
        """Return the rows of the tokens [first, last), as they were sent; they must be kept."""


class RemoteDraftLink:
    """A `DraftElsewhere` that is there.

    session: the draft's session there. device: where the last stage computes. projected: whether the draft has neither
    the target's embedding nor its lm_head, so that this end sends it rows of `embedding` and, unless it has a head of
    its own, turns its hidden rows into tokens by `head`. sent: keeps what the draft gets; where it has some already, of
    a session that rested, the draft gets that first. None where nothing is to be kept.
    """

    held_bytes = 0

    def __init__(
        self,
        thread: DeviceThread,
        session: DraftSession,
        device: torch.device,
        projected: bool,
        mask_token_id: int,
        embedding: EmbeddingRows,
        head: DraftHead,
        sent: KeptFeatures | None = None,
    ) -> None:
        self._thread, self.session, self._device, self._sent = thread, session, device, sent
        self._length = 0
        """Of how many tokens the draft has what it is to know."""
        self._projected, self._mask_token_id = projected, mask_token_id
        self._embedding, self._head = embedding, head

    async def advance(self, features: Features, start: int, request: DraftRequest | None) -> tuple[int, ...]:
        pieces = await self._thread.submit(slices_to_wire, features, start)
        await self._catch_up(start)
        if self._sent is not None and pieces:
            self._sent.add_rows(pieces)
        for piece in pieces:
            await self.session.feature_slice(piece)
        self._length = start + features.count
        if request is None:
            return ()
        embed = None
        if self._projected:
            embed = await self._thread.submit(self._embed, request.token_id)
        answer = await self.session.propose(
            Propose(request.step, request.position, request.token_id, request.tokens, embed)
        )
        if not isinstance(answer, WireTensor):
            return answer
        return await self._thread.submit(self._chosen, answer, request.token_id)

    async def save_snapshot(self, save: SnapshotSave) -> SnapshotPart:
        return await self.session.save_snapshot(save)

    async def restore_snapshot(self, restore: SnapshotRestore) -> SnapshotPart:
        part = await self.session.restore_snapshot(restore)
        self._length = restore.length
        return part

    async def close(self, why: str = CLOSED) -> None:
        await self.session.close(why)

    async def _catch_up(self, length: int) -> None:
        """Send what a session that rested has sent before, up to so many tokens."""
        while self._sent is not None and self._sent.first is not None and self._length < length:
            end = min(length, self._length + MOST_KEPT_ROWS)
            for piece in self._sent.rows(self._length, end):
                await self.session.feature_slice(piece)
            self._length = end

    def _embed(self, token_id: int) -> WireTensor:
        return to_wire(self._embedding((token_id, self._mask_token_id)))

    def _chosen(self, hidden: WireTensor, known: int) -> tuple[int, ...]:
        rows = from_wire(hidden, self._device)
        [draft_tokens] = self._head.choose(rows, [known], [len(rows)], self._embedding)
        return draft_tokens


class LostDraftLink:
    """A `DraftElsewhere` that could not be reached when the session was opened: its first use raises why."""

    held_bytes = 0

    def __init__(self, error: FlashsplitError) -> None:
        self._error = error

    async def advance(self, features: Features, start: int, request: DraftRequest | None) -> tuple[int, ...]:
        raise self._error

    async def save_snapshot(self, save: SnapshotSave) -> SnapshotPart:
        raise self._error

    async def restore_snapshot(self, restore: SnapshotRestore) -> SnapshotPart:
        raise self._error

    async def close(self, why: str = CLOSED) -> None:
        pass


DraftLink = LocalDraftLink | DraftElsewhere
"""One session's way to its draft."""


def slices_to_wire(features: Features, start: int) -> list[FeatureSlice]:
    """Return features as they travel: their sum as one slice, or plain slices in capture order.

    start: the position of the first row.
    """
    return slices_of(features.indices, Leaving(features.tensors).wait(), start)


def slices_of(indices: Sequence[int | None], tensors: Sequence[WireTensor], start: int) -> list[FeatureSlice]:
    """Return the slices of tensors that are on the host. indices: of each its capture index, None for a sum."""
    return [FeatureSlice(start, tensor, index) for index, tensor in zip(indices, tensors, strict=True)]
