"""Steps that stages compute together go from one to the next in one frame, and what comes of them is what it was."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest

from services.errors import ResourceExhausted
from services.messages.batch_frames import StepBatch
from services.messages.description import FeatureTransport, HeadPlace
from services.messages.steps import (
    Commit,
    Failure,
    Forward,
    SamplingParams,
    SnapshotRestore,
    SnapshotRestored,
    StepKind,
)
from shard_worker.batches import step_batches
from shard_worker.batches.step_batches import StepBatches
from shard_worker.batches.waiting_steps import WaitingSteps
from shard_worker.session.relay import RelaySession
from shard_worker.session.session import TargetSession
from shard_worker.stage.stage import StepInput
from tests.shard_worker.chain import Chain
from tests.shard_worker.session.session_memory import stages_of
from tests.shard_worker.session.test_following import follow, tokens_of
from tests.shard_worker.session.test_step_batches import COUNT, REQUESTS, BlocksMadeAtOnce, answer, produced
from tests.shard_worker.session.watched_stage import watch
from tests.shard_worker.tiny import Tiny, ids


def always(_: object) -> bool:
    return True


@pytest.fixture
def new_chain(tiny: Tiny) -> Iterator[Callable[..., Chain]]:
    """Makes chains with a draft, whose lanes carry what the test says."""
    chains: list[Chain] = []

    def make(
        name: str,
        cuts: Sequence[int],
        carries_batch: Callable[[StepBatch], bool] = always,
        carries: Callable[[Forward], bool] = always,
        **options: Any,
    ) -> Chain:
        draft = tiny.draft(name, "session", target_layer_ids=(0, 1, 3))
        chain = Chain(
            tiny.path(name),
            cuts,
            draft=draft,
            dtype="bfloat16",
            carries=carries,
            carries_batch=carries_batch,
            **options,
        )
        chains.append(chain)
        return chain

    yield make
    for chain in chains:
        chain.shutdown()


async def answers_alone(chain: Chain) -> list[list[tuple[object, ...]]]:
    """Return each request's answers with nobody beside it: such steps go their own way."""
    alone = [produced(await answer(chain, request, batch_invariant_rows=16)) for request in REQUESTS]
    assert [batches_to(chain, index) for index in range(1, len(chain.roles))] == [[]] * (len(chain.roles) - 1)
    return alone


def batches_to(chain: Chain, stage: int) -> list[int]:
    """Return of how many steps each batch was that went to a stage."""
    upper, _ = chain.directory.batch_ways[f"stage:{stage}"]
    return [len(batch.steps) for batch in upper.sent]


@pytest.mark.parametrize(("name", "cuts"), [pytest.param("qwen3", (1,), marks=pytest.mark.slow), ("qwen3_5", (1, 3))])
async def test_answers_are_those_of_each_alone(
    new_chain: Callable[..., Chain], name: str, cuts: tuple[int, ...]
) -> None:
    """Of requests of every kind at once; each stage behind the first one computes the batches that come, and sends none
    of them on in parts."""
    chain = new_chain(name, cuts)
    alone = await answers_alone(chain)
    for _ in range(20):
        answers = await asyncio.gather(*(answer(chain, request, batch_invariant_rows=16) for request in REQUESTS))
        assert [produced(commits) for commits in answers] == alone
        if max(batches_to(chain, 1)) > 1:
            break
    for stage in range(1, len(chain.roles)):
        assert max(batches_to(chain, stage)) > 1
    if len(chain.roles) > 2:
        # None is cut, as all its steps are of one kind here; two that wait at the same time may become one.
        to_second, to_last = batches_to(chain, 1), batches_to(chain, 2)
        assert (sum(to_last), len(to_last) <= len(to_second)) == (sum(to_second), True)


@pytest.mark.parametrize(("name", "cuts"), [("qwen3", (1,)), pytest.param("qwen3_5", (1, 3), marks=pytest.mark.slow)])
async def test_steps_begin_before_the_results_of_others_are_there(
    new_chain: Callable[..., Chain], monkeypatch: pytest.MonkeyPatch, name: str, cuts: tuple[int, ...]
) -> None:
    """Where a GPU computes them: what it overwrites is not needed, and who needs it is waited for."""
    # More batches than stages.
    monkeypatch.setattr(WaitingSteps, "_share", lambda waiting, session: 2)
    monkeypatch.setattr(step_batches, "looks_without_sleep", lambda: True)
    behind: list[int] = []
    settle = StepBatches._settle_first

    def noting(batches: StepBatches, errors: list[Exception]) -> None:
        if batches._behind is not None:
            behind.append(len(batches._behind.rows))
        settle(batches, errors)

    monkeypatch.setattr(StepBatches, "_settle_first", noting)
    chain = new_chain(name, cuts)
    alone = await answers_alone(chain)
    for role in chain.roles:
        watch(role, looks=3)
    for _ in range(20):
        answers = await asyncio.gather(*(answer(chain, request, batch_invariant_rows=16) for request in REQUESTS * 2))
        assert [produced(commits) for commits in answers] == alone * 2
        if len(behind) > 4:
            return
    pytest.fail(f"sessions of steps behind others: {behind}")


@pytest.mark.parametrize(("name", "cuts"), [pytest.param("qwen3", (1,), marks=pytest.mark.slow), ("qwen3_5", (1, 3))])
async def test_drafted_steps_begin_before_the_results_of_others_are_there(
    new_chain: Callable[..., Chain], monkeypatch: pytest.MonkeyPatch, name: str, cuts: tuple[int, ...]
) -> None:
    """Where a GPU computes them: features leave with the rows that they are of, and blocks are issued with their steps,
    so that steps of other sessions are launched on every stage before anything is read."""
    # More batches than stages.
    monkeypatch.setattr(WaitingSteps, "_share", lambda waiting, session: 2)
    monkeypatch.setattr(step_batches, "looks_without_sleep", lambda: True)
    behind: dict[StepBatches, int] = {}
    settle = StepBatches._settle_first

    def noting(batches: StepBatches, errors: list[Exception]) -> None:
        launched = batches._launched
        assert launched is not None
        if batches._behind is not None and launched.is_featured:
            behind[batches] = behind.get(batches, 0) + 1
        settle(batches, errors)

    monkeypatch.setattr(StepBatches, "_settle_first", noting)
    chain = new_chain(name, cuts, transport=FeatureTransport.SUM)

    async def answer_of(seed: int) -> list[int]:
        prompt = ids(9 + seed, seed=seed)
        async with chain.session(batch_invariant_rows=16) as client:
            await client.prefill(prompt[:-1], 8)
            return tokens_of(await follow(client, prompt[-1], 10, 4))

    alone = [await answer_of(seed) for seed in range(6)]
    BlocksMadeAtOnce(monkeypatch)
    for role in chain.roles:
        # The last one computes the longest; what comes from there meanwhile waits on the others.
        watch(role, looks=3 if role is chain.roles[-1] else 1500)
    for _ in range(20):
        assert await asyncio.gather(*map(answer_of, range(6))) == alone
        if len(behind) == len(chain.roles) and min(behind.values()) > 2:
            return
    pytest.fail(f"drafted steps before others, on each stage: {[*behind.values()]}")


@pytest.mark.parametrize(("name", "cuts"), [pytest.param("qwen3", (1,), marks=pytest.mark.slow), ("qwen3_5", (1, 3))])
async def test_prepared_steps_begin_as_they_come(
    new_chain: Callable[..., Chain], monkeypatch: pytest.MonkeyPatch, name: str, cuts: tuple[int, ...]
) -> None:
    """On every stage, where a GPU computes them: before all that was said of them is taken up. Answers of all lengths
    are those of each alone; one ends by a stop token, one is closed while others go on, and some come later."""
    monkeypatch.setattr(step_batches, "looks_without_sleep", lambda: True)
    begun: dict[StepBatches, list[int]] = {}
    begin_prepared = StepBatches.begin_prepared

    def noting(batches: StepBatches, steps: Sequence[Any], *args: Any) -> None:
        begin_prepared(batches, steps, *args)
        if batches._expected:
            begun.setdefault(batches, []).append(len(batches._expected))

    monkeypatch.setattr(StepBatches, "begin_prepared", noting)
    chain = new_chain(name, cuts)
    lengths, plain = [20, 8, 14, 26, 20, 12], {"draft": None, "batch_invariant_rows": 16}
    fields: list[dict[str, Any]] = [{} for _ in lengths]
    fields[2] = {"sampling": SamplingParams(temperature=0.9, seed=7, top_k=20), "prompt_length": 7}

    async def answer_of(number: int, first_come: float = 0.0) -> list[int]:
        await asyncio.sleep(first_come)
        prompt = ids(5 + number, seed=number)
        async with chain.session(**plain, **fields[number]) as client:
            await client.prefill(prompt[:-1])
            tokens = tokens_of(await follow(client, prompt[-1], lengths[number]))
            # Nothing is computed behind the answer.
            more = await follow(client, tokens[-1], 2)
        return [*tokens, *tokens_of(more)]

    fields[4] = {"stop_token_ids": frozenset({(await answer_of(4))[9]})}
    alone = [await answer_of(number) for number in range(len(lengths))]
    for role in chain.roles:
        watch(role, looks=3)

    async def leave() -> None:
        async with chain.session(**plain) as client:
            await client.prefill(ids(9, seed=9))
            await client.send(client.frame(StepKind.DECODE, [1], more=40))
            await client.commit()

    for _ in range(10):
        answers = [answer_of(number, 0.02 * (number > 3)) for number in range(len(lengths))]
        found = await asyncio.gather(*answers, leave())
        assert found[: len(alone)] == alone
        if len(begun) == len(chain.roles) and all(max(counts) > 1 for counts in begun.values()):
            break
    else:
        pytest.fail(f"sessions whose steps began as they came, on each stage: {[*map(max, begun.values())]}")
    for upper, lower in chain.directory.batch_ways.values():
        assert upper.sent_ahead
        assert lower.told
    # Nothing of sessions that are closed is held.
    for role in chain.roles:
        await role.resources.thread.submit(int)
        assert not role.batches._prepared
        assert not role.batches._expected
        assert not role.batches._away._left_ns
        assert not role.batches._away._batches


@pytest.mark.parametrize("place", [HeadPlace.SHARED, HeadPlace.PROJECTED])
async def test_any_way_at_any_time(new_chain: Callable[..., Chain], place: HeadPlace) -> None:
    """Whether a step goes together with others, through its session's lane or by its stream, and wherever the draft
    is: nothing comes before what it stands behind."""
    numbers = random.Random(5)

    def now_and_then(_: object) -> bool:
        return numbers.random() < 0.5

    chain = new_chain("qwen3", (1, 3), carries_batch=now_and_then, carries=now_and_then, place=place)
    alone = await answers_alone(chain)
    for _ in range(2):
        late = [asyncio.sleep(0.01 * numbers.random() * index) for index in range(len(REQUESTS))]

        async def begin(index: int, late: Sequence[Any] = tuple(late)) -> Any:
            await late[index]
            return await answer(chain, REQUESTS[index], batch_invariant_rows=16)

        answers = await asyncio.gather(*map(begin, range(len(REQUESTS))))
        assert [produced(commits) for commits in answers] == alone


async def test_blocks_that_no_draft_proposed(new_chain: Callable[..., Chain]) -> None:
    """The next step may come before the draft has taken the features of the last one, and so before its commit."""
    chain = new_chain("qwen3_5", (1,))

    async def tokens(seed: int) -> list[int]:
        async with chain.session(batch_invariant_rows=16) as client:
            # Some of these are right by chance, most are not.
            return (await client.speculate(ids(20, seed=seed), 12, script=lambda known: known[-4:])).tokens

    alone = [await tokens(seed) for seed in range(3)]
    assert await asyncio.gather(*map(tokens, range(3))) == alone
    assert batches_to(chain, 1)


class SlowStream:
    """The way to a session on the next stage, on which nothing arrives until `arrive`; all does in its order then."""

    def __init__(self, session: TargetSession) -> None:
        self._session = session
        self._sent: list[Callable[[], Awaitable[None]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    async def forward(self, forward: Forward) -> None:
        self._sent.append(functools.partial(self._session.forward, forward))

    async def restore_snapshot(self, restore: SnapshotRestore) -> None:
        self._sent.append(functools.partial(self._session.restore_snapshot, restore))

    async def arrive(self) -> None:
        for take in self._sent:
            await take()


async def test_no_step_overtakes_the_prefix_that_it_begins_from(new_chain: Callable[..., Chain]) -> None:
    """A step beside those of others waits for the stages below to restore a prefix, which goes the session's own way;
    the next one goes together with others again."""
    chain = new_chain("qwen3_5", (1,))
    prompt = ids(20)
    async with chain.session(draft=None) as client:
        expected = await client.plain(prompt, 2)
    async with chain.session(draft=None) as beside, chain.session(draft=None) as client:
        await beside.prefill(prompt[:-1])
        await beside.save("kept")
        first, second = stages_of(client)
        assert isinstance(first, RelaySession)
        stream: Any = SlowStream(second)
        first.downstream = stream
        await client.session.restore_snapshot(SnapshotRestore("kept", len(prompt) - 1, tuple(prompt[:-1])))
        together = len(batches_to(chain, 1))
        await client.send(Forward(0, len(prompt) - 1, (prompt[-1],), StepKind.DECODE))
        assert len(batches_to(chain, 1)) == together
        await stream.arrive()
        assert isinstance(await anext(client.events), SnapshotRestored)
        commit = await client.commit()
        first.downstream = second
        assert commit.token_ids == (expected[0],)
        commit, _ = await client.step(StepKind.DECODE, commit.token_ids)
        assert commit.token_ids == (expected[1],)
        assert len(batches_to(chain, 1)) == together + 1


async def test_a_session_that_ends_leaves_the_others(
    new_chain: Callable[..., Chain], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that finds no memory on the last stage ends with that error, and those that came with it go on."""
    chain = new_chain("qwen3", (1,))
    prompt = REQUESTS[0].prompt
    expected = tokens_of(await answer(chain, REQUESTS[0]))
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(chain.session(draft=None)) for _ in range(3)]
        for client in clients:
            await client.prefill(prompt[:-1])
        lost = stages_of(clients[1])[-1]._device
        begin = lost.begin

        def begin_or_fail(forward: Forward) -> StepInput:
            if forward.more < COUNT - 2:
                raise ResourceExhausted("the device has no memory left")
            return begin(forward)

        monkeypatch.setattr(lost, "begin", begin_or_fail)
        follows = [asyncio.ensure_future(follow(client, prompt[-1], COUNT)) for client in (clients[0], clients[2])]
        await clients[1].send(clients[1].frame(StepKind.DECODE, [prompt[-1]], more=COUNT))
        while not isinstance(event := await anext(clients[1].events), Failure):
            assert isinstance(event, Commit)
        assert (event.code, event.location.stage) == ("RESOURCE_EXHAUSTED", 1)
        assert [tokens_of(await one) for one in follows] == [expected] * 2
