"""Saves and restores that a session refuses, or that fail on one of its workers: what is told, and what goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.errors import FailedPrecondition, FlashsplitError, InvalidArgument, NotFound, Unavailable
from services.messages.description import HeadPlace
from services.messages.draft_session import OpenDraft
from services.messages.steps import (
    Commit,
    Failure,
    FailureReason,
    Location,
    SnapshotRestore,
    SnapshotSave,
    SnapshotSaved,
    StepKind,
)
from services.net.channel import connect
from services.net.server import Server
from services.rpc.draft import DraftServicer, RemoteDraft
from services.rpc.stage import RemoteStage, StageServicer
from shard_worker.snapshots.keeper import SnapshotKeeper
from tests.shard_worker.chain import BLOCK, BUDGET, DRAFT_ADDRESS, Chain, Client, MakeChain
from tests.shard_worker.session.held_back import unanswered
from tests.shard_worker.session.session_memory import differing, memory_of
from tests.shard_worker.session.test_session_below import ScriptedStage, upstream_of
from tests.shard_worker.tiny import Tiny, ids

PREFILL, DECODE, VERIFY, RESUME = StepKind.PREFILL, StepKind.DECODE, StepKind.VERIFY, StepKind.RESUME


@pytest.fixture(autouse=True)
def forgotten(make_chain: MakeChain) -> Iterator[None]:
    """Free what a test kept, and restore the budgets, so that no other test sees them."""
    yield
    for chain in make_chain.chains.values():
        chain.free_snapshots()
        for store in chain.stores:
            store.budget_bytes = BUDGET


async def kept(chain: Chain, prompt: Sequence[int], name: str = "a") -> None:
    """Keep a whole prompt under a name."""
    async with chain.session() as client:
        await client.step(PREFILL, prompt)
        assert not any(part.refusal for part in (await client.save(name)).parts)


# --- frames out of step


@pytest.mark.parametrize("cuts", [(), (3,)])
@pytest.mark.parametrize("length", [0, 11, 13, 2**32 - 1])
async def test_a_save_of_another_length_is_refused(make_chain: MakeChain, cuts: tuple[int, ...], length: int) -> None:
    """A prefix is kept where the session is and nowhere else; afterwards the session goes on."""
    chain = make_chain("qwen3_5", cuts)
    async with chain.session() as client:
        await client.step(PREFILL, ids(12))
        with pytest.raises(FailedPrecondition, match=f"length is {length}, 12 tokens are committed") as caught:
            await client.session.save_snapshot(SnapshotSave("a", length))
        assert (caught.value.reason, caught.value.where["field"]) == ("OUT_OF_STEP", "length")
        assert not any(part.refusal for part in (await client.save("a")).parts)


async def test_nothing_is_kept_of_an_empty_session(make_chain: MakeChain) -> None:
    """Before the first token there is no prefix."""
    async with make_chain("qwen3").session() as client:
        with pytest.raises(FailedPrecondition, match="length is 0, 0 tokens are committed"):
            await client.session.save_snapshot(SnapshotSave("a", 0))


@pytest.mark.parametrize("cuts", [(3,), (2, 5)])
async def test_nothing_is_kept_while_a_verify_is_unanswered(
    tiny: Tiny, make_chain: MakeChain, cuts: tuple[int, ...]
) -> None:
    """Until a stage knows how many rows count it keeps nothing; when it does, the session goes on and can be kept."""
    prompt, truth = tiny.clear_prompt("qwen3_5", 12, 30)
    chain = make_chain("qwen3_5", cuts)
    async with chain.session() as client:
        await client.prefill(prompt)
        async with unanswered(client, client.frame(VERIFY, truth[:4])) as first:
            for length in (12, 13, 16):
                with pytest.raises(FailedPrecondition, match="the last verify has not been answered yet"):
                    await first.save_snapshot(SnapshotSave("a", length))
        assert (await client.commit()).token_ids == tuple(truth[1:5])
        assert [store.held_bytes for store in chain.stores] == [0] * (len(cuts) + 1)
        assert not any(part.refusal for part in (await client.save("a")).parts)
        assert (await client.step(DECODE, truth[4:5]))[0].token_ids == (truth[5],)


@pytest.mark.parametrize(
    ("restore", "kind", "field"),
    [
        (SnapshotRestore("a", 0), InvalidArgument, "length"),
        (SnapshotRestore("a", 61, tuple(ids(61))), InvalidArgument, "length"),
        (SnapshotRestore("a", 20, tuple(ids(19))), InvalidArgument, "token_ids"),
        (SnapshotRestore("a", 20, (*ids(19), 256)), InvalidArgument, "token_ids"),
        (SnapshotRestore("a", 20, (*ids(19), 2**32 - 1)), InvalidArgument, "token_ids"),
        (SnapshotRestore("a", 19, tuple(ids(19))), FailedPrecondition, "length"),
        (SnapshotRestore("a", 21, tuple(ids(21))), FailedPrecondition, "length"),
    ],
)
@pytest.mark.parametrize("cuts", [(), (3,)])
async def test_a_restore_that_makes_no_sense_is_refused(
    make_chain: MakeChain, cuts: tuple[int, ...], restore: SnapshotRestore, kind: type[FlashsplitError], field: str
) -> None:
    """Lengths that the session or the prefix doesn't have and tokens of no vocabulary change nothing in the session."""
    chain = make_chain("qwen3_5", cuts)
    await kept(chain, ids(20))
    async with chain.session(max_length=60) as client:
        with pytest.raises(kind) as caught:
            await client.session.restore_snapshot(restore)
        assert caught.value.where["field"] == field
        await client.restore("a", ids(20))
        assert len((await client.resume())[0].token_ids) == 1


async def test_a_prefix_longer_than_the_session_is_refused(make_chain: MakeChain) -> None:
    """A session with less room than the prefix has tokens takes none of it; one with exactly that room does."""
    chain = make_chain("qwen3", (2,))
    await kept(chain, ids(20))
    async with chain.session(max_length=19) as client:
        with pytest.raises(InvalidArgument, match="length is 20; the session holds 1 to 19"):
            await client.session.restore_snapshot(SnapshotRestore("a", 20, tuple(ids(20))))
    async with chain.session(max_length=20) as client:
        await client.restore("a", ids(20))
        assert len((await client.resume())[0].token_ids) == 1


@pytest.mark.parametrize("before", ["step", "restore"])
async def test_a_restore_comes_first_and_once(make_chain: MakeChain, before: str) -> None:
    """Behind a step or another restore there is nothing to restore into; the session stays where it is."""
    prompt = ids(20)
    chain = make_chain("qwen3", (2,))
    await kept(chain, prompt)
    async with chain.session() as client:
        if before == "step":
            await client.step(PREFILL, ids(5, seed=9))
        else:
            await client.restore("a", prompt)
        memory = await memory_of(client)
        with pytest.raises(FailedPrecondition, match="restore comes before the first step") as caught:
            await client.session.restore_snapshot(SnapshotRestore("a", 20, tuple(prompt)))
        assert caught.value.reason == "OUT_OF_STEP"
        assert differing(await memory_of(client), memory) == []
        await client.step(DECODE, [7])


async def test_an_unknown_name_is_not_found(tiny: Tiny, make_chain: MakeChain) -> None:
    """What isn't kept is NOT_FOUND, and the same session may begin with nothing instead."""
    prompt, truth = tiny.clear_prompt("qwen3_5", 12, 30)
    async with make_chain("qwen3_5").session() as client:
        with pytest.raises(NotFound, match="no prefix nothing is kept here") as caught:
            await client.restore("nothing", prompt)
        assert caught.value.reason == "SNAPSHOT_MISSING"
        assert await client.plain(prompt, 5) == truth[:5]


@pytest.mark.parametrize("moment", ["empty", "behind a step", "behind a resume", "with rows"])
async def test_a_resume_comes_first_behind_a_restore(make_chain: MakeChain, moment: str) -> None:
    """A resume without a restore, behind a step or with rows is refused by field, and the session goes on."""
    chain = make_chain("qwen3", (2,))
    await kept(chain, ids(20))
    async with chain.session() as client:
        if moment != "empty":
            await client.restore("a", ids(20))
        if moment == "behind a step":
            await client.step(DECODE, [7])
        if moment == "behind a resume":
            await client.resume()
        with pytest.raises(InvalidArgument, match="it has none, and comes first after a restore") as caught:
            await client.session.forward(client.frame(RESUME, (1,) if moment == "with rows" else ()))
        assert (caught.value.where["field"], caught.value.where["stage"]) == ("kind", "0")
        await client.step(DECODE, [7])


async def test_a_closed_session_keeps_nothing(make_chain: MakeChain) -> None:
    """Behind its end a session is refused like behind any other frame."""
    chain = make_chain("qwen3", (2,))
    await kept(chain, ids(20))
    client = Client(await chain.roles[0].open(chain.request()))
    await client.step(PREFILL, ids(5))
    await client.session.close()
    with pytest.raises(FailedPrecondition, match="the session is closed"):
        await client.session.save_snapshot(SnapshotSave("b", 5))
    fresh = Client(await chain.roles[0].open(chain.request()))
    await fresh.session.close()
    with pytest.raises(FailedPrecondition, match="the session is closed"):
        await fresh.session.restore_snapshot(SnapshotRestore("a", 20, tuple(ids(20))))


# --- parts that are refused


@pytest.mark.parametrize("small", [0, 1, 2])
async def test_a_budget_that_is_too_small_is_reported_and_nothing_else(
    tiny: Tiny, make_chain: MakeChain, small: int
) -> None:
    """The worker without room says so in its part, keeps nothing and takes no room; the answer is right all along."""
    prompt, truth = tiny.clear_prompt("qwen3_5", 12, 30)
    chain = make_chain("qwen3_5", (3,), True, place=HeadPlace.LOADED)
    store = chain.stores[small]
    store.budget_bytes = 1000
    async with chain.session() as client:
        await client.prefill(prompt)
        saved = await client.save("a")
        assert [bool(part.refusal) for part in saved.parts] == [index == small for index in range(3)]
        part = saved.parts[small]
        assert "more than the 1000 of --prefix-cache-bytes" in part.refusal
        assert (part.size_bytes, part.evicted_ids) == (0, ())
        assert [bool(store.held_bytes) for store in chain.stores] == [index != small for index in range(3)]
        answer = await client.speculate(truth[:1], 20)
    assert answer.tokens == truth[1:21]


async def test_what_was_given_up_for_a_save_is_told(make_chain: MakeChain) -> None:
    """Each worker names what left for it; those are NOT_FOUND afterwards, and what came is there."""
    chain = make_chain("qwen3", (2,))
    for index, name in enumerate("abc"):
        await kept(chain, ids(20, seed=index), name)
    for store in chain.stores:
        store.budget_bytes = store.held_bytes + 4000
    async with chain.session() as client:
        await client.step(PREFILL, ids(20, seed=7))
        saved = await client.save("d")
    # Not only one, because the last stage's logits take room too.
    assert [part.evicted_ids for part in saved.parts] == [("a",), ("a",)]
    for name in "bcd":
        async with chain.session() as client:
            await client.restore(name, ids(20))
    async with chain.session() as client:
        with pytest.raises(NotFound):
            await client.restore("a", ids(20))


@pytest.mark.parametrize("parent", ["nothing", "same length", "longer"])
async def test_a_parent_that_is_none_is_told(make_chain: MakeChain, parent: str) -> None:
    """A parent that isn't kept, or isn't shorter, is a refusal in every part, and nothing is kept."""
    chain = make_chain("qwen3", (2,), True)
    await kept(chain, ids(20), "same length")
    await kept(chain, ids(25), "longer")
    held = [store.held_bytes for store in chain.stores]
    async with chain.session() as client:
        await client.step(PREFILL, ids(20))
        saved = await client.save("b", parent)
        assert [part.refusal for part in saved.parts] == [f"the prefix {parent} that it builds on is not kept here"] * 3
        assert [store.held_bytes for store in chain.stores] == held
        await client.step(DECODE, [5], 3)


async def test_a_copy_that_fails_gives_its_room_back(make_chain: MakeChain, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host has no memory left, the part says so; nothing is kept and no room stays taken."""
    chain = make_chain("qwen3", (2,))
    last = keepers_of(chain)[-1]

    def too_large(*_: object, **__: object) -> Any:
        raise RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory: 9 bytes.")

    monkeypatch.setattr(type(last.groups[0]), "empty", too_large)
    async with chain.session() as client:
        await client.step(PREFILL, ids(20))
        saved = await client.save("a")
        assert ["no memory left" in part.refusal for part in saved.parts] == [True, True]
        monkeypatch.undo()
        assert [store.held_bytes for store in chain.stores] == [0, 0]
        assert not any(part.refusal for part in (await client.save("a")).parts)


def keepers_of(chain: Chain) -> list[SnapshotKeeper]:
    """Return what keeps the prefixes of each stage."""
    keepers = []
    for role in chain.roles:
        assert role.loaded is not None
        keepers.append(role.loaded.keeper)
    return keepers


# --- losing the draft


class FlakyDraft:
    """A draft worker whose sessions fail to keep and to take up once `error` is set."""

    def __init__(self, port: Any) -> None:
        self._port, self.describe = port, port.describe
        self.error: FlashsplitError | None = None

    async def open(self, request: OpenDraft) -> Any:
        session: Any = await self._port.open(request)
        save = session.save_snapshot

        async def save_snapshot(asked: SnapshotSave) -> Any:
            if self.error is not None:
                raise self.error
            return await save(asked)

        session.save_snapshot = save_snapshot
        return session


@pytest.mark.parametrize("error", [Unavailable("gone", address="draft:1", host="far"), FailedPrecondition("refused")])
async def test_a_draft_that_is_lost_while_saving(
    tiny: Tiny, make_chain: MakeChain, monkeypatch: pytest.MonkeyPatch, error: FlashsplitError
) -> None:
    """There is one notice and a refusal in the draft's part, here and later; steps go on to the same tokens."""
    prompt, truth = tiny.clear_prompt("qwen3_5", 12, 30)
    chain = make_chain("qwen3_5", (3,), True, place=HeadPlace.LOADED)
    assert chain.draft_role is not None
    draft = FlakyDraft(chain.draft_role)
    monkeypatch.setitem(chain.directory.drafts, DRAFT_ADDRESS, draft)

    async with chain.session() as client:
        await client.prefill(prompt[:-1])
        await client.step(DECODE, prompt[-1:], BLOCK - 1)
        draft.error = error
        await client.session.save_snapshot(SnapshotSave("a", client.length))
        failure = await anext(client.events)
        assert isinstance(failure, Failure)
        assert failure.reason is FailureReason.DRAFT_LOST
        assert error.message in failure.message
        saved = await anext(client.events)
        assert isinstance(saved, SnapshotSaved)
        assert [part.refusal for part in saved.parts] == ["", "", error.message]
        assert saved.parts[-1].location.stage is None
        assert chain.draft_role.open_sessions == 0

        assert await client.plain(truth[:1], 5) == truth[1:6]
        again = await client.save("b", "a")
        assert [part.refusal for part in again.parts] == ["", "", "the draft was lost"]
        assert await client.plain(truth[5:6], 5) == truth[6:11]
    # The stages have it; a session without a draft may take it up.
    async with chain.session(draft=None) as client:
        await client.restore("a", prompt)
        assert (await client.resume())[0].token_ids == (truth[0],)


async def test_a_draft_that_does_not_keep_the_prefix(tiny: Tiny, make_chain: MakeChain) -> None:
    """A prefix kept by a session without a draft is NOT_FOUND to one with a draft."""
    prompt, truth = tiny.clear_prompt("qwen3_5", 12, 30)
    for options in ({"place": HeadPlace.LOADED}, {}):
        chain = make_chain("qwen3_5", (), True, **options)
        async with chain.session(draft=None) as client:
            await client.step(PREFILL, prompt)
            assert [part.location.stage for part in (await client.save("a")).parts] == [0]
        async with chain.session() as client:
            with pytest.raises(NotFound, match="no prefix a is kept here"):
                await client.restore("a", prompt)
        async with chain.session(draft=None) as client:
            await client.restore("a", prompt)
            assert (await client.resume())[0].token_ids == (truth[0],)
        async with chain.session() as client:
            assert (await client.speculate(prompt, 10)).tokens == truth[:10]


# --- what comes from below


async def test_an_answer_to_no_save_ends_the_session(make_chain: MakeChain, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage below that confirms what nobody asked to keep has failed."""
    client = await upstream_of(make_chain("qwen3_5", (3,)), ScriptedStage(SnapshotSaved("a", 9, ())), monkeypatch)
    [failure] = [event async for event in client.events]
    assert isinstance(failure, Failure)
    assert (failure.reason, failure.code) == (FailureReason.STAGE_FAILED, "FAILED_PRECONDITION")
    assert "snapshot_saved a came unasked" in failure.message
    await client.session.close()


# --- over sockets


class Served:
    """A chain whose stages, and whose draft in a worker of its own, reach each other through real servers."""

    def __init__(self, chain: Chain, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._chain, self._folder, self._monkeypatch = chain, folder, monkeypatch
        self._servers: list[Server] = []
        self._channels: list[grpc.aio.Channel] = []

    async def __aenter__(self) -> RemoteStage:
        chain = self._chain
        if chain.place is not HeadPlace.SHARED and chain.draft_role is not None:
            channel, address = await self._serve(DraftServicer(chain.draft_role).register)
            remote: Any = RemoteDraft(channel, address)
            remote.describe = chain.draft_role.describe
            self._monkeypatch.setitem(chain.directory.drafts, DRAFT_ADDRESS, remote)
        for index in range(len(chain.roles) - 1, -1, -1):
            channel, address = await self._serve(StageServicer(chain.roles[index]).register)
            stage = RemoteStage(channel, address)
            if index:
                self._monkeypatch.setitem(chain.directory.stages, f"stage:{index}", stage)
        return stage

    async def _serve(self, register: Any) -> tuple[grpc.aio.Channel, str]:
        server = Server(f"unix:{self._folder}/{len(self._servers)}.sock", [register])
        await server.start()
        self._servers.append(server)
        self._channels.append(await connect(server.address, timeout_s=2.0))
        return self._channels[-1], server.address

    async def __aexit__(self, *_: object) -> None:
        for channel in self._channels:
            await channel.close()
        for server in self._servers:
            await server.stop(0)


async def no_sessions(chain: Chain) -> None:
    async with asyncio.timeout(5):
        while any(role.open_sessions for role in chain.roles):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("missing", [0, 1, 2, 3])
async def test_one_worker_that_lost_the_prefix(
    tiny: Tiny, make_chain: MakeChain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: int
) -> None:
    """Whichever of three stages and the draft lost it, the caller learns NOT_FOUND and where; a cold session works."""
    prompt, truth = tiny.clear_prompt("qwen3_5", 12, 30)
    chain = make_chain("qwen3_5", (2, 5), True, place=HeadPlace.LOADED)
    async with Served(chain, tmp_path, monkeypatch) as stage:
        client = Client(await stage.open(chain.request()))
        await client.prefill(prompt)
        saved = await client.save("a")
        assert [part.location.stage for part in saved.parts] == [0, 1, 2, None]
        await client.session.close()
        assert chain.stores[missing].free("a")

        client = Client(await stage.open(chain.request()))
        # A caller need not wait before it goes on.
        await client.session.restore_snapshot(SnapshotRestore("a", 12, tuple(prompt)))
        await client.session.forward(client.frame(RESUME, (), base_position=12))
        if missing == 0:
            with pytest.raises(NotFound, match="no prefix a is kept here") as caught:
                await anext(client.events)
            assert caught.value.reason == "SNAPSHOT_MISSING"
        else:
            failures = [event async for event in client.events]
            assert isinstance(failures[-1], Failure)
            assert (failures[-1].reason, failures[-1].code) == (FailureReason.STAGE_FAILED, "NOT_FOUND")
            # The draft is the last stage's.
            assert failures[-1].location.stage == min(missing, 2)
            assert not any(isinstance(event, Commit) for event in failures)
        await client.session.close()
        await no_sessions(chain)

        client = Client(await stage.open(chain.request()))
        assert (await client.speculate(prompt, 20)).tokens == truth[:20]
        await client.session.close()
        await no_sessions(chain)


async def test_a_whole_life_over_sockets(
    tiny: Tiny, make_chain: MakeChain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves among chunks that are on their way, and everything restored from them, through real servers."""
    prompt, truth = tiny.clear_prompt("qwen3_5", 100, 30)
    chain = make_chain("qwen3_5", (2, 5), True, place=HeadPlace.LOADED)
    async with Served(chain, tmp_path, monkeypatch) as stage:
        client = Client(await stage.open(chain.request()))
        for first in range(0, 100, 20):
            await client.send(client.frame(PREFILL, prompt[first : first + 20], base_position=first))
            parent = f"at {first}" if first else None
            await client.session.save_snapshot(SnapshotSave(f"at {first + 20}", first + 20, parent))
        for last in range(20, 101, 20):
            assert (await client.commit()).length == last
            saved = await anext(client.events)
            assert isinstance(saved, SnapshotSaved)
            assert (saved.length, [part.refusal for part in saved.parts]) == (last, [""] * 4)
            assert [part.location for part in saved.parts] == [
                *(Location(i, f"host-{i}", "cpu", f"stage:{i}") for i in range(3)),
                Location(None, "draft-host", "cpu", DRAFT_ADDRESS),
            ]
        await client.session.close()
        for last in (20, 60, 100):
            client = Client(await stage.open(chain.request()))
            await client.restore(f"at {last}", prompt[:last])
            if last == 100:
                commit, _ = await client.resume(BLOCK - 1)
                assert list(commit.token_ids) == truth[:1]
                answer = (await client.speculate(truth[:1], 20)).tokens
                assert answer == truth[1:21]
            else:
                assert (await client.speculate(prompt[last:], 20)).tokens == truth[:20]
            await client.session.close()
        await no_sessions(chain)


async def test_a_refused_save_ends_the_session_with_its_reason(
    make_chain: MakeChain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a stream a save out of step is the status of the session, with the place, and everything is freed."""
    chain = make_chain("qwen3_5", (3,))
    async with Served(chain, tmp_path, monkeypatch) as stage:
        client = Client(await stage.open(chain.request()))
        await client.step(PREFILL, ids(12))
        await client.session.save_snapshot(SnapshotSave("a", 11))
        with pytest.raises(FailedPrecondition, match="12 tokens are committed") as caught:
            await anext(client.events)
        assert (caught.value.reason, caught.value.where["stage"]) == ("OUT_OF_STEP", "0")
        await client.session.close()
        await no_sessions(chain)


async def test_a_caller_that_is_gone_while_a_save_is_on_its_way(
    make_chain: MakeChain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the caller leaves before a copy is made, what came of it is either kept or gone: no room stays taken."""
    chain = make_chain("qwen3_5", (3,))
    async with Served(chain, tmp_path, monkeypatch) as stage:
        for blocked in range(2):
            client = Client(await stage.open(chain.request()))
            await client.step(PREFILL, ids(12))
            release = threading.Event()
            job = chain.threads[blocked].submit(release.wait)
            await client.session.save_snapshot(SnapshotSave(f"a{blocked}", 12))
            async with asyncio.timeout(5):
                while not any(store.held_bytes for store in chain.stores):
                    await asyncio.sleep(0.01)
            await client.session.close()
            async with asyncio.timeout(5):
                while chain.roles[0].open_sessions:
                    await asyncio.sleep(0.01)
            release.set()
            await job
            await no_sessions(chain)
            async with asyncio.timeout(5):
                while any(store.held_bytes != sum(snapshot.size_bytes for snapshot in store) for store in chain.stores):
                    await asyncio.sleep(0.01)
