"""Steps of sessions that wait at the same time are computed together, and are those of each session alone."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from services.errors import FailedPrecondition, ResourceExhausted
from services.messages.batch_frames import BatchAnswer
from services.messages.description import FeatureTransport
from services.messages.sampling import SamplingParams
from services.messages.steps import Commit, Forward, Proposal, SnapshotSave, SnapshotSaved, StepKind, StepLimit
from shard_worker.batches import step_batches
from shard_worker.device.executor import DeviceThread
from shard_worker.drafting.engine import DraftEngine, DraftRequest
from shard_worker.drafting.link import LocalDraftLink
from shard_worker.model.features import Features
from shard_worker.sampling import drawing
from shard_worker.sampling.acceptance import accept
from shard_worker.sampling.drawing import Draw
from shard_worker.session.last_stage import LastStageDeviceSession
from shard_worker.stage.stage import StepInput
from shard_worker.stage.step_graph import StepPart
from tests.combinations import others_slow
from tests.shard_worker.chain import BLOCK, Chain, Client
from tests.shard_worker.model.kernels.machine import ON_GPU
from tests.shard_worker.session.test_following import follow, tokens_of
from tests.shard_worker.session.watched_stage import watch
from tests.shard_worker.tiny import Tiny, ids

COUNT = 8


@dataclass(frozen=True)
class Request:
    """What a client asks for: its prompt, how many tokens the draft proposes at a time, and fields of the session."""

    prompt: list[int]
    propose: int
    fields: dict[str, Any]


REQUESTS = [
    Request(ids(20, seed=1), 0, {}),
    Request(ids(33, seed=2), BLOCK - 1, {}),
    Request(ids(7, seed=3), 0, {"sampling": SamplingParams(temperature=0.9, seed=7, top_k=20), "prompt_length": 7}),
    Request(
        ids(15, seed=4),
        BLOCK - 1,
        {"sampling": SamplingParams(temperature=0.8, seed=3, presence_penalty=0.5), "prompt_length": 15},
    ),
    Request(ids(50, seed=5), 0, {"logprobs": 3}),
    Request(ids(12, seed=6), 3, {"logprobs": 1}),
    Request(ids(5, seed=7), 0, {"sampling": SamplingParams(repetition_penalty=1.3), "prompt_length": 5}),
    Request(ids(20, seed=8), BLOCK - 1, {}),
]


@pytest.fixture
def new_chain(tiny: Tiny) -> Iterator[Callable[..., Chain]]:
    """Makes chains with a draft beside the last stage."""
    chains: list[Chain] = []

    def make(name: str, cuts: Sequence[int], **options: Any) -> Chain:
        draft = tiny.draft(name, "session", target_layer_ids=(0, 1, 3))
        chains.append(Chain(tiny.path(name), cuts, draft=draft, **options))
        return chains[-1]

    yield make
    for chain in chains:
        chain.shutdown()


async def answer(chain: Chain, request: Request, **fields: Any) -> list[Commit]:
    """Return all answers of one session but for their times."""
    drafted = {} if request.propose else {"draft": None}
    async with chain.session(**request.fields, **drafted, **fields) as client:
        await client.prefill(request.prompt[:-1], 8)
        commits = await follow(client, request.prompt[-1], COUNT, request.propose)
    return commits


def produced(commits: Sequence[Commit]) -> list[tuple[object, ...]]:
    """What a client gets to see."""
    return [(commit.length, commit.token_ids, commit.logprobs) for commit in commits]


def rows_together(chain: Chain) -> list[list[int]]:
    """Note from now on, for each stage, of how many sessions the steps were that it computed together."""
    noted: list[list[int]] = []
    for role in chain.roles:
        counts: list[int] = []
        watch(role, before_together=lambda inputs, counts=counts: counts.append(len(inputs)))
        noted.append(counts)
    return noted


async def assert_alike_alone_and_together(chain: Chain, **fields: Any) -> None:
    """Each session's answers are the same bit for bit, and every stage has computed rows of several of them at once."""
    alone = [produced(await answer(chain, request, **fields)) for request in REQUESTS]
    counts = rows_together(chain)
    # Where the steps of a later stage come one by one they are asked for again.
    for _ in range(20):
        answers = await asyncio.gather(*(answer(chain, request, **fields) for request in REQUESTS))
        assert [produced(commits) for commits in answers] == alone
        if all(max(of_stage, default=0) > 1 for of_stage in counts):
            break
    else:
        pytest.fail(f"steps computed together on each stage: {counts}")


@pytest.mark.parametrize(
    ("name", "cuts", "lanes"),
    others_slow(
        [(name, *way) for name in ("qwen3", "qwen3_5") for way in (((), False), ((1, 3), False), ((1, 3), True))],
        [("qwen3_5", (), False), ("qwen3", (1, 3), False), ("qwen3_5", (1, 3), True)],
    ),
)
async def test_answers_are_those_of_each_alone(
    new_chain: Callable[..., Chain], name: str, cuts: tuple[int, ...], lanes: bool
) -> None:
    """Greedy, sampled, with penalties, log-probabilities, and a draft's blocks, where batch-invariant steps were asked
    for."""
    carries = (lambda _: True) if lanes else None
    chain = new_chain(name, cuts, dtype="bfloat16", carries=carries)
    await assert_alike_alone_and_together(chain, batch_invariant_rows=16)


@pytest.mark.parametrize(
    ("name", "cuts", "takes"),
    others_slow(
        [
            (name, cuts, takes)
            for name, cuts in (("qwen3", ()), ("qwen3_5", ()), ("qwen3", (1, 3)), ("qwen3_5", (2,)))
            for takes in ("all", "some", "none")
        ],
        [("qwen3", (), "none"), ("qwen3_5", (), "some"), ("qwen3", (1, 3), "some"), ("qwen3_5", (2,), "all")],
    ),
)
async def test_answers_of_several_sessions_at_once(
    new_chain: Callable[..., Chain], name: str, cuts: tuple[int, ...], takes: str
) -> None:
    """What the device thread tells a coordinator past the sessions' streams is what it tells in them, in one order with
    that; where the way takes no more the streams have it."""
    draw = random.Random(name)

    def taken(answers: Sequence[BatchAnswer]) -> bool:
        return takes == "all" or (takes == "some" and draw.random() < 0.5)

    options = {"carries": lambda _: True, "carries_batch": lambda _: True} if cuts else {}
    chain = new_chain(name, cuts, dtype="bfloat16", takes_answers=taken, **options)
    alone = [produced(await answer(chain, request, batch_invariant_rows=16)) for request in REQUESTS]
    for _ in range(20):
        answers = await asyncio.gather(*(answer(chain, request, batch_invariant_rows=16) for request in REQUESTS))
        assert [produced(commits) for commits in answers] == alone
        assert chain.caller_way is not None
        if takes == "none" or max(chain.caller_way.sent, default=0) > 1:
            break
    assert (max(chain.caller_way.sent, default=0) > 1) == (takes != "none")


@pytest.mark.parametrize("cuts", [pytest.param((), marks=pytest.mark.slow), (1, 3)])
async def test_what_is_said_meanwhile_of_steps_that_the_event_loop_has_not_heard_of(
    new_chain: Callable[..., Chain], cuts: tuple[int, ...]
) -> None:
    """A limit counts from the steps that were told, more steps go on behind those that ended, and prefixes are kept of
    the length that the session has, though nobody told the event loop of steps."""
    options = {"carries": lambda _: True, "carries_batch": lambda _: True} if cuts else {}
    chain = new_chain("qwen3", cuts, takes_answers=lambda _: True, **options)

    async def run(seed: int) -> list[int]:
        async with chain.session(draft=None) as client:
            await client.prefill(ids(9, seed=seed), 8)
            await client.send(client.frame(StepKind.DECODE, [5], more=40))
            commits = [await client.commit()]
            while commits[-1].more:
                commits.append(await client.commit())
                if len(commits) <= 48 and len(commits) % 8 == 0:
                    last = commits[-1].step + 24
                    await client.session.limit_steps(StepLimit(last, 0))
            assert (len(commits), commits[-1].step) == (72, last)
            client.steps = last + 1
            commits += await follow(client, commits[-1].token_ids[-1], 20)
            await client.session.save_snapshot(SnapshotSave(f"{seed:032x}", client.length))
            saved = await anext(client.events)
            assert isinstance(saved, SnapshotSaved)
            assert {part.refusal for part in saved.parts} == {""}
        return tokens_of(commits)

    together = await asyncio.gather(*map(run, range(4)))
    assert chain.caller_way is not None
    assert max(chain.caller_way.sent) > 1
    chain.free_snapshots()
    assert together == [await run(seed) for seed in range(4)]


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="steps of the chain need a GPU")
@pytest.mark.parametrize("name", ["qwen3", "qwen3-sliding", "qwen3_5-ratio-3"])
async def test_answers_by_kernels_are_those_of_each_alone(
    new_chain: Callable[..., Chain], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens and log-probabilities are the same by kernels, which compute chunks of prompts together as well. Which
    draft tokens there are, and so how many of them are accepted at a time, is up to rounding. Blocks of several
    sessions are issued with the step before them. One stage: two in one process would capture graphs at the same time,
    which torch cannot."""
    from shard_worker.drafting.ahead import BlocksAhead

    issued: list[int] = []
    issue = BlocksAhead.issue

    def noting(blocks: BlocksAhead, step: Any, sessions: Sequence[Any], *others: Any) -> Any:
        issued.append(sum(one.decided for one in sessions))
        return issue(blocks, step, sessions, *others)

    monkeypatch.setattr(BlocksAhead, "issue", noting)
    monkeypatch.setattr(step_batches, "BLOCKS_AHEAD_FROM", 2)
    chain = new_chain(name, (), dtype="bfloat16", devices="cuda:0")
    alone = [await answer(chain, request) for request in REQUESTS]
    counts = rows_together(chain)
    answers = await asyncio.gather(*(answer(chain, request) for request in REQUESTS))
    for one, other in zip(alone, answers, strict=True):
        assert_same_beginning(tokens_of(one), tokens_of(other))
        assert_same_beginning(logprobs_of(one), logprobs_of(other))
    assert all(max(of_stage) > 1 for of_stage in counts)
    assert max(issued) > 1


def logprobs_of(commits: Sequence[Commit]) -> list[object]:
    return [logprobs for commit in commits for logprobs in commit.logprobs]


def assert_same_beginning(one: Sequence[object], other: Sequence[object]) -> None:
    """As far as both go."""
    assert [*one[: len(other)]] == [*other[: len(one)]]


async def test_tokens_of_several_sessions_are_drawn_at_once(
    new_chain: Callable[..., Chain], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With parameters of their own, plain and drafted, beside a greedy one: they are those of each alone. An error of
    the draw ends those that were in the step, and no others."""
    chain = new_chain("qwen3", (), dtype="bfloat16")
    requests = [
        REQUESTS[0],
        Request(ids(9, seed=9), 0, {"sampling": SamplingParams(temperature=1.0, seed=8)}),
        Request(ids(8, seed=10), 0, {"sampling": SamplingParams(temperature=1.2, top_p=0.9, seed=9), "logprobs": 2}),
        Request(ids(6, seed=11), BLOCK - 1, {"sampling": SamplingParams(temperature=0.7, top_k=9, seed=2**64 - 1)}),
        Request(ids(12, seed=12), BLOCK - 1, {"sampling": SamplingParams(temperature=0.9, min_p=0.02, seed=3)}),
    ]
    alone = [produced(await answer(chain, request, batch_invariant_rows=16)) for request in requests]
    sessions: list[int] = []
    draw_together = step_batches.draw_together

    def noting(rows: Sequence[Any]) -> list[list[int]]:
        sessions.append(len(rows))
        return draw_together(rows)

    monkeypatch.setattr(step_batches, "draw_together", noting)
    answers = await asyncio.gather(*(answer(chain, request, batch_invariant_rows=16) for request in requests))
    assert [produced(commits) for commits in answers] == alone
    assert max(sessions) > 1

    def fail(_: Sequence[Any]) -> list[list[int]]:
        raise ResourceExhausted("the device has no memory left")

    monkeypatch.setattr(step_batches, "draw_together", fail)
    errors = await asyncio.gather(*(answer(chain, requests[1]) for _ in range(3)), return_exceptions=True)
    assert sum(isinstance(error, ResourceExhausted) for error in errors) >= 2
    monkeypatch.setattr(step_batches, "draw_together", draw_together)
    assert produced(await answer(chain, requests[1], batch_invariant_rows=16)) == alone[1]


async def test_a_session_that_is_closed_while_its_step_waits(new_chain: Callable[..., Chain]) -> None:
    """Its step fails by itself, and those of the others come to what they would have."""
    chain = new_chain("qwen3_5", ())
    [thread], expected = chain.threads, tokens_of(await answer(chain, REQUESTS[0]))
    plain = {"draft": None}
    async with chain.session(**plain) as client, chain.session(**plain) as other, chain.session(**plain) as third:
        for one in (client, other, third):
            await one.prefill(REQUESTS[0].prompt[:-1])
        began, free = threading.Event(), threading.Event()
        thread.queue_step(lambda: (began.set(), free.wait(10)))
        await asyncio.to_thread(began.wait)
        following = asyncio.ensure_future(follow(client, REQUESTS[0].prompt[-1], COUNT))
        waiting = [asyncio.ensure_future(one.send(step_of(one))) for one in (other, third)]
        while len(chain.roles[0].batches) < 3:
            await asyncio.sleep(0.01)
        await other.session.close()
        free.set()
        with pytest.raises(FailedPrecondition, match="closed"):
            await waiting[0]
        await waiting[1]
        assert tokens_of(await following) == expected
        assert len((await third.commit()).token_ids) == 1


def step_of(client: Client) -> Forward:
    return client.frame(StepKind.DECODE, REQUESTS[0].prompt[-1:])


def logits_alive(vocabulary: int) -> set[int]:
    """Which tensors there are of a few rows as wide as the vocabulary."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor and thing.dim() == 2]
    return {id(tensor) for tensor in tensors if 1 < len(tensor) <= 4 and tensor.shape[1] == vocabulary}


async def test_sessions_hold_no_logits_of_steps_together(new_chain: Callable[..., Chain]) -> None:
    """What a session remembers of its last step is no more than hidden rows, while it waits for its client."""
    chain = new_chain("qwen3", ())
    loaded, counts = chain.roles[0].loaded, rows_together(chain)
    assert loaded is not None
    before = logits_alive(loaded.stage.config.vocab_size)
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(chain.session(draft=None)) for _ in range(4)]
        for client in clients:
            await client.prefill(REQUESTS[0].prompt[:-1])
        await asyncio.gather(*(follow(client, REQUESTS[0].prompt[-1], COUNT) for client in clients))
        # A device thread forgets its last step a moment after the answer is there.
        await chain.threads[0].submit(int)
        assert logits_alive(loaded.stage.config.vocab_size) <= before
    assert max(counts[0]) > 1


@pytest.mark.parametrize("most", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_what_is_too_much_for_one_step_is_computed_in_several(new_chain: Callable[..., Chain], most: int) -> None:
    """One behind the other, and one that is left for itself alone: it may be longer than several have room for."""
    chain = new_chain("qwen3_5", (), dtype="bfloat16")
    requests = [REQUESTS[0], REQUESTS[1], REQUESTS[4], REQUESTS[7], REQUESTS[0]]
    alone = [produced(await answer(chain, request, batch_invariant_rows=16)) for request in requests]
    steps: list[int] = []
    watch(chain.roles[0], most=most, before_together=lambda inputs: steps.append(len(inputs)))
    answers = await asyncio.gather(*(answer(chain, request, batch_invariant_rows=16) for request in requests))
    assert [produced(commits) for commits in answers] == alone
    assert set(steps) == {most} - {1}


async def test_an_error_of_a_step_together_ends_those_in_it(new_chain: Callable[..., Chain]) -> None:
    """Each of them hears of it, and sessions that come later are answered."""
    chain = new_chain("qwen3", ())

    def fail(_: Sequence[StepInput]) -> None:
        raise ResourceExhausted("the device has no memory left")

    watch(chain.roles[0], before_together=fail)
    requests = [REQUESTS[0]] * 3
    errors = await asyncio.gather(*(answer(chain, request) for request in requests), return_exceptions=True)
    assert sum(isinstance(error, ResourceExhausted) for error in errors) >= 2
    watch(chain.roles[0])
    await answer(chain, REQUESTS[0])


@pytest.mark.parametrize(
    ("by", "name"),
    [
        pytest.param("torch", "qwen3", marks=pytest.mark.slow),
        ("torch", "qwen3_5"),
        pytest.param("kernels", "qwen3", marks=pytest.mark.gpu),
        pytest.param("kernels", "qwen3_5", marks=pytest.mark.gpu),
    ],
)
async def test_steps_are_launched_behind_those_whose_results_are_not_read(
    new_chain: Callable[..., Chain], by: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all of the chain is on one GPU, what follows by itself is launched with tokens that only the device knows,
    the most probable ones and such as are drawn. Sessions of all lengths come to the tokens of each alone: some end by
    a stop token, one is closed, others come."""
    kernels = by == "kernels"
    if not kernels:
        monkeypatch.setattr(step_batches, "runs_by_kernels", lambda _: True)
        monkeypatch.setattr(step_batches, "queue_draws_into", draw_into)
    chain = new_chain(name, (), **({"dtype": "bfloat16", "devices": "cuda:0"} if kernels else {}))
    lengths = [3, 8, 16, 26, 20, 26, 12]
    plain: dict[str, Any] = {"draft": None, "batch_invariant_rows": 16}

    async def answer_of(number: int, fields: dict[str, Any], first_come: float = 0.0) -> list[int]:
        await asyncio.sleep(first_come)
        prompt = ids(5 + number, seed=number)
        async with chain.session(**plain, **fields) as client:
            await client.prefill(prompt[:-1], 8)
            tokens = tokens_of(await follow(client, prompt[-1], lengths[number]))
            # The session's memory is where the answer ends, and not behind it.
            length = len(prompt) - 1 + len(tokens)
            assert client.session.state.length == length
            more = await follow(client, tokens[-1], 2)
        return [*tokens, *tokens_of(more)]

    fields: list[dict[str, Any]] = [{} for _ in lengths]
    fields[0]["sampling"] = fields[5]["sampling"] = SamplingParams(temperature=0.8, seed=5)
    fields[3]["sampling"] = SamplingParams(temperature=1.2, top_k=30, top_p=0.9, min_p=0.01, seed=6)
    for number in (4, 5):
        fields[number]["stop_token_ids"] = frozenset({(await answer_of(number, fields[number]))[9]})
    alone = [await answer_of(number, one) for number, one in enumerate(fields)]
    behind: list[int] = []
    watch(
        chain.roles[0],
        before_together=lambda inputs: behind.append(sum(given.token_ids[0] < 0 for given in inputs)),
        **({} if kernels else {"behind": []}),
    )

    async def leave() -> None:
        async with chain.session(**plain) as client:
            await client.prefill(ids(9, seed=9))
            await client.send(client.frame(StepKind.DECODE, [1], more=40))
            await client.commit()

    waits = [0.0, 0.0, 0.0, 0.0, 0.0, 0.01, 0.03]
    answers = [answer_of(number, *each) for number, each in enumerate(zip(fields, waits, strict=True))]
    found = await asyncio.gather(*answers, leave(), leave())
    assert found[: len(alone)] == alone
    # Of seven that run at once.
    assert max(behind) > 4


def draw_into(
    tokens: torch.Tensor, logits: torch.Tensor, draws: Sequence[Draw], rows: Sequence[int], made: torch.Tensor
) -> None:
    """Do as `drawing.queue_draws_into` in plain torch."""
    tokens[[*rows]] = made[[*rows]] = drawing.queue_draws(logits[[*rows]], draws)


@dataclass
class BlockMadeAtOnce:
    """Stands for a block that a GPU computes while the host goes on: here plain torch has made it before."""

    tokens: list[int]
    block: tuple[int, ...]
    read: bool = False
    decided_ns: int = field(default_factory=time.monotonic_ns)
    drafted_ns: int = 0
    there: bool = True

    def produced(self) -> list[int]:
        self.read = True
        return self.tokens

    def draft_tokens(self) -> tuple[int, ...]:
        return self.block


class BlocksMadeAtOnce:
    """Issues the blocks of steps of several sessions as kernels do, in plain torch.

    behind: of how many sessions each step had rows that were launched before the results of the last one were read.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.behind: list[int] = []
        self._last: Sequence[BlockMadeAtOnce | None] = ()
        self._completed: dict[int, tuple[int, ...]] = {}
        """The tokens of rows behind blocks, by the session's memory."""
        monkeypatch.setattr(LocalDraftLink, "takes_rows_later", False)
        monkeypatch.setattr(LastStageDeviceSession, "issue_together", lambda _, *given: self.issue(*given))
        monkeypatch.setattr(LastStageDeviceSession, "complete_step", lambda _, inputs: self.complete(inputs))

    def complete(self, inputs: list[StepInput]) -> None:
        """Put in the tokens of rows behind blocks, and where they begin."""
        self.behind.append(sum(given.behind is not None for given in inputs))
        for number, given in enumerate(inputs):
            if given.behind is not None:
                made, state = self._last[given.behind], given.state
                assert made is not None
                assert not made.read
                tokens = (made.tokens[-1], *made.block)[: len(given.token_ids)]
                length = state.length + (len(made.tokens) if state.pending else 0)
                inputs[number] = replace(given, token_ids=tokens, state=replace(state, length=length, pending=0))
                self._completed[id(state)] = tokens

    def issue(self, steps: Sequence[tuple[Any, Forward]], outputs: Sequence[StepPart]) -> list[BlockMadeAtOnce | None]:
        total, first, made = outputs[0].whole.total, 0, list[BlockMadeAtOnce | None]()
        for (session, forward), output in zip(steps, outputs, strict=True):
            rows, made_here = len(forward.token_ids), None
            if session.draft is not None and session._verifier.is_decided_on_device(forward) and total is not None:
                made_here = self._made(session, forward, output, total[first : first + rows])
            made.append(made_here)
            first += rows
        self._last = made
        return made

    def _made(self, session: Any, forward: Forward, output: StepPart, total: torch.Tensor) -> BlockMadeAtOnce:
        chosen, count = output.argmax_on_host(), len(forward.token_ids)
        assert chosen is not None
        given = self._completed.pop(id(session.state()), forward.token_ids)
        stops = session._request.stop_token_ids
        if given is not forward.token_ids and given[0] in stops:
            # It ended with the step before.
            return BlockMadeAtOnce([], ())
        tokens = chosen[-1:]
        if forward.kind is StepKind.VERIFY:
            tokens = accept(given[1:], chosen, stops)
            count = len(tokens)
            for caches in session.state().caches:
                caches.commit_block(count)
        draft = session.draft
        features, start = draft.with_kept(Features(total=total[:count]), draft.state.length)
        draft.engine.append(draft.state, features, start)
        block: tuple[int, ...] = ()
        if forward.propose_tokens:
            request = DraftRequest(forward.step, draft.state.length, tokens[-1], forward.propose_tokens)
            block = draft.engine.propose(draft.state, request)
        return BlockMadeAtOnce(tokens, block)


@pytest.mark.parametrize("name", [pytest.param("qwen3", marks=pytest.mark.slow), "qwen3_5"])
async def test_blocks_are_verified_behind_steps_whose_results_are_not_read(
    new_chain: Callable[..., Chain], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where blocks are issued with their steps, what follows is launched before the host knows them. Sessions of all
    lengths come to the tokens of each alone, and go on behind them: two end by a stop token, others come later, one
    leaves in the midst of it."""
    chain = new_chain(name, (), dtype="bfloat16", transport=FeatureTransport.SUM)
    lengths, plain = [3, 12, 20, 16, 26, 9, 26], {"batch_invariant_rows": 16}

    async def answer_of(number: int, fields: dict[str, Any], first_come: float = 0.0) -> list[int]:
        await asyncio.sleep(first_come)
        prompt = ids(5 + 3 * number, seed=number)
        async with chain.session(**plain, **fields) as client:
            await client.prefill(prompt[:-1], 8)
            tokens = tokens_of(await follow(client, prompt[-1], lengths[number], BLOCK - 1))
            assert isinstance(await anext(client.events), Proposal)
            # The session's memory is where the answer ends, and not behind it.
            state = client.session.state
            assert state.length == len(prompt) - 1 + len(tokens)
            more = await follow(client, tokens[-1], 4)
        return [*tokens, *tokens_of(more)]

    fields: list[dict[str, Any]] = [{} for _ in lengths]
    for number in (4, 6):
        fields[number] = {"stop_token_ids": frozenset({(await answer_of(number, {}))[17]})}
    alone = [await answer_of(number, one) for number, one in enumerate(fields)]
    blocks = BlocksMadeAtOnce(monkeypatch)
    monkeypatch.setattr(step_batches, "BLOCKS_AHEAD_FROM", 2)
    watch(chain.roles[0], behind=[])

    async def leave() -> None:
        async with chain.session(**plain) as client:
            await client.prefill(ids(9, seed=9))
            await client.send(client.frame(StepKind.DECODE, [1], BLOCK - 1, more=40))
            await client.commit()

    waits = [0.0, 0.0, 0.0, 0.0, 0.0, 0.01, 0.03]
    answers = [answer_of(number, *each) for number, each in enumerate(zip(fields, waits, strict=True))]
    found = await asyncio.gather(*answers, leave(), leave())
    assert found[: len(alone)] == alone
    assert max(blocks.behind) > 2


async def test_answers_are_heard_while_the_draft_computes(
    new_chain: Callable[..., Chain], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who chooses how many draft tokens come next knows of the last step before the draft is done with it."""
    chain, heard = new_chain("qwen3", ()), threading.Event()
    proposed_together = DraftEngine.propose_together

    def propose(engine: DraftEngine, *args: Any) -> list[tuple[int, ...]]:
        assert heard.wait(20)
        return proposed_together(engine, *args)

    monkeypatch.setattr(DraftEngine, "propose_together", propose)
    [thread, *_] = chain.threads
    async with chain.session() as first, chain.session() as second:
        for client in (first, second):
            await client.prefill(REQUESTS[0].prompt[:-1])
        is_busy, begin = threading.Event(), threading.Event()
        busy = thread.submit(lambda: (is_busy.set(), begin.wait(20)))
        await asyncio.to_thread(is_busy.wait)
        frames = [client.frame(StepKind.DECODE, REQUESTS[0].prompt[-1:], BLOCK - 1) for client in (first, second)]
        sending = [
            asyncio.ensure_future(client.send(frame)) for client, frame in zip((first, second), frames, strict=True)
        ]
        while len(chain.roles[0].batches) < 2:
            await asyncio.sleep(0.001)
        begin.set()
        async with asyncio.timeout(10):
            commits = [await client.commit() for client in (first, second)]
        assert [commit.batch_sessions for commit in commits] == [2, 2]
        heard.set()
        for client in (first, second):
            assert len((await anext(client.events)).token_ids) == BLOCK - 1
        await asyncio.gather(busy, *sending)


def test_prompts_and_answers_take_turns() -> None:
    """Between two jobs that compute rows comes what waits together; other jobs come before both."""
    thread, done = DeviceThread(1), list[str]()

    class Steps:
        """Stands for steps of several sessions, some of which wait until all have had their turn."""

        left = 2

        @property
        def waiting(self) -> bool:
            return bool(self.left)

        def run(self) -> None:
            self.left -= 1
            done.append("steps")

        def drop(self) -> None:
            self.left = 0

    def chunk() -> None:
        thread.computes("step", 100)
        done.append("chunk")

    thread.queue(
        lambda: [thread.serve(Steps()), *(thread.queue(chunk) for _ in range(3)), thread.queue(done.append, "job")]
    )
    while len(done) < 6:
        thread.queue(int).result(5)
    assert done == ["chunk", "steps", "chunk", "steps", "chunk", "job"]
    thread.shutdown()
