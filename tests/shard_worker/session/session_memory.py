"""What a session's stages and draft hold of its committed tokens, read straight from their memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import torch

from shard_worker.device.executor import DeviceThread
from shard_worker.drafting.drafters import DraftState
from shard_worker.drafting.drafters.dflash import DFlashState
from shard_worker.drafting.link import LocalDraftLink
from shard_worker.ops.attention import first_seen
from shard_worker.session.following import FollowingSession
from shard_worker.session.last_stage import LastStageSession
from shard_worker.session.relay import RelaySession
from shard_worker.session.session import TargetSession
from shard_worker.stage.stage import StageState
from tests.shard_worker.chain import Client

Memory = dict[str, torch.Tensor]


def stages_of(client: Client) -> list[TargetSession]:
    """Return the sessions of a chain of this process, from the first stage on."""
    session: Any = client.session
    sessions = [cast(TargetSession, session.session if isinstance(session, FollowingSession) else session)]
    while isinstance(sessions[-1], RelaySession):
        sessions.append(cast(TargetSession, sessions[-1].downstream))
    return sessions


def draft_of(client: Client) -> DFlashState | None:
    """Return the state of the session's draft, beside the last stage or in a worker of its own."""
    last = stages_of(client)[-1]
    assert isinstance(last, LastStageSession)
    link: Any = last.draft
    if link is None:
        return None
    return link.state if isinstance(link, LocalDraftLink) else link.session.state


async def reached(
    thread: DeviceThread, state: StageState | DraftState, length: int, catch_up: Callable[[], object] = int
) -> None:
    """Wait until a state has so many tokens: a verify is committed behind its answer, and the draft told of them.

    catch_up: has it take what it has kept, on the thread.
    """
    async with asyncio.timeout(10):
        while state.length != length:
            await thread.submit(catch_up)


async def memory_of(client: Client) -> Memory:
    """Return copies of all rows and states of the committed tokens that the next ones see, by layer."""
    memory: Memory = {}
    for session in stages_of(client):
        state, stage = session.state, session.host.stage
        await reached(session.host.thread, state, client.length)
        for segment, caches in zip(stage.segments, state.caches, strict=True):
            for layer, slot in zip(range(segment.layers.first, segment.layers.last), segment.slots, strict=True):
                if stage.config.layer_kinds[layer] == "linear_attention":
                    assert caches.recurrent is not None
                    memory[f"{layer}.recurrent"] = caches.recurrent.state[slot].clone()
                    memory[f"{layer}.conv"] = caches.recurrent.conv[slot, : caches.recurrent.taps - 1].clone()
                else:
                    cache = caches.attention_of(stage.config.attention(layer))
                    first = first_seen(state.length, cache.window)
                    for which, what in enumerate("kv"):
                        [rows] = cache.read(slice(slot, slot + 1), which, first, state.length)
                        memory[f"{layer}.{what}"] = rows.clone()
    if (draft := draft_of(client)) is not None:
        last = stages_of(client)[-1]
        assert isinstance(last, LastStageSession)
        catch_up = last.draft.catch_up if isinstance(last.draft, LocalDraftLink) else int
        await reached(last.host.thread, draft, client.length, catch_up)
        for layer, (kind, slot) in enumerate(draft.layers):
            cache = draft.caches[kind]
            first = first_seen(draft.length, cache.window)
            for which, what in enumerate("kv"):
                [rows] = cache.read(slice(slot, slot + 1), which, first, draft.length)
                memory[f"draft.{layer}.{what}"] = rows.clone()
    return memory


def differing(first: Memory, second: Memory) -> list[str]:
    """Return the names of what is not the same in two sessions, bit for bit."""
    assert set(first) == set(second)
    return [name for name in first if not torch.equal(first[name], second[name])]


def distance(first: Memory, second: Memory) -> float:
    """Return the largest difference of any number."""
    assert set(first) == set(second)
    return max(float((first[name] - second[name]).abs().max()) for name in first)
