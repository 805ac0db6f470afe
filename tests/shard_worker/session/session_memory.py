"""What a session's stages and draft remember of its committed tokens, read straight from their memory."""

from __future__ import annotations

from typing import Any

import torch

from shard_worker.drafting.drafters.dflash import DFlashState
from shard_worker.drafting.link import LocalDraftLink
from shard_worker.session.following import FollowingSession
from shard_worker.session.target_session import TargetSession
from tests.shard_worker.chain import Client

Memory = dict[str, torch.Tensor]


def stages_of(client: Client) -> list[TargetSession]:
    """The sessions of a chain of this process, from the first stage on."""
    first: Any = client.session
    sessions: list[Any] = [first._session if isinstance(first, FollowingSession) else first]
    while sessions[-1]._downstream is not None:
        sessions.append(sessions[-1]._downstream)
    return sessions


def draft_of(client: Client) -> DFlashState | None:
    """The session's draft, beside the last stage or in a worker of its own."""
    link = stages_of(client)[-1]._draft
    if link is None:
        return None
    return link._state if isinstance(link, LocalDraftLink) else link._session._state


async def memory_of(client: Client, *, window: int | None = None) -> Memory:
    """Copies of all rows and states of the committed tokens, by layer.

    window: tokens that sliding layers of the draft look back; their older rows are left out.
    """
    memory: Memory = {}
    for session in stages_of(client):
        state, stage = session._work._state, session._stage
        assert state is not None
        # A verify is counted behind its answer.
        await session._thread.submit(int)
        assert state.length == client.length
        for segment, caches in zip(stage.segments, state.caches, strict=True):
            for layer, slot in zip(range(segment.layers.first, segment.layers.last), caches.slots, strict=True):
                if stage.config.layer_kinds[layer] == "linear_attention":
                    assert caches.recurrent is not None
                    memory[f"{layer}.recurrent"] = caches.recurrent.state[slot].clone()
                    memory[f"{layer}.conv"] = caches.recurrent.conv[slot, : caches.recurrent.taps - 1].clone()
                else:
                    assert caches.attention is not None
                    for which, what in enumerate("kv"):
                        [rows] = caches.attention.read(slice(slot, slot + 1), which, 0, state.length)
                        memory[f"{layer}.{what}"] = rows.clone()
    if (draft := draft_of(client)) is not None:
        assert draft.length == client.length
        for layer, (kind, slot) in enumerate(draft.layers):
            seen = draft.length
            if kind == "sliding_attention" and window is not None:
                seen = min(window, seen)
            for which, what in enumerate("kv"):
                cache = draft.caches[kind]
                [rows] = cache.read(slice(slot, slot + 1), which, draft.length - seen, draft.length)
                memory[f"draft.{layer}.{what}"] = rows.clone()
    return memory


def differing(one: Memory, other: Memory) -> list[str]:
    """What is not the same in two sessions, bit for bit."""
    assert set(one) == set(other)
    return [name for name in one if not torch.equal(one[name], other[name])]


def distance(one: Memory, other: Memory) -> float:
    """The largest difference of any number."""
    assert set(one) == set(other)
    return max(float((one[name] - other[name]).abs().max()) for name in one)
