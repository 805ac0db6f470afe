"""Sessions over chains of stages: the tokens of the unsplit model, whatever is proposed, alone and side by side."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from itertools import product

import pytest
import torch

from services.errors import FailedPrecondition, FlashsplitError, InvalidArgument
from services.messages.description import FeatureTransport, HeadPlace
from services.messages.sampling import SamplingParams
from services.messages.steps import StepKind
from shard_worker.drafting.drafters.dflash import DFlashState
from shard_worker.stage.stage import StageState
from tests.combinations import covering, others_slow
from tests.reference import target
from tests.reference.dense_draft import DenseDraft
from tests.shard_worker.chain import BLOCK, CAPTURED, Chain, Client, MakeChain
from tests.shard_worker.session.session_memory import draft_of, stages_of
from tests.shard_worker.tiny import Tiny, ids

SUM, SLICES = FeatureTransport.SUM, FeatureTransport.SLICES
PREFILL, DECODE, VERIFY = StepKind.PREFILL, StepKind.DECODE, StepKind.VERIFY
COUNT = 64
CUTS = {
    "qwen3-sliding": [(), (2,), (1, 3)],
    "qwen3_5": [(), (3,), (2, 5)],
    "llama": [(1,)],
}
SPLITS = [(name, cuts) for name, all_cuts in CUTS.items() for cuts in all_cuts]
GEMMA = [("gemma3", (2,)), ("gemma4-sharing", (2,))]
SPECULATED = [
    *((*split, transport) for split in (*SPLITS, *GEMMA, ("qwen3_moe", (2,))) for transport in (SUM, SLICES)),
    ("gpt_oss", (1, 2, 3), SUM),
    ("laguna", (1, 2, 3), SUM),
]
USUAL = [("qwen3-sliding", (1, 3)), ("qwen3_5", (3,)), ("llama", (1,))]
"""Of each family a split by which everything is tested by default."""


# --- tokens


@pytest.mark.parametrize(("name", "cuts"), others_slow(SPLITS, [("qwen3_5", ()), *USUAL]))
async def test_plain_tokens_are_those_of_transformers(
    tiny: Tiny, make_chain: MakeChain, name: str, cuts: tuple[int, ...]
) -> None:
    """Step by step over one, two and three stages, greedy tokens are the unsplit model's in transformers."""
    prompt, expected = tiny.clear_prompt(name, 12, COUNT)

    async with make_chain(name, cuts).session() as client:
        assert await client.plain(prompt, COUNT) == expected


@pytest.mark.parametrize(("name", "cuts", "transport"), covering(SPECULATED, 1))
async def test_speculated_tokens_are_those_of_transformers(
    tiny: Tiny, make_chain: MakeChain, name: str, cuts: tuple[int, ...], transport: FeatureTransport
) -> None:
    """With a draft beside the last stage, fed by sums or slices, the tokens stay the same."""
    prompt, expected = tiny.clear_prompt(name, 12, COUNT)

    async with make_chain(name, cuts, True, transport=transport).session() as client:
        answer = await client.speculate(prompt, COUNT)

    assert answer.tokens == expected
    assert all(len(proposal) == BLOCK - 1 for proposal in answer.proposals)


@pytest.mark.parametrize(
    ("name", "cuts", "host"),
    [("qwen3_moe", (2,), 0.4), ("qwen3_5_moe", (1, 3), 1.0), ("gpt_oss-mxfp4", (1,), 0.5), ("laguna", (), 1.0)],
)
async def test_experts_in_the_hosts_memory_give_the_same_tokens(
    tiny: Tiny, make_chain: MakeChain, name: str, cuts: tuple[int, ...], host: float
) -> None:
    """Some of them or all, packed ones too, plain and with draft tokens of which some are wrong."""
    count = 30
    prompt, truth = tiny.clear_prompt(name, 12, count + BLOCK)
    chain = make_chain(name, cuts, host_experts=host)

    async with chain.session() as client:
        assert await client.plain(prompt, count) == truth[:count]
    async with chain.session() as client:
        answer = await client.speculate(prompt, count, script=lambda done: right_until(truth, done, 3))

    assert answer.tokens == truth[:count]
    described = [role.describe() for role in chain.roles]
    assert all(one is not None and one.host_weight_bytes > 0 and one.host_experts == host for one in described)


def right_until(truth: Sequence[int], produced: list[int], wrong: int) -> list[int]:
    """Return the true next tokens as draft tokens, wrong from an index on."""
    draft_tokens = list(truth[len(produced) : len(produced) + BLOCK - 1])
    return [token if i < wrong else (token + 1 + i) % 250 for i, token in enumerate(draft_tokens)]


@pytest.mark.parametrize(
    ("name", "cuts", "wrong"), covering([(*split, wrong) for wrong in (0, 3, BLOCK) for split in SPLITS], 1)
)
async def test_any_draft_tokens_give_the_same_tokens(
    tiny: Tiny, make_chain: MakeChain, name: str, cuts: tuple[int, ...], wrong: int
) -> None:
    """Drafts that are always wrong, always right, or right up to an index change how many tokens a verify gives."""
    prompt, truth = tiny.clear_prompt(name, 12, COUNT + BLOCK)

    async with make_chain(name, cuts).session() as client:
        answer = await client.speculate(prompt, COUNT, script=lambda done: right_until(truth, done, wrong))

    assert answer.tokens == truth[:COUNT]
    assert {len(tokens) for tokens in answer.verified} == {min(wrong, BLOCK - 1) + 1}


@pytest.mark.parametrize(
    ("name", "cuts"),
    [
        ("qwen3_5", (3,)),
        ("qwen3-sliding", (1, 3)),
        *(pytest.param(name, (1, 3), marks=pytest.mark.slow) for name in ("qwen3_5_moe", "gpt_oss")),
    ],
)
async def test_draft_tokens_that_go_wrong_at_every_index_in_turn(
    tiny: Tiny, make_chain: MakeChain, name: str, cuts: tuple[int, ...]
) -> None:
    """Partial accepts of every length, one after the other, with blocks of every size, keep the tokens."""
    prompt, truth = tiny.clear_prompt(name, 3, COUNT + BLOCK)
    turns = iter(range(10_000))

    def script(done: list[int]) -> list[int]:
        turn = next(turns)
        return right_until(truth, done, turn % BLOCK)[: turn % (BLOCK - 2)]

    async with make_chain(name, cuts).session() as client:
        answer = await client.speculate(prompt, COUNT, script=script)

    assert answer.tokens == truth[:COUNT]
    assert {len(tokens) for tokens in answer.verified} >= {1, 2, 3, 4, 5}


@pytest.mark.parametrize(
    "chunk", [pytest.param(1, marks=pytest.mark.slow), 7, pytest.param(64, marks=pytest.mark.slow)]
)
async def test_a_prompt_may_come_in_chunks(tiny: Tiny, make_chain: MakeChain, chunk: int) -> None:
    """A prompt prefilled in chunks is followed by the tokens of one prefilled at once, draft tokens included."""
    prompt, expected = tiny.clear_prompt("qwen3_5", 100, 20)
    proposals = []
    for size in (chunk, 200):
        async with make_chain("qwen3_5", (3,), True).session() as client:
            await client.prefill(prompt[:-1], size)
            answer = await client.speculate(prompt[-1:], 20)
        assert answer.tokens == expected
        proposals.append(answer.proposals)

    assert proposals[0] == proposals[1]


@pytest.mark.parametrize(
    ("name", "cuts", "transport"),
    covering([(*split, transport) for split in (*USUAL, GEMMA[0], *SPLITS) for transport in (SUM, SLICES)], 1),
)
async def test_proposals_are_those_of_the_dense_draft(
    tiny: Tiny, make_chain: MakeChain, name: str, cuts: tuple[int, ...], transport: FeatureTransport
) -> None:
    """Captured over any split, committed in part and handed on, the features lead to the dense formula's draft
    tokens."""
    prompt, truth = tiny.clear_prompt(name, 12, 40)
    model = tiny.model(name)
    dense = DenseDraft(tiny.draft(name, "session", target_layer_ids=CAPTURED[name]))
    turns = iter(range(100))
    compared = 0

    async with make_chain(name, cuts, True, transport=transport).session() as client:
        await client.prefill(prompt[:-1], 5)
        commit, proposal = await client.step(DECODE, prompt[-1:], BLOCK - 1)
        produced = list(commit.token_ids)
        while len(produced) < 30:
            context = [*prompt, *produced[:-1]]
            joined = torch.cat(target.block_outputs(model, context, CAPTURED[name]), -1)
            expected = dense.forward(joined, target.embedding(model), target.lm_head(model), produced[-1])
            clear = target.margins(expected.logits) > 1e-3
            assert [token for token, c in zip(proposal, clear, strict=True) if c] == [
                token for token, c in zip(expected.logits.argmax(-1).tolist(), clear, strict=True) if c
            ]
            compared += int(clear.sum())
            block = right_until(truth, produced, next(turns) % BLOCK)
            commit, proposal = await client.step(VERIFY, [produced[-1], *block], BLOCK - 1)
            produced += commit.token_ids

    assert compared > 30


@pytest.mark.parametrize(
    ("cuts", "place", "transport"),
    covering(product([(), (3,)], [HeadPlace.LOADED, HeadPlace.PROJECTED], [SUM, SLICES]), 1),
)
async def test_a_draft_of_its_own_worker_proposes_alike(
    tiny: Tiny, make_chain: MakeChain, cuts: tuple[int, ...], place: HeadPlace, transport: FeatureTransport
) -> None:
    """With its own copy of the head, or sending hidden rows back to be projected, the draft tokens are the same."""
    prompt, expected = tiny.clear_prompt("qwen3_5", 12, 40)
    answers = []
    for options in ({"transport": transport, "place": place}, {"transport": transport}):
        async with make_chain("qwen3_5", cuts, True, **options).session() as client:
            answers.append(await client.speculate(prompt, 40))

    assert answers[0].tokens == answers[1].tokens == expected
    assert answers[0].proposals == answers[1].proposals


@pytest.mark.parametrize("cuts", [pytest.param((), marks=pytest.mark.slow), (3,)])
async def test_a_draft_with_fewer_tokens_than_the_target(
    tiny: Tiny, make_chain: MakeChain, cuts: tuple[int, ...]
) -> None:
    """It proposes those alone, the same wherever it is; a token that it lacks only makes a block shorter."""
    prompt, expected = tiny.clear_prompt("qwen3_5", 12, 40)
    answers = []
    for place in HeadPlace:
        async with make_chain("qwen3_5", cuts, "reduced", place=place).session() as client:
            answers.append(await client.speculate(prompt, 40))

    for answer in answers:
        assert answer.tokens == expected
        assert answer.proposals == answers[0].proposals
    assert {token % 3 for proposal in answers[0].proposals for token in proposal} == {1}
    assert {token % 3 for token in expected} > {1}


@pytest.mark.parametrize(
    ("name", "cuts", "shape"),
    [("gemma4-experts", (), "dflash2"), ("qwen3", (2,), "dspark"), ("qwen3", (), "domino")],
)
async def test_a_draft_that_chooses_by_what_stands_before(
    tiny: Tiny, make_chain: MakeChain, name: str, cuts: tuple[int, ...], shape: str
) -> None:
    """Draft tokens are the same wherever they are chosen: with the draft beside the last stage, in the draft's worker,
    or in the last stage, which gets hidden rows. The answer is the target's."""
    prompt, expected = tiny.clear_prompt(name, 12, 16)
    answers = []
    for place in HeadPlace:
        async with make_chain(name, cuts, shape, place=place).session() as client:
            answers.append(await client.speculate(prompt, 16))

    for answer in answers:
        assert answer.tokens == expected
        assert answer.proposals == answers[0].proposals


@pytest.mark.parametrize(
    "draft_tokens",
    [pytest.param(count, marks=pytest.mark.slow if 2 < count < BLOCK - 1 else ()) for count in range(1, BLOCK)],
)
async def test_blocks_of_every_size(tiny: Tiny, make_chain: MakeChain, draft_tokens: int) -> None:
    """Asking the draft for fewer draft tokens than its block holds gives shorter proposals and the same tokens."""
    prompt, expected = tiny.clear_prompt("qwen3_5", 12, 30)

    async with make_chain("qwen3_5", (3,), True).session() as client:
        answer = await client.speculate(prompt, 30, draft_tokens=draft_tokens)

    assert answer.tokens == expected
    assert {len(proposal) for proposal in answer.proposals} == {draft_tokens}


SAMPLINGS = [
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, seed=6),
    SamplingParams(
        temperature=0.9,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        logit_bias={3: 2.0, 9: -5.0},
        seed=2**64 - 1,
    ),
    SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={7: 1.0}),
]


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        ("qwen3_5", SAMPLINGS[1]),
        ("qwen3-sliding", SAMPLINGS[2]),
        *(pytest.param("qwen3_5", SAMPLINGS[place], marks=pytest.mark.slow) for place in (0, 2, 3)),
        *(pytest.param("qwen3-sliding", SAMPLINGS[place], marks=pytest.mark.slow) for place in (0, 1, 3)),
    ],
)
async def test_a_seed_gives_one_answer_however_it_is_run(
    make_chain: MakeChain, name: str, sampling: SamplingParams
) -> None:
    """Plain, split, drafted and with right and wrong draft tokens, a seeded answer with every processor is the same."""
    prompt = ids(15, seed=4)
    limits = {"sampling": sampling, "prompt_length": len(prompt)}
    [cuts, more_cuts] = CUTS[name][1:]
    async with make_chain(name).session(**limits) as client:
        truth = await client.plain(prompt, 60 + BLOCK)
    async with make_chain(name, cuts).session(**limits) as client:
        split = await client.plain(prompt, 60)
    async with make_chain(name, more_cuts, True).session(**limits) as client:
        drafted = await client.speculate(prompt, 60)
    turns = iter(range(100))
    async with make_chain(name, cuts).session(**limits) as client:
        speculated = await client.speculate(
            prompt, 60, script=lambda done: right_until(truth, done, next(turns) % BLOCK)
        )

    assert split == drafted.tokens == speculated.tokens == truth[:60]
    assert max(len(tokens) for tokens in speculated.verified) == BLOCK


async def test_seeds_and_requests_differ(make_chain: MakeChain) -> None:
    """Another seed, or greedy decoding, gives other tokens; the same seed gives the same ones again."""
    prompt, answers = ids(15, seed=4), []
    for sampling in (
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=1.0, seed=2),
    ):
        for _ in range(2):
            async with make_chain("qwen3_5").session(sampling=sampling, prompt_length=15) as client:
                answers.append(tuple(await client.plain(prompt, 12)))

    assert answers[0::2] == answers[1::2]
    assert len(set(answers)) == 3


# --- where a step ends


@pytest.mark.parametrize("index", [0, 1, 4, 7])
@pytest.mark.parametrize("cuts", [(), (3,)])
async def test_nothing_follows_a_stop_token(
    tiny: Tiny, make_chain: MakeChain, cuts: tuple[int, ...], index: int
) -> None:
    """A stop token as first token, accepted draft token or bonus ends the step, and only the rows before it count."""
    prompt, truth = tiny.clear_prompt("qwen3_5", 12, COUNT)
    stop = truth[1 + index]
    cut = truth[1:].index(stop)

    async with make_chain("qwen3_5", cuts).session(stop_token_ids=frozenset({stop})) as client:
        await client.prefill(prompt[:-1])
        await client.step(DECODE, prompt[-1:])
        commit, _ = await client.step(VERIFY, truth[:BLOCK])

        assert commit.token_ids == tuple(truth[1 : cut + 2])
        assert commit.length == len(prompt) + cut + 1
        # What was not committed is gone: going on from there is going on from the stop token.
        again, _ = await client.step(DECODE, commit.token_ids[-1:])
        assert again.token_ids == (truth[cut + 2],)


async def test_a_session_can_be_filled_to_its_last_token(tiny: Tiny, make_chain: MakeChain) -> None:
    """Up to max_length every row is taken, with blocks that just fit; one more is refused."""
    prompt, truth = tiny.clear_prompt("qwen3_5", 12, COUNT)
    limit = len(prompt) + 13

    async with make_chain("qwen3_5", (3,), True).session(max_length=limit) as client:
        await client.prefill(prompt[:-1])
        await client.step(DECODE, prompt[-1:], BLOCK - 1)
        await client.step(VERIFY, truth[:8], BLOCK - 1)
        with pytest.raises(InvalidArgument, match="ends at position 26, the session holds 25") as caught:
            await client.send(client.frame(VERIFY, truth[8:14]))
        assert caught.value.reason == "CONTEXT_OVERFLOW"
        commit, proposal = await client.step(VERIFY, truth[8:13], BLOCK - 1)

    assert commit.token_ids == tuple(truth[9:14])
    assert commit.length == limit
    assert len(proposal) == BLOCK - 1


async def test_commits_carry_the_times_of_every_stage(make_chain: MakeChain) -> None:
    """Each stage adds its own computing time and the time from arrival to answer, the first stage's the longest."""
    async with make_chain("qwen3_5", (2, 5)).session() as client:
        commit, _ = await client.step(PREFILL, ids(20))

    assert [str(identity.layers) for identity in client.session.stages] == ["[0, 2)", "[2, 5)", "[5, 8)"]
    assert [identity.location.stage for identity in client.session.stages] == [0, 1, 2]
    elapsed = [timing.elapsed_ns for timing in commit.timings]
    assert len(elapsed) == 3
    assert elapsed == sorted(elapsed, reverse=True)
    assert all(0 < timing.forward_ns <= timing.elapsed_ns for timing in commit.timings)
    # 64 hidden values in float32 and the token id of each row; the last stage hands on nothing.
    assert [timing.passed_bytes for timing in commit.timings] == [20 * (64 * 4 + 4)] * 2 + [0]


@pytest.mark.parametrize("place", [HeadPlace.SHARED, HeadPlace.LOADED])
async def test_what_is_captured_counts_on_its_way(tiny: Tiny, place: HeadPlace) -> None:
    """The features' sum rides along, float32, and goes to a draft elsewhere: of rows that count. While the session is
    open its stages say how much memory it takes."""
    draft = tiny.draft("qwen3_5", "passed", target_layer_ids=(1, 6))
    chain = Chain(tiny.path("qwen3_5"), (3,), draft=draft, place=place)
    try:
        async with chain.session() as client:
            commit, _ = await client.step(PREFILL, ids(20))
            held = [session.state.size_bytes for session in stages_of(client)]
            if place is HeadPlace.SHARED:
                state = draft_of(client)
                assert state is not None
                # What comes from the stage before and what was captured on this one wait until a block is asked for.
                held[-1] += state.size_bytes + 20 * 2 * 64 * 4
            assert [role.session_bytes for role in chain.roles] == held
        passed = [timing.passed_bytes for timing in commit.timings]
        assert passed == [20 * (64 * 4 * 2 + 4), 0 if place is HeadPlace.SHARED else 20 * 64 * 4]
        assert [role.session_bytes for role in chain.roles] == [0, 0]
    finally:
        chain.shutdown()


# --- sessions side by side


@pytest.mark.parametrize("drafted", [True, pytest.param(False, marks=pytest.mark.slow)])
async def test_interleaved_sessions_do_not_share_state(tiny: Tiny, make_chain: MakeChain, drafted: bool) -> None:
    """Two requests on the same stages and draft, which take turns, get the tokens that each gets alone."""
    prompts = [tiny.clear_prompt("qwen3_5", 12, COUNT), tiny.clear_prompt("qwen3_5", 3, COUNT + BLOCK)]
    chain = make_chain("qwen3_5", (3,), drafted)

    async def run(prompt: list[int]) -> list[int]:
        async with chain.session() as client:
            return (await client.speculate(prompt, 60)).tokens if drafted else await client.plain(prompt, 60)

    answers = await asyncio.gather(*[run(prompt) for prompt, _ in prompts])

    assert answers == [truth[:60] for _, truth in prompts]


@pytest.mark.slow
async def test_a_request_leaves_nothing_behind(tiny: Tiny, make_chain: MakeChain) -> None:
    """A request gets the same tokens and draft tokens again after another one has run."""
    chain = make_chain("qwen3_5", (3,), True)
    a, b = tiny.clear_prompt("qwen3_5", 12, COUNT)[0], tiny.clear_prompt("qwen3_5", 3, COUNT + BLOCK)[0]
    answers = []
    for prompt in (a, b, a):
        async with chain.session() as client:
            answers.append(await client.speculate(prompt, 40))

    assert answers[0] == answers[2] != answers[1]


def states() -> list[object]:
    """Return all session memory that anything still refers to."""
    gc.collect()
    return [thing for thing in gc.get_objects() if type(thing) in (StageState, DFlashState)]


@pytest.mark.parametrize(
    "finish", ["closed", *(pytest.param(how, marks=pytest.mark.slow) for how in ("failed", "refused"))]
)
async def test_memory_returns_when_a_session_ends(tiny: Tiny, make_chain: MakeChain, finish: str) -> None:
    """After closing, however the session ended, no stage holds its caches and none counts it as open."""
    prompt, truth = tiny.clear_prompt("qwen3_5", 12, COUNT)
    chain = make_chain("qwen3_5", (2, 5), True)
    others = states()

    def held() -> int:
        return sum(all(state is not other for other in others) for state in states())

    client = Client(await chain.roles[0].open(chain.request()))
    assert held() == 4
    assert [role.open_sessions for role in chain.roles] == [1, 1, 1]

    await client.prefill(prompt)
    if finish == "failed":
        await client.send(client.frame(VERIFY, truth[:4], BLOCK - 1))
    elif finish == "refused":
        with pytest.raises(FailedPrecondition):
            await client.session.forward(client.frame(PREFILL, (1,), step=9))
    await client.session.close()
    await client.session.close()

    with pytest.raises(FlashsplitError):
        await client.session.forward(client.frame(DECODE, (1,)))
    del client
    # A device thread forgets its last job a moment after the job's answer is there.
    async with asyncio.timeout(10):
        while held():
            await asyncio.sleep(0.05)
    assert [role.open_sessions for role in chain.roles] == [0, 0, 0]
