"""Where a stage is lost the others need not compute again what they have computed for a session."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from services.errors import CANCELLED, FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable
from services.messages.description import FeatureTransport, HeadPlace
from services.messages.steps import Failure, FailureReason, Forward, OpenSession, SessionRest, StepKind
from services.messages.tensors import WireTensor
from shard_worker.cache.page_pool import PagePool
from shard_worker.drafting.link import LocalDraftLink
from shard_worker.model.features import Features
from shard_worker.session.last_stage import LastStageSession
from shard_worker.session.resting import RestingSessions
from shard_worker.session.sent_rows import RowBudget, SentRows
from shard_worker.stage.stage import StageState
from tests.combinations import covering
from tests.shard_worker.chain import BLOCK, Chain, Client, MakeChain
from tests.shard_worker.session.watched_stage import watch
from tests.shard_worker.tiny import ids

PROMPT, COUNT, CHUNK = ids(20), 14, 8
NAME = "a-name-nobody-guesses"


@pytest.fixture(autouse=True)
def nothing_left(make_chain: MakeChain) -> Iterator[None]:
    """Whatever became of them: no session, no memory of one and none of its rows is left."""
    yield
    roles = [role for chain in make_chain.chains.values() for role in chain.roles]
    for role in roles:
        role.resting.clear()

    def left() -> list[tuple[int, int, int]]:
        return [(len(role.sessions), len(role.resting), role.resting.rows.used_bytes) for role in roles]

    if any(map(any, left())):
        # What only cycles hold is not left: collecting them takes a quarter of a second.
        gc.collect()
    assert not any(map(any, left()))


def rest(token_ids: list[int] | None = None, **changes: Any) -> SessionRest:
    return replace(SessionRest(NAME, 60_000, tuple(token_ids or ())), **changes)


def held(client: Client) -> list[int]:
    return [stage.held_length for stage in client.session.stages]


def computed(chain: Chain) -> list[int]:
    """How many rows each stage has computed so far."""
    return [role.batch_counts.rows for role in chain.roles]


async def lose(chain: Chain, client: Client, stage: int) -> None:
    """Lose a stage of the only session: those before it read that off its events, those behind it lose their caller."""
    [lost] = chain.roles[stage].sessions
    for behind in chain.roles[stage + 1 :]:
        for session in [*behind.sessions]:
            await session.close(CANCELLED)
    if not stage:
        await lost.close(CANCELLED)
        return
    # What is gone leaves nothing.
    lost.forget()
    lost.fail(Unavailable("the stage is gone"))
    async for event in client.events:
        if isinstance(event, Failure):
            assert event.reason is FailureReason.LINK_BROKEN
            break
    else:
        raise AssertionError("the session went on")


async def go_on(
    client: Client, known: list[int], count: int, propose: int = 0, blocks: dict[int, tuple[int, ...]] | None = None
) -> list[int]:
    """Compute the known tokens but for the last one as a coordinator does, then the next ones. Returns all of them.
    blocks: takes what the draft proposes, by how many tokens are known."""
    edges = sorted({len(PROMPT), len(known) - 1, *(at for at in held(client) if at < len(known))})
    client.length = min(held(client))
    while client.length < len(known) - 1:
        end = min(min(edge for edge in edges if edge > client.length), client.length + CHUNK)
        rows = known[client.length : end]
        kind = StepKind.VERIFY if client.length >= len(PROMPT) and len(rows) > 1 else StepKind.PREFILL
        await client.step(kind, rows)
        assert client.length == end
    tokens = list(known[len(PROMPT) :])
    block: tuple[int, ...] = ()
    while len(tokens) < count:
        last = tokens[-1] if tokens else known[-1]
        kind = StepKind.VERIFY if block else StepKind.DECODE
        commit, block = await client.step(kind, [last, *block], propose)
        tokens += commit.token_ids
        if blocks is not None:
            blocks[len(PROMPT) + len(tokens)] = block
    return tokens


LOST = [((2,), 1), ((2,), 0), ((1, 3), 2), ((1, 3), 1), ((1, 3), 0)]
"""Where the layers are cut, and which stage is lost."""


@pytest.mark.parametrize(
    ("name", "cuts", "lost", "drafted"),
    covering(
        (name, cuts, lost, drafted)
        for name in ("qwen3_5", "qwen3")
        for cuts, lost in LOST
        for drafted in (False, True, HeadPlace.LOADED)
    ),
)
async def test_only_the_lost_stage_computes_anew(
    name: str, cuts: tuple[int, ...], lost: int, drafted: bool | HeadPlace, make_chain: MakeChain
) -> None:
    """Also of recurrent layers, and with a draft beside the last stage or elsewhere: it gets the features of all rows,
    or its context rests. Its blocks are those of an undisturbed session."""
    options = {"place": drafted} if isinstance(drafted, HeadPlace) else {}
    chain, propose = make_chain(name, cuts, bool(drafted), **options), BLOCK - 1 if drafted else 0
    expected_blocks: dict[int, tuple[int, ...]] = {}
    blocks: dict[int, tuple[int, ...]] = {}
    async with chain.session() as undisturbed:
        expected = await go_on(undisturbed, PROMPT, COUNT + BLOCK, propose, expected_blocks)
    async with chain.session(rest=rest()) as client:
        tokens = await go_on(client, PROMPT, COUNT, propose)
        await lose(chain, client, lost)
    known = [*PROMPT, *tokens]
    held_by = [index != lost for index in range(len(cuts) + 1)]
    before = computed(chain)
    async with chain.session(rest=rest(known)) as client:
        assert [at > 0 for at in held(client)] == held_by
        assert all(at >= len(known) - 1 for at in held(client) if at)
        assert await go_on(client, known, COUNT + BLOCK, propose, blocks) == expected
    assert blocks == {at: block for at, block in expected_blocks.items() if at > len(known)}
    assert bool(blocks)
    rows = [behind - ahead for behind, ahead in zip(computed(chain), before, strict=True)]
    new_rows = rows[lost] - (len(known) - 1)
    for at, is_held in zip(rows, held_by, strict=True):
        # A recurrent stage may have computed the row of the last token, too.
        assert at in ((new_rows, new_rows - 1) if is_held else (rows[lost],))


async def lost_behind(chain: Chain, count: int = COUNT, **changes: Any) -> list[int]:
    """Lose the last stage of a session, and return its tokens. changes: of how it rests."""
    async with chain.session(rest=rest(**changes)) as client:
        tokens = await go_on(client, PROMPT, count)
        await lose(chain, client, len(chain.roles) - 1)
    return [*PROMPT, *tokens]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
async def test_a_stage_that_is_lost_while_another_one_computes(name: str, make_chain: MakeChain) -> None:
    """The rows of the step that was on the device when the session ended are held too: recurrent layers, which cannot
    be cut to what was sent, need not begin anew."""
    chain = make_chain(name, (2,))
    async with chain.session() as undisturbed:
        expected = await go_on(undisturbed, PROMPT, COUNT + 4)
    began, goes_on = threading.Event(), threading.Event()
    known = [*PROMPT, *expected[:COUNT]]

    def hold(state: StageState) -> None:
        if state.length == len(known) - 1 and not began.is_set():
            began.set()
            assert goes_on.wait(20)

    watch(chain.roles[0], before_step=hold)
    try:
        async with chain.session(rest=rest()) as client:
            assert await go_on(client, PROMPT, COUNT) == expected[:COUNT]
            stepping = asyncio.ensure_future(client.step(StepKind.DECODE, known[-1:]))
            assert await asyncio.to_thread(began.wait, 20)
            await lose(chain, client, 1)
            stepping.cancel()
    finally:
        goes_on.set()
    before = computed(chain)[0]
    async with chain.session(rest=rest(known)) as client:
        assert held(client) == [len(known) - (name == "qwen3"), 0]
        assert await go_on(client, known, COUNT + 4) == expected
    # The step that was on the device may be counted only now.
    assert computed(chain)[0] - before <= 5


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
async def test_a_stage_that_is_lost_while_the_last_one_computes_a_chunk(name: str, make_chain: MakeChain) -> None:
    """The chunk of the prompt that was on the device is held by the last stage too."""
    chain = make_chain(name, (2,))
    async with chain.session() as undisturbed:
        expected = await go_on(undisturbed, PROMPT, 4)
    began, goes_on = threading.Event(), threading.Event()

    def hold(state: StageState) -> None:
        if state.length == CHUNK and not began.is_set():
            began.set()
            assert goes_on.wait(20)

    watch(chain.roles[1], before_step=hold)
    try:
        async with chain.session(rest=rest()) as client:
            await client.step(StepKind.PREFILL, PROMPT[:CHUNK])
            stepping = asyncio.ensure_future(client.step(StepKind.PREFILL, PROMPT[CHUNK : 2 * CHUNK]))
            assert await asyncio.to_thread(began.wait, 20)
            await lose(chain, client, 0)
            stepping.cancel()
    finally:
        goes_on.set()
    async with chain.session(rest=rest(PROMPT)) as client:
        assert held(client) == [0, 2 * CHUNK]
        assert await go_on(client, PROMPT, 4) == expected


async def test_it_rests_for_its_time_alone(make_chain: MakeChain) -> None:
    chain = make_chain("qwen3", (2,))
    known = await lost_behind(chain, rest_ms=1)
    while len(chain.roles[0].resting):
        await asyncio.sleep(0.001)
    async with chain.session(rest=rest(known)) as client:
        assert held(client) == [0, 0]


async def test_another_name_takes_nothing_up(make_chain: MakeChain) -> None:
    chain = make_chain("qwen3", (2,))
    known = await lost_behind(chain)
    async with chain.session(rest=rest(known, session_id="b-name-nobody-guesses")) as client:
        assert held(client) == [0, 0]
    async with chain.session(rest=rest(known)) as client:
        assert held(client) == [len(known) - 1, 0]


@pytest.mark.parametrize("drafted", [False, "session", "sliding"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
async def test_a_token_that_was_not_told(name: str, drafted: bool | str, make_chain: MakeChain) -> None:
    """The first stage is lost with an answer on its way: its token is chosen again, from the same row where layers are
    recurrent, and what follows is the same."""
    chain, propose = make_chain(name, (2,), drafted), BLOCK - 1 if drafted else 0
    async with chain.session(rest=rest()) as client:
        known = [*PROMPT, *await go_on(client, PROMPT, COUNT - 1)]
        await client.step(StepKind.DECODE, known[-1:], propose)
        await lose(chain, client, 0)
    expected_blocks: dict[int, tuple[int, ...]] = {}
    blocks: dict[int, tuple[int, ...]] = {}
    before = computed(chain)
    async with chain.session() as undisturbed:
        expected = await go_on(undisturbed, known, COUNT + BLOCK, propose, expected_blocks)
    between = computed(chain)
    async with chain.session(rest=rest(known)) as client:
        at = len(known) if name == "qwen3_5" else len(known) - 1
        assert held(client) == [0, at]
        assert await go_on(client, known, COUNT + BLOCK, propose, blocks) == expected
    assert blocks == expected_blocks
    rows = [behind - ahead for behind, ahead in zip(computed(chain), between, strict=True)]
    all_rows = [behind - ahead for behind, ahead in zip(between, before, strict=True)]
    assert rows == [all_rows[0], all_rows[1] - at]


@pytest.mark.parametrize("taken", [True, False])
async def test_features_that_the_draft_has_not_taken(taken: bool, make_chain: MakeChain) -> None:
    """While no blocks are asked for the draft's context lags behind, and catches up when the session is taken up. What
    the draft never got ends what is held of its stage."""
    chain = make_chain("qwen3", (2,), "session")
    async with chain.session(rest=rest()) as client:
        known = [*PROMPT, *await go_on(client, PROMPT, COUNT)]
        [session] = chain.roles[1].sessions
        assert isinstance(session, LastStageSession)
        draft = session.draft
        assert isinstance(draft, LocalDraftLink)
        assert draft.state.length < len(known) - 1
        if not taken:
            draft.with_kept(Features(), 0)
        at = len(known) - 1 if taken else draft.state.length
        await lose(chain, client, 0)
    expected_blocks: dict[int, tuple[int, ...]] = {}
    blocks: dict[int, tuple[int, ...]] = {}
    async with chain.session() as undisturbed:
        expected = await go_on(undisturbed, known, COUNT + BLOCK, BLOCK - 1, expected_blocks)
    async with chain.session(rest=rest(known)) as client:
        assert held(client) == [0, at]
        assert await go_on(client, known, COUNT + BLOCK, BLOCK - 1, blocks) == expected
    assert blocks == expected_blocks


@pytest.mark.parametrize("before", [False, True])
async def test_what_is_forgotten_does_not_rest(before: bool, make_chain: MakeChain) -> None:
    """A stage whose caller is gone leaves its state to rest, unless it hears, before or later, that none was lost; so
    do those behind it."""
    chain = make_chain("qwen3", (1, 3))
    async with chain.session(rest=rest()) as client:
        await go_on(client, PROMPT, 2)
        [session] = chain.roles[1].sessions
        if before:
            await chain.roles[1].forget(NAME)
        await session.close(CANCELLED)
        assert [len(role.resting) for role in chain.roles] == ([0, 0, 0] if before else [0, 1, 1])
        await chain.roles[1].forget(NAME)
        assert [len(role.resting) for role in chain.roles] == [0, 0, 0]


async def test_it_is_taken_up_before_its_end_is_noticed(make_chain: MakeChain) -> None:
    """The new stage is there before the news of the lost one: what is opened anew ends the session that it was."""
    chain = make_chain("qwen3", (2,))
    async with chain.session() as undisturbed:
        expected = await go_on(undisturbed, PROMPT, COUNT + 4)
    async with chain.session(rest=rest()) as before:
        known = [*PROMPT, *await go_on(before, PROMPT, COUNT)]
        async with chain.session(rest=rest(known)) as client:
            assert held(client) == [len(known) - 1] * 2
            assert await go_on(client, known, COUNT + 4) == expected
        with pytest.raises(FailedPrecondition, match="the session is closed"):
            await before.step(StepKind.DECODE, [0])


async def test_what_is_closed_does_not_rest(make_chain: MakeChain) -> None:
    chain = make_chain("qwen3", (2,))
    async with chain.session(rest=rest()) as client:
        await go_on(client, PROMPT, 2)
    assert not len(chain.roles[0].resting)


@pytest.mark.parametrize(("name", "expected"), [("qwen3", len(PROMPT) + 3), ("qwen3_5", 0)])
async def test_other_tokens(name: str, expected: int, make_chain: MakeChain) -> None:
    """The state behind tokens that are not the caller's is of no use: attention is cut to those that are, and layers
    that are recurrent begin anew."""
    chain = make_chain(name, (2,))
    known = await lost_behind(chain)
    known[len(PROMPT) + 3] = (known[len(PROMPT) + 3] + 1) % 256
    async with chain.session(rest=rest(known)) as client:
        assert held(client) == [expected, 0]


@pytest.mark.parametrize("longer", [False, True])
async def test_a_session_of_another_shape(longer: bool, make_chain: MakeChain) -> None:
    """One that is longer, or computes rows otherwise, gets memory of its own."""
    chain = make_chain("qwen3", (2,))
    known = await lost_behind(chain)
    changes: dict[str, Any] = {"max_length": 500} if longer else {"batch_invariant_rows": 16}
    async with chain.session(rest=rest(known), **changes) as client:
        assert held(client) == [0, 0]


async def test_a_stage_that_is_not_there_yet(make_chain: MakeChain) -> None:
    """Where the chain is not whole yet when it is opened anew, the state goes on to rest."""
    chain = make_chain("qwen3", (2,))
    known = await lost_behind(chain)
    with pytest.raises(KeyError):
        await chain.roles[0].open(_elsewhere(chain.request(rest=rest(known))))
    async with chain.session(rest=rest(known)) as client:
        assert held(client) == [len(known) - 1, 0]


def _elsewhere(request: OpenSession) -> OpenSession:
    [hop] = request.route
    return replace(request, route=(replace(hop, address="nobody:1"),))


async def test_rows_that_find_no_room(make_chain: MakeChain) -> None:
    """All is computed anew where they are not there to be sent again, with the same tokens."""
    chain = make_chain("qwen3", (2,))
    async with chain.session() as undisturbed:
        expected = await go_on(undisturbed, PROMPT, COUNT + 4)
    rows = chain.roles[0].resting.rows
    size_bytes, rows.size_bytes = rows.size_bytes, 4000
    try:
        known = await lost_behind(chain)
        assert rows.used_bytes == 0
        async with chain.session(rest=rest(known)) as client:
            assert held(client) == [0, 0]
            assert await go_on(client, known, COUNT + 4) == expected
    finally:
        rows.size_bytes = size_bytes


async def test_a_restored_prefix(make_chain: MakeChain) -> None:
    """Rows of a prefix that was restored were never sent: who begins behind it again gets what came later, who begins
    before it begins at once."""
    chain = make_chain("qwen3", (2,))
    async with chain.session() as client:
        await client.prefill(PROMPT[:8])
        await client.save("kept")
    for first_position, expected in ((8, [19, 0]), (0, [0, 0])):
        async with chain.session(rest=rest()) as client:
            await client.restore("kept", PROMPT[:8])
            await client.prefill(PROMPT[8:])
            await lose(chain, client, 1)
        async with chain.session(rest=rest(PROMPT, first_position=first_position)) as client:
            assert held(client) == expected
            if first_position:
                await client.restore("kept", PROMPT[:8])
                commit, _ = await client.step(StepKind.PREFILL, PROMPT[8:19])
                assert [timing.forward_ns > 0 for timing in commit.timings] == [False, True]
                commit, _ = await client.step(StepKind.DECODE, PROMPT[19:])
                restored = commit.token_ids
            else:
                assert (await client.plain(PROMPT, 1)) == [*restored]
    chain.free_snapshots()


@pytest.mark.parametrize(
    ("place", "transport"),
    [
        (HeadPlace.SHARED, FeatureTransport.SUM),
        (HeadPlace.LOADED, FeatureTransport.SUM),
        (HeadPlace.LOADED, FeatureTransport.SLICES),
    ],
)
async def test_a_restored_prefix_with_a_draft(
    place: HeadPlace, transport: FeatureTransport, make_chain: MakeChain
) -> None:
    """The context of a draft beside a stage that is not lost has the prefix already; one elsewhere takes it up, and
    then gets what was sent behind it."""
    chain = make_chain("qwen3", (2,), "session", place=place, transport=transport)
    async with chain.session() as client:
        await client.prefill(PROMPT[:8])
        await client.save("kept")
    async with chain.session() as client:
        await client.prefill(PROMPT[:-1])
        expected = await client.step(StepKind.DECODE, PROMPT[-1:], BLOCK - 1)
    async with chain.session(rest=rest()) as client:
        await client.restore("kept", PROMPT[:8])
        await client.prefill(PROMPT[8:-1])
        await client.step(StepKind.DECODE, PROMPT[-1:], BLOCK - 1)
        await lose(chain, client, 0)
    async with chain.session(rest=rest(PROMPT, first_position=8)) as client:
        assert held(client) == [0, len(PROMPT) - 1]
        restored = await client.restore("kept", PROMPT[:8])
        assert [part.size_bytes > 0 for part in restored.parts] == [True, False, place is HeadPlace.LOADED]
        await client.prefill(PROMPT[8:-1])
        commit, block = await client.step(StepKind.DECODE, PROMPT[-1:], BLOCK - 1)
        assert (commit.token_ids, block) == (expected[0].token_ids, expected[1])
        assert not (await client.save("longer")).parts[-1].refusal
    chain.free_snapshots()


async def test_a_whole_prompt_that_was_restored(make_chain: MakeChain) -> None:
    """A step without rows sends none that could be kept, and what follows is."""
    chain = make_chain("qwen3", (2,))
    async with chain.session() as client:
        await client.prefill(PROMPT)
        await client.save("whole")
    async with chain.session(rest=rest()) as client:
        await client.restore("whole", PROMPT)
        commit, _ = await client.resume()
        tokens = await go_on_from(client, list(commit.token_ids))
        await lose(chain, client, 1)
    known = [*PROMPT, *tokens]
    async with chain.session(rest=rest(known, first_position=len(PROMPT))) as client:
        assert held(client) == [len(known) - 1, 0]
    chain.free_snapshots()


async def go_on_from(client: Client, tokens: list[int]) -> list[int]:
    """Return the tokens and three more."""
    for _ in range(3):
        commit, _ = await client.step(StepKind.DECODE, tokens[-1:])
        tokens += commit.token_ids
    return tokens


async def test_what_does_not_fit_what_is_held(make_chain: MakeChain) -> None:
    """A step over the end of it, a prefix kept before that, and one restored behind it are refused."""
    chain = make_chain("qwen3", (2,))
    known = await lost_behind(chain)
    async with chain.session(rest=rest(known)) as client:
        [at, _] = held(client)
        with pytest.raises(InvalidArgument, match=f"rows 0 to {at + 1}, and {at} tokens are held"):
            await client.send(client.frame(StepKind.PREFILL, known))
    known = await lost_behind(chain)
    async with chain.session(rest=rest(known)) as client:
        await client.step(StepKind.PREFILL, known[:5])
        with pytest.raises(FailedPrecondition, match=f"{at} tokens are held: a prefix is kept behind"):
            await client.save("early")
    known = await lost_behind(chain)
    async with chain.session(rest=rest(known)) as client:
        with pytest.raises(FailedPrecondition, match=f"{at} tokens are held: say first_position"):
            await client.restore("behind", known)


async def test_what_rests_gives_way_first(make_chain: MakeChain) -> None:
    """Where pages end, and where rows find no room."""
    chain = make_chain("qwen3", (2,))
    resting = chain.roles[0].resting
    await lost_behind(chain)
    pool = PagePool(2048)
    pool.spare = resting.drop_one
    page = pool.page((64,), torch.uint8, torch.device("cpu"))
    assert len(resting) == 1
    del page
    with pytest.raises(ResourceExhausted, match="no memory is left"):
        pool.page((4000,), torch.uint8, torch.device("cpu"))
    assert not len(resting)
    await lost_behind(chain)
    assert resting.rows.take(resting.rows.size_bytes)
    assert not len(resting)
    resting.rows.take(-resting.rows.size_bytes)


def test_a_budget_counts_what_is_there() -> None:
    resting = RestingSessions(10)
    assert resting.rows.take(10)
    assert not resting.rows.take(1)
    resting.rows.take(-10)
    budget = RowBudget(0)
    sent = SentRows(budget)
    del sent
    assert budget.used_bytes == 0


def sent_step(tokens: int) -> Forward:
    activation = WireTensor("float32", (tokens, 2), bytes(8 * tokens))
    return Forward(0, 0, (1,) * tokens, StepKind.PREFILL, activation=activation)


def test_a_session_that_ends_while_its_rows_are_kept() -> None:
    """The event loop ends it while the device thread adds what was sent: neither fails, and nothing stays counted."""
    forgetting = []

    class Interrupted(RowBudget):
        def take(self, count: int) -> bool:
            thread = threading.Thread(target=sent.forget)
            forgetting.append(thread)
            thread.start()
            thread.join(0.05)
            return super().take(count)

    budget = Interrupted(1000)
    sent = SentRows(budget)
    sent.add(sent_step(4))
    [thread] = forgetting
    thread.join()
    assert (sent.first, budget.used_bytes) == (None, 0)


def test_rows_that_are_collected_while_others_are_counted() -> None:
    """Garbage may be collected at any place, also within the counting itself."""
    budget = RowBudget(32)
    sent = SentRows(budget)
    sent.add(sent_step(4))
    with budget._lock:
        del sent
    assert budget.take(32)
    assert not budget.take(1)


async def test_another_part_leaves_nothing(make_chain: MakeChain) -> None:
    """What a stage had computed for sessions goes with it."""
    chain = make_chain("qwen3", (2,))
    await lost_behind(chain)
    role = chain.roles[0]
    assert role.part is not None
    assert len(role.resting) == 1
    role.load(role.part, lambda *_: None)
    assert not len(role.resting)
