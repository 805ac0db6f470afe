"""Prefixes kept and taken up by sessions: what follows is what follows in a session that was never interrupted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest

from services.errors import FailedPrecondition
from services.messages.description import FeatureTransport, HeadPlace
from services.messages.sampling import SamplingParams
from services.messages.steps import Forward, Proposal, SnapshotSave, SnapshotSaved, StepKind
from tests.combinations import covering, others_slow
from tests.shard_worker.chain import BLOCK, Client, MakeChain
from tests.shard_worker.session.session_memory import Memory, differing, distance, memory_of, stages_of
from tests.shard_worker.tiny import Tiny, ids

PREFILL, DECODE, VERIFY = StepKind.PREFILL, StepKind.DECODE, StepKind.VERIFY
SUM, SLICES = FeatureTransport.SUM, FeatureTransport.SLICES
LAYERS = {"qwen3": 4, "qwen3_5": 8}
SPLITS = [
    (name, cuts)
    for name, layers in LAYERS.items()
    for count in range(3)
    for cuts in combinations(range(1, layers), count)
]
USUAL = [
    *(
        ("qwen3", cuts, drafted)
        for cuts, drafted in (((), True), ((1,), False), ((2,), True), ((3,), False), ((1, 3), True))
    ),
    *(("qwen3_5", (cut,), cut % 4 == 1) for cut in (1, 3, 4, 5, 7)),
    *(("qwen3_5", cuts, drafted) for cuts, drafted in (((), False), ((2, 5), True), ((3, 4), False), ((5, 7), False))),
]
"""Splits by default: every cut of two stages, a few into three, with and without a draft."""
LENGTHS = (7, 18, 30)
"""Where prefixes are kept; the chunks end there too."""

Run = tuple[list[int], list[tuple[int, ...]], Memory]
"""Tokens, draft tokens of each step, and memory."""


async def go_on(client: Client, prompt: Sequence[int], drafted: bool, lengths: Sequence[int] = LENGTHS) -> Run:
    """Go on from where the session is: over the rest of the chunks, the last prompt token and three blocks.

    Returns the tokens, the draft tokens of each step, and the memory at the end. Without a draft the draft tokens are
    fixed, and mostly wrong.
    """
    for first, last in pairwise((0, *lengths)):
        if client.length <= first:
            await client.step(PREFILL, prompt[first:last])
    propose = BLOCK - 1 if drafted else 0
    commit, draft_tokens = await client.step(DECODE, prompt[client.length :], propose)
    tokens, proposals = list(commit.token_ids), [draft_tokens]
    for _ in range(3):
        commit, draft_tokens = await client.step(VERIFY, [tokens[-1], *(draft_tokens or (1, 2, 3))], propose)
        tokens += commit.token_ids
        proposals.append(draft_tokens)
    return tokens, proposals, await memory_of(client)


async def save_along(client: Client, prompt: Sequence[int], lengths: Sequence[int] = LENGTHS) -> list[Memory]:
    """Prefill in chunks that end at the lengths, and keep each prefix upon the one before. Returns the memory at
    each."""
    memories, parent = [], None
    for first, last in pairwise((0, *lengths)):
        await client.step(PREFILL, prompt[first:last])
        saved = await client.save(f"at {last}", parent)
        assert [part.refusal for part in saved.parts] == [""] * len(saved.parts)
        memories.append(await memory_of(client))
        parent = f"at {last}"
    return memories


@pytest.fixture(autouse=True)
def forgotten(make_chain: MakeChain) -> Iterator[None]:
    """Free what a test kept, so that no other test sees it."""
    yield
    for chain in make_chain.chains.values():
        chain.free_snapshots()


# --- saved, restored, gone on


# Of three stages the draft sees the last one's captures alone, wherever the first one ends.
@pytest.mark.parametrize(
    ("name", "cuts", "drafted"),
    others_slow(
        [
            *((*split, False) for split in SPLITS),
            *((*split, True) for split in SPLITS if len(split[1]) < 2 or split[1][0] < 3),
        ],
        USUAL,
    ),
)
async def test_a_restored_session_goes_on_as_if_it_had_never_stopped(
    make_chain: MakeChain, name: str, cuts: tuple[int, ...], drafted: bool
) -> None:
    """Over any split, with and without a draft, a run from every kept length has the same tokens and memory, bit for
    bit."""
    prompt = ids(31)
    chain = make_chain(name, cuts, drafted)
    async with chain.session() as client:
        truth = await go_on(client, prompt, drafted)

    async with chain.session() as client:
        memories = await save_along(client, prompt)
        # Saving changes nothing for the session itself.
        assert (await go_on(client, prompt, drafted))[:2] == truth[:2]
    for length, memory in zip(LENGTHS, memories, strict=True):
        async with chain.session() as client:
            restored = await client.restore(f"at {length}", prompt[:length])
            assert [part.location.stage for part in restored.parts] == [*range(len(cuts) + 1), *[None] * drafted]
            assert differing(await memory_of(client), memory) == []
            tokens, proposals, end = await go_on(client, prompt, drafted)
        assert (tokens, proposals) == truth[:2]
        assert differing(end, truth[2]) == []


@pytest.mark.parametrize(
    ("draft", "place", "transport"),
    [
        ("session", HeadPlace.LOADED, SUM),
        ("session", HeadPlace.PROJECTED, SLICES),
        ("sliding", HeadPlace.SHARED, SLICES),
        ("sliding", HeadPlace.LOADED, SUM),
        ("all-sliding", HeadPlace.SHARED, SUM),
        ("all-sliding", HeadPlace.PROJECTED, SLICES),
    ],
)
@pytest.mark.parametrize(("name", "cuts"), [("qwen3_5", (3,)), pytest.param("qwen3", (), marks=pytest.mark.slow)])
async def test_any_draft_goes_on_as_well(
    make_chain: MakeChain, name: str, cuts: tuple[int, ...], draft: str, place: HeadPlace, transport: FeatureTransport
) -> None:
    """Full and sliding drafts, beside the stage and in a worker of their own, propose as if nothing had happened."""
    prompt = ids(31)
    chain = make_chain(name, cuts, draft, place=place, transport=transport)
    async with chain.session() as client:
        truth = await go_on(client, prompt, True)
    assert any(len(set(draft_tokens)) > 1 for draft_tokens in truth[1])

    async with chain.session() as client:
        memories = await save_along(client, prompt)
    for length, memory in zip(LENGTHS, memories, strict=True):
        # Another size of session: longer pages on a CPU.
        async with chain.session(max_length=350) as client:
            restored = await client.restore(f"at {length}", prompt[:length])
            assert len(restored.parts) == len(cuts) + 2
            assert restored.parts[-1].location.stage is None
            assert differing(await memory_of(client), memory) == []
            tokens, proposals, end = await go_on(client, prompt, True)
        assert (tokens, proposals) == truth[:2]
        assert differing(end, truth[2]) == []


@pytest.mark.parametrize(
    ("name", "cuts", "drafted"),
    [
        ("qwen3-sliding", (), False),
        ("qwen3-sliding", (2,), "sliding"),
        ("mistral-sliding", (1,), False),
        ("gpt_oss", (2,), False),
        ("gemma4-sharing", (2,), False),
        ("laguna", (), False),
    ],
)
async def test_a_prefix_holds_what_its_windows_see(
    make_chain: MakeChain, name: str, cuts: tuple[int, ...], drafted: bool | str
) -> None:
    """Sliding layers of the target, which have given back by then what is behind their windows: a run from every kept
    length, on a chain of prefixes, has the same tokens and memory."""
    lengths = (40, 45, 130)
    prompt, chain = ids(131), make_chain(name, cuts, drafted)
    async with chain.session() as client:
        truth = await go_on(client, prompt, bool(drafted), lengths)
        caches = [cache for stage in stages_of(client) for caches in stage.state.caches for cache in caches.attentions]
        assert [cache.first > 60 for cache in caches] == [cache.window is not None for cache in caches]
        assert any(cache.first for cache in caches)
    async with chain.session() as client:
        memories = await save_along(client, prompt, lengths)
    for length, memory in zip(lengths, memories, strict=True):
        async with chain.session() as client:
            await client.restore(f"at {length}", prompt[:length])
            assert differing(await memory_of(client), memory) == []
            tokens, proposals, end = await go_on(client, prompt, bool(drafted), lengths)
        assert (tokens, proposals) == truth[:2]
        assert differing(end, truth[2]) == []


async def test_a_stage_of_several_devices_keeps_all_of_them(make_chain: MakeChain) -> None:
    """A stage whose layers lie on two devices keeps and restores both parts."""
    prompt = ids(31)
    chain = make_chain("qwen3_5", (2,), True, devices="cpu+cpu")
    async with chain.session() as client:
        truth = await go_on(client, prompt, True)
    async with chain.session() as client:
        memories = await save_along(client, prompt)
    async with chain.session() as client:
        await client.restore("at 18", prompt[:18])
        assert differing(await memory_of(client), memories[1]) == []
        assert (await go_on(client, prompt, True))[:2] == truth[:2]


@pytest.mark.parametrize(("name", "cuts"), [("qwen3", (2,)), ("qwen3_5", (2, 5))])
async def test_another_suffix_follows_a_kept_prefix(make_chain: MakeChain, name: str, cuts: tuple[int, ...]) -> None:
    """A prompt that shares only the prefix gets what it gets alone, and a longer prefix branches off the same one."""
    prompt, other = ids(31), [*ids(18), *ids(13, seed=9)]
    chain = make_chain(name, cuts, True)
    async with chain.session() as client:
        truth = await go_on(client, other, True)
    async with chain.session() as client:
        await save_along(client, prompt)

    async with chain.session() as client:
        await client.restore("at 18", other[:18])
        assert (await go_on(client, other, True))[:2] == truth[:2]
    async with chain.session() as client:
        await client.restore("at 18", other[:18])
        await client.step(PREFILL, other[18:30])
        saved = await client.save("other at 30", "at 18")
        assert not any(part.refusal for part in saved.parts)
    for snapshot_id, whole in (("other at 30", other), ("at 30", prompt)):
        async with chain.session() as client:
            await client.restore(snapshot_id, whole[:30])
            tokens = (await go_on(client, whole, True))[0]
        assert (tokens == truth[0]) is (whole is other)


async def test_sessions_restored_side_by_side_share_nothing(make_chain: MakeChain) -> None:
    """Two sessions from one prefix, in turn, and the prefix again afterwards."""
    prompt = ids(31)
    chain = make_chain("qwen3_5", (3,), True)
    async with chain.session() as client:
        [*_, memory] = await save_along(client, prompt)
    async with chain.session() as a, chain.session() as b:
        await a.restore("at 30", prompt[:30])
        await b.restore("at 30", prompt[:30])
        for token in ids(6, seed=8):
            await a.step(DECODE, [token])
            await b.step(VERIFY, [token + 1, 5, 6])
        assert differing(await memory_of(a), await memory_of(b))
    async with chain.session() as client:
        await client.restore("at 30", prompt[:30])
        assert differing(await memory_of(client), memory) == []


# --- a prompt that is kept as a whole


SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.9, seed=5),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, seed=2**64 - 1),
    SamplingParams(temperature=1.0, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.4, seed=6),
    SamplingParams(repetition_penalty=1e3, logit_bias={3: 2.0, 9: -5.0}),
]


@pytest.mark.parametrize(
    ("name", "cuts", "drafted", "sampling"),
    covering(
        (name, cuts, drafted, sampling)
        for drafted in (False, True)
        for name, cuts in (("qwen3", ()), ("qwen3_5", (3,)), ("qwen3_5", (2, 5)))
        for sampling in SAMPLINGS
    ),
)
async def test_a_prompt_that_is_the_prefix_goes_on_at_once(
    make_chain: MakeChain, name: str, cuts: tuple[int, ...], drafted: bool, sampling: SamplingParams
) -> None:
    """Without a row to compute, the first token and all behind it are those of a session that computed the prompt."""
    # Tokens repeat, so that penalties on the prompt show.
    prompt = [*ids(12), *ids(18)]
    limits = {"sampling": sampling, "prompt_length": 30}
    propose = BLOCK - 1 if drafted else 0
    chain = make_chain(name, cuts, drafted)

    async def blocks(client: Client, first: tuple[Any, tuple[int, ...]]) -> tuple[list[int], list[tuple[int, ...]]]:
        commit, draft_tokens = first
        tokens, proposals = list(commit.token_ids), [draft_tokens]
        while len(tokens) < 12:
            commit, draft_tokens = await client.step(VERIFY, [tokens[-1], *(draft_tokens or (3, 9))], propose)
            tokens += commit.token_ids
            proposals.append(draft_tokens)
        return tokens, proposals

    async with chain.session(**limits) as client:
        await client.step(PREFILL, prompt[:18])
        truth = await blocks(client, await client.step(DECODE, prompt[18:], propose))
    # The sampling of who saves doesn't matter.
    async with chain.session() as client:
        await client.step(PREFILL, prompt[:18])
        await client.step(PREFILL, prompt[18:])
        await client.save("whole")
    async with chain.session(**limits) as client:
        await client.restore("whole", prompt)
        commit, draft_tokens = await client.resume(propose)
        assert (commit.step, commit.length, len(commit.token_ids)) == (0, 30, 1)
        assert len(commit.timings) == len(cuts) + 1
        assert await blocks(client, (commit, draft_tokens)) == truth


@pytest.mark.parametrize(
    ("penalty", "prompt_length", "counts"),
    [
        ({}, 0, False),
        ({"repetition_penalty": 1e3}, 30, True),
        ({"presence_penalty": 1e5}, 0, True),
        ({"presence_penalty": 1e5}, 20, True),
        ({"presence_penalty": 1e5}, 21, False),
        ({"frequency_penalty": 1e5}, 12, True),
        ({"frequency_penalty": 1e5}, 30, False),
    ],
)
async def test_penalties_count_the_restored_prompt(
    make_chain: MakeChain, penalty: dict[str, float], prompt_length: int, counts: bool
) -> None:
    """All restored tokens are history to the repetition penalty, those behind prompt_length output to the others."""
    prompt = ids(30)
    favourite = prompt[20]
    assert prompt.count(favourite) == 1
    chain = make_chain("qwen3", (2,))
    async with chain.session() as client:
        await client.step(PREFILL, prompt)
        await client.save("whole")
    sampling = SamplingParams(logit_bias={favourite: 100.0}, **penalty)
    async with chain.session(sampling=sampling, prompt_length=prompt_length) as client:
        await client.restore("whole", prompt)
        [token] = (await client.resume())[0].token_ids
    assert (token != favourite) is counts


async def test_a_resumed_session_can_be_kept_again(make_chain: MakeChain) -> None:
    """Right behind a restore the logits that were kept are kept on; behind a resume and a step the new ones are."""
    prompt = ids(30)
    chain = make_chain("qwen3_5", (3,), True)
    async with chain.session() as client:
        truth = await client.step(DECODE, prompt, BLOCK - 1)
        after = await client.step(DECODE, truth[0].token_ids, BLOCK - 1)
    async with chain.session() as client:
        await client.step(PREFILL, prompt)
        await client.save("a")
    async with chain.session() as client:
        await client.restore("a", prompt)
        await client.save("b")
        await client.resume()
        await client.save("c")
        await client.step(DECODE, truth[0].token_ids)
        await client.save("d", "b")
    for snapshot_id in "abc":
        async with chain.session() as client:
            await client.restore(snapshot_id, prompt)
            commit, draft_tokens = await client.resume(BLOCK - 1)
            assert (commit.token_ids, draft_tokens) == (truth[0].token_ids, truth[1])
    async with chain.session() as client:
        await client.restore("d", [*prompt, *truth[0].token_ids])
        commit, draft_tokens = await client.resume(BLOCK - 1)
        assert (commit.token_ids, draft_tokens) == (after[0].token_ids, after[1])


async def test_a_stop_token_may_come_first(make_chain: MakeChain) -> None:
    """A resume takes a stop token like any other: it is the one token of the step."""
    chain = make_chain("qwen3")
    async with chain.session() as client:
        await client.step(PREFILL, ids(20))
        await client.save("a")
    async with chain.session() as client:
        await client.restore("a", ids(20))
        [token] = (await client.resume())[0].token_ids
    async with chain.session(stop_token_ids=frozenset({token})) as client:
        await client.restore("a", ids(20))
        assert (await client.resume())[0].token_ids == (token,)


# --- shorter than what was kept


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("cuts", [(), (1, 3)])
async def test_attention_alone_can_be_cut_anywhere(
    tiny: Tiny, make_chain: MakeChain, cuts: tuple[int, ...], drafted: bool
) -> None:
    """Every shorter prefix of a kept one can be taken up; the tokens are those of the whole prompt's own run."""
    prompt, truth = tiny.clear_prompt("qwen3", 30, 12)
    chain = make_chain("qwen3", cuts, drafted)
    async with chain.session() as client:
        [*_, memory] = await save_along(client, prompt)
    for length in range(1, 30):
        async with chain.session() as client:
            await client.restore("at 30", prompt[:length])
            assert differing(await memory_of(client), {name: rows[:, :length] for name, rows in memory.items()}) == []
            if length % 7 in (1, 4):
                assert await client.plain(prompt[length:], 5) == truth[:5]
    for role in chain.roles:
        described = role.describe()
        assert described is not None
        assert described.state_trimmable


async def test_a_cut_prefix_has_no_logits(tiny: Tiny, make_chain: MakeChain) -> None:
    """Resuming behind a cut, or keeping it before a step, lacks what only the longer prefix had; both are refused."""
    prompt, truth = tiny.clear_prompt("qwen3", 30, 12)
    chain = make_chain("qwen3", (2,))
    async with chain.session() as client:
        await save_along(client, prompt)
    async with chain.session() as client:
        await client.restore("at 30", prompt[:18])
        with pytest.raises(FailedPrecondition, match="no logits behind a prefix that was cut") as caught:
            await client.session.forward(client.frame(StepKind.RESUME, ()))
        assert caught.value.reason == "SNAPSHOT_LENGTH"
    held = chain.snapshots[-1].store.held_bytes
    async with chain.session() as client:
        await client.restore("at 30", prompt[:20])
        saved = await client.save("cut")
        assert [bool(part.refusal) for part in saved.parts] == [False, True]
        assert chain.snapshots[-1].store.held_bytes == held
        assert await client.plain(prompt[20:], 5) == truth[:5]


@pytest.mark.parametrize(("name", "draft"), [("qwen3_5", False), ("qwen3", "sliding"), ("gpt_oss", False)])
async def test_state_and_windows_cannot_be_cut(make_chain: MakeChain, name: str, draft: bool | str) -> None:
    """A recurrent state, and a target or a draft that kept only its window, serve their own length and no other."""
    prompt = ids(31)
    chain = make_chain(name, (), draft)
    async with chain.session() as client:
        await save_along(client, prompt)
    for length in (1, 7, 17, 29):
        client = Client(await chain.roles[0].open(chain.request()))
        with pytest.raises(FailedPrecondition, match=f"length is {length}, the prefix at 30 serves 30") as caught:
            await client.restore("at 30", prompt[:length])
        assert caught.value.reason == "SNAPSHOT_LENGTH"
        await client.session.close()
    whole = [role.describe() for role in (chain.roles[0], chain.draft_role) if role is not None]
    assert not all(described.state_trimmable for described in whole if described is not None)


# --- when a prefix is kept


async def test_a_step_right_behind_a_save_is_no_part_of_it(make_chain: MakeChain) -> None:
    """While the first stage's device is busy with rows, a save comes and at once a step that may be computed with those
    of other sessions, which takes turns with jobs: what is kept is the state before the step all the same."""
    prompt = ids(31)
    chain = make_chain("qwen3_5", (3,))
    began, release = threading.Event(), threading.Event()
    async with chain.session() as client:
        await client.step(PREFILL, prompt[:30])
        memory = await memory_of(client)
        thread = stages_of(client)[0].host.thread

        def compute_long() -> None:
            thread.computes("test", 1)
            began.set()
            release.wait()

        async def save_and_go_on() -> None:
            await client.session.save_snapshot(SnapshotSave("behind", 30))
            await client.send(client.frame(DECODE, prompt[30:]))

        busy = thread.submit(compute_long)
        await asyncio.to_thread(began.wait)
        going_on = asyncio.ensure_future(save_and_go_on())
        try:
            async with asyncio.timeout(20):
                while not len(chain.snapshots[-1].store):
                    await asyncio.sleep(0.001)
            # The last stage has saved: a step that does not wait for the first stage's save reaches its device now.
            for _ in range(100):
                await asyncio.sleep(0)
        finally:
            release.set()
            await asyncio.gather(busy, going_on)
        assert isinstance(await anext(client.events), SnapshotSaved)
        await client.commit()
    async with chain.session() as client:
        await client.restore("behind", prompt[:30])
        assert differing(await memory_of(client), memory) == []


@pytest.mark.parametrize("accepted", [0, 1, 3, 5])
@pytest.mark.parametrize(("name", "cuts"), [("qwen3", (2,)), ("qwen3_5", ()), ("qwen3_5", (3,)), ("qwen3_5", (2, 5))])
async def test_a_prefix_kept_behind_a_verify_holds_what_counts(
    tiny: Tiny, make_chain: MakeChain, name: str, cuts: tuple[int, ...], accepted: int
) -> None:
    """Kept right behind a block that counted in part, it is what a session over the counted tokens alone remembers."""
    prompt, truth = tiny.clear_prompt(name, 30, 20)
    draft_tokens = [*truth[1 : 1 + accepted], *[(truth[i + 1] + 1) % 250 for i in range(accepted, 5)]]
    chain = make_chain(name, cuts, True)
    async with chain.session() as client:
        await client.step(PREFILL, prompt[:29])
        await client.step(DECODE, prompt[29:])
        commit, proposal = await client.step(VERIFY, [truth[0], *draft_tokens], BLOCK - 1)
        assert commit.token_ids == tuple(truth[1 : accepted + 2])
        await client.save("behind")
        memory = await memory_of(client)
        next_truth = await client.step(VERIFY, [commit.token_ids[-1], *proposal], BLOCK - 1)
    counted = [*prompt, *truth[: accepted + 1]]
    async with chain.session() as client:
        await client.prefill(counted)
        fresh = await memory_of(client)
    async with chain.session() as client:
        await client.restore("behind", counted)
        assert differing(await memory_of(client), memory) == []
        assert distance(await memory_of(client), fresh) < 1e-4
        # The logits behind the last row that counts, not behind the last row.
        resumed, proposed = await client.resume(BLOCK - 1)
        assert resumed.token_ids == commit.token_ids[-1:]
        assert proposed == proposal
        again = await client.step(VERIFY, [resumed.token_ids[-1], *proposed], BLOCK - 1)
        assert (again[0].token_ids, again[1]) == (next_truth[0].token_ids, next_truth[1])


@pytest.mark.parametrize("cuts", [(3,), (2, 5)])
async def test_a_prefix_may_be_kept_while_chunks_are_on_their_way(make_chain: MakeChain, cuts: tuple[int, ...]) -> None:
    """A save between prefills whose answers nobody has read yet holds exactly the chunks sent before it."""
    prompt = ids(31)
    chain = make_chain("qwen3_5", cuts, True)
    async with chain.session() as client:
        truth = await go_on(client, prompt, True)
    async with chain.session() as client:
        for step, (first, last) in enumerate(pairwise((0, *LENGTHS))):
            await client.session.forward(Forward(step, first, tuple(prompt[first:last]), PREFILL))
            await client.session.save_snapshot(SnapshotSave(f"at {last}", last, f"at {first}" if first else None))
        for length in LENGTHS:
            assert (await client.commit()).length == length
            saved = await anext(client.events)
            assert isinstance(saved, SnapshotSaved)
            assert (saved.snapshot_id, saved.length, len(saved.parts)) == (f"at {length}", length, len(cuts) + 2)
            assert not any(part.refusal for part in saved.parts)
        client.steps = 3
        assert (await go_on(client, prompt, True))[:2] == truth[:2]
    for length in LENGTHS:
        async with chain.session() as client:
            await client.restore(f"at {length}", prompt[:length])
            tokens, proposals, end = await go_on(client, prompt, True)
        assert (tokens, proposals) == truth[:2]
        assert differing(end, truth[2]) == []


async def test_saves_and_proposals_take_turns(make_chain: MakeChain) -> None:
    """A save behind a step that asked for draft tokens comes behind them, and the next draft tokens are as ever."""
    chain = make_chain("qwen3_5", (3,), True)
    proposals = []
    for saving in (False, True):
        async with chain.session() as client:
            await client.session.forward(client.frame(DECODE, ids(20), BLOCK - 1))
            if saving:
                await client.session.save_snapshot(SnapshotSave("a", 20))
            client.steps, [token] = 1, (await client.commit()).token_ids
            first = await anext(client.events)
            assert isinstance(first, Proposal)
            if saving:
                assert isinstance(await anext(client.events), SnapshotSaved)
            _, draft_tokens = await client.step(VERIFY, [token, *first.token_ids], BLOCK - 1)
            proposals.append((first.token_ids, draft_tokens))
    assert proposals[0] == proposals[1]


# --- what is counted


async def test_bytes_are_those_of_the_rows_and_states(make_chain: MakeChain) -> None:
    """Each part tells what it holds: rows beyond the parent's, each state once, the last stage's logits."""
    prompt = ids(31)
    chain = make_chain("qwen3_5", (3,), True)
    conv, recurrent = 3 * (2 * 2 * 16 + 4 * 16) * 4, 4 * 16 * 16 * 4
    row = 2 * 2 * 32 * 4
    draft_row = 2 * 2 * 2 * 16 * 4
    async with chain.session() as client:
        await client.step(PREFILL, prompt[:10])
        first = await client.save("a")
        await client.step(PREFILL, prompt[10:25])
        second = await client.save("b", "a")
        third = await client.save("c")
        again = await client.save("b")
    linear, attention = (3, 3), (0, 2)
    for saved, rows in ((first, 10), (second, 15), (third, 25)):
        states = [count * (conv + recurrent) for count in linear]
        expected = [state + count * row * rows for state, count in zip(states, attention, strict=True)]
        assert [part.size_bytes for part in saved.parts] == [expected[0], expected[1] + 256 * 4, rows * draft_row]
    assert [part.size_bytes for part in again.parts] == [0, 0, 0]
    held = [[part.size_bytes for part in saved.parts] for saved in (first, second, third)]
    assert chain.snapshots[0].store.held_bytes == sum(parts[0] for parts in held)
    assert chain.snapshots[1].store.held_bytes == sum(parts[1] + parts[2] for parts in held)
    assert all(part.elapsed_ns > 0 for part in first.parts)
    async with chain.session() as client:
        restored = await client.restore("b", prompt[:25])
    assert [part.size_bytes for part in restored.parts] == [part.size_bytes for part in third.parts]
    assert [part.location.stage for part in first.parts] == [0, 1, None]


async def test_a_name_that_is_kept_stays_as_it_is(make_chain: MakeChain) -> None:
    """Keeping other tokens under a kept name changes nothing: the first ones are what is restored."""
    prompt = ids(20)
    chain = make_chain("qwen3", (2,))
    async with chain.session() as client:
        await client.step(PREFILL, prompt)
        await client.save("a")
        memory = await memory_of(client)
    async with chain.session() as client:
        await client.step(PREFILL, ids(25, seed=9))
        saved = await client.save("a")
        assert [(part.size_bytes, part.refusal) for part in saved.parts] == [(0, "")] * 2
    async with chain.session() as client:
        await client.restore("a", prompt)
        assert differing(await memory_of(client), memory) == []


async def test_what_is_kept_outlives_its_sessions_and_no_longer(make_chain: MakeChain) -> None:
    """Sessions that end, in whatever state, take nothing with them; freed names are gone and every byte is back."""
    prompt = ids(31)
    chain = make_chain("qwen3_5", (3,), True, place=HeadPlace.LOADED)
    async with chain.session() as client:
        await save_along(client, prompt)
    stores = [chain.snapshots[0].store, chain.snapshots[1].store, chain.draft_snapshots.store]
    held = [store.held_bytes for store in stores]
    assert all(held)
    for ending in ("restored", "stepped", "verified"):
        client = Client(await chain.roles[0].open(chain.request()))
        await client.restore("at 18", prompt[:18])
        if ending != "restored":
            await client.step(DECODE, prompt[18:20])
        if ending == "verified":
            await client.send(client.frame(VERIFY, prompt[20:24], BLOCK - 1))
        await client.session.close()
    assert [store.held_bytes for store in stores] == held
    for store in stores:
        # What others build on stays until they are gone.
        assert store.free("at 7") == store.free("at 18") == 0
        assert store.free("at 30") + store.free("at 18") + store.free("at 7") > 0
    assert [store.held_bytes for store in stores] == [0, 0, 0]
