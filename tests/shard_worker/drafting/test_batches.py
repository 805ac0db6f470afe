"""A draft's kernels for several sessions at once against the same sessions alone, and their blocks issued before their
step's outcome is known."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shard_worker.drafting.choosers.argmax import Argmax
from shard_worker.drafting.draft_head import DraftHead
from shard_worker.drafting.drafters.dflash import DFlashDraft, DFlashState
from shard_worker.drafting.engine import CommittedRows, DraftEngine, DraftRequest
from shard_worker.model.features import Features
from shard_worker.sampling.acceptance import accept
from shard_worker.stage.batch_runner import MAX_SESSIONS, BatchRunner, SessionTokens
from shard_worker.weights.weight import DenseWeight
from tests.reference.draft_checkpoints import DFLASH2, DOMINO, DSPARK
from tests.shard_worker.model.kernels.machine import DTYPE, ON_GPU, device
from tests.shard_worker.tiny import Tiny, ids, load_draft, load_stage

if TYPE_CHECKING:
    from shard_worker.drafting.runner import DFlashRunner

pytestmark = pytest.mark.gpu

FULL, SLIDING = "full_attention", "sliding_attention"
SHAPES: dict[str, dict[str, Any]] = {
    "sliding-causal": {"layer_types": (SLIDING, FULL), "sliding_window": 10, "is_causal": True},
    "biases": {"layer_types": (FULL,), "layers": 1, "attention_bias": True, "is_causal": False},
    "reduced": {"form": "speculators", "layers": 1, "token_ids": range(1, 256, 3)},
    "dflash2": {"own": DFLASH2, "layers": 1},
    "dspark": {"own": DSPARK | {"markov_head_type": "rnn", "enable_confidence_head": True}, "layers": 1},
    "domino": {"own": DOMINO, "layers": 1, "block_size": 7},
}
STOPS = frozenset({7, 40, 200})


class Drafting:
    """A draft with its kernels for one session and for several, and an embedding and a head of the target's."""

    def __init__(self, tiny: Tiny, name: str) -> None:
        path = tiny.draft("qwen3", f"batches-{name}", **SHAPES[name])
        self.draft: DFlashDraft = load_draft(path, str(DTYPE).removeprefix("torch."), device())
        generator = torch.Generator().manual_seed(1)
        self.embedding, head = (
            torch.randn(256, 64, generator=generator).to(device().torch_device, DTYPE) for _ in range(2)
        )
        # Where the draft has a head of its own that one is used, as by `make_engine`.
        chosen = self.draft.own_head or DraftHead(DenseWeight(head), chooser=self.draft.chooser or Argmax())
        self.alone: DFlashRunner = self.draft.make_runner(chosen, graphs=ON_GPU)
        self.together: DFlashRunner = self.draft.make_runner(chosen, graphs=ON_GPU, sessions=MAX_SESSIONS)
        mask_row = self.embedding[self.draft.config.mask_token_id]
        for runner in (self.alone, self.together):
            # All numbers of rows take long where kernels are interpreted.
            if ON_GPU:
                runner.prepare(mask_row, self.embedding)
            else:
                runner.set_mask_row(mask_row, self.embedding)
        self.engine = DraftEngine(self.draft, lambda ids: self.embedding[list(ids)], chosen, self.alone, self.together)

    def contexts(self, lengths: Sequence[int]) -> tuple[list[DFlashState], list[DFlashState]]:
        """The same random contexts twice."""
        made: tuple[list[DFlashState], list[DFlashState]] = [], []
        for seed, length in enumerate(lengths):
            features = Features(total=rows(length, seed))
            for states in made:
                states.append(self.draft.allocate(400))
                if length:
                    self.draft.append([states[-1]], [length], features)
        return made


def rows(count: int, seed: int) -> torch.Tensor:
    """Features of rows."""
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(seed)).to(device().torch_device)


def assert_same(own: DFlashState, expected: DFlashState) -> None:
    """The same context, to the last bit."""
    assert own.length == expected.length
    first = max(0, own.length - 10)
    for one, other in zip(own.views(), expected.views(), strict=True):
        assert torch.equal(one.read(first, own.length), other.read(first, own.length))


@pytest.mark.parametrize("name", SHAPES)
@torch.inference_mode()
def test_draft_tokens_are_the_same_alone_and_together(tiny: Tiny, name: str) -> None:
    """Contexts and draft tokens, along contexts that grow, begin a page and have only begun."""
    drafting, draw = Drafting(tiny, name), random.Random(name)
    together, alone = drafting.contexts((0, 1, 250, 256, 30) * (8 if ON_GPU else 1))
    for turn in range(8 if ON_GPU else 2):
        # Interpreted, sums differ with the number of rows that graphs are made with: 16 rows at most.
        chosen = draw.sample(range(len(alone)), draw.randint(2, len(alone)) if ON_GPU else 3)
        counts = [draw.choice((1, 2, 5, 8) if ON_GPU else (1, 2, 5)) for _ in chosen]
        pieces = [rows(count, 100 + turn + one) for one, count in zip(chosen, counts, strict=True)]
        drafting.engine.append_together(
            [
                CommittedRows(together[one], together[one].length, count)
                for one, count in zip(chosen, counts, strict=True)
            ],
            Features(total=torch.cat(pieces)),
        )
        for one, piece in zip(chosen, pieces, strict=True):
            drafting.engine.append(alone[one], Features(total=piece), alone[one].length)
        requests = [
            DraftRequest(turn, together[one].length, token_id, draw.choice((1, 3, 7) if ON_GPU else (1, 3)))
            for one, token_id in zip(chosen, ids(len(chosen), seed=turn), strict=True)
        ]
        found = drafting.engine.propose_together([together[one] for one in chosen], requests)
        for one, request, draft_tokens in zip(chosen, requests, found, strict=True):
            assert draft_tokens == drafting.engine.propose(alone[one], request)
            assert_same(together[one], alone[one])


@pytest.mark.parametrize("name", SHAPES)
@torch.inference_mode()
def test_blocks_issued_ahead_are_those_of_each_session_alone(tiny: Tiny, name: str) -> None:
    """Whatever number of rows counts: tokens, draft tokens and contexts are those that the host makes of each session
    alone. Sessions without a draft, without a next block, those that the host decides, and a prompt's rows, which all
    count, stand among them."""
    from shard_worker.drafting.ahead import BlocksAhead, Following
    from shard_worker.model.kernels.step_parameters import StepParameters

    drafting, draw = Drafting(tiny, name), random.Random(name)
    together, alone = drafting.contexts((0, 250, 30, 256, 1) * (6 if ON_GPU else 1))
    step = StepParameters(device().torch_device, 3, rows=512, sessions=MAX_SESSIONS)
    blocks, counts_seen = BlocksAhead(drafting.together, drafting.embedding), set()
    for turn in range(8 if ON_GPU else 2):
        tokens = [
            ids(draw.choice((1, 4, 8) if ON_GPU else (1, 3, 4)), seed=turn * 50 + one) for one in range(len(alone))
        ]
        chosen = [[*one[1:], draw.randrange(256)] for one in tokens]
        for one in chosen:
            one[draw.randrange(len(one))] = draw.choice((3, 7, 100))
        # The first one has no draft, the last one no next block; the second one is decided by the host.
        following = [
            Following(
                len(own),
                state if one else None,
                draw.choice((2, 3)) if 0 < one < len(alone) - 1 else 0,
                STOPS,
                one != 1,
            )
            for one, (own, state) in enumerate(zip(tokens, together, strict=True))
        ]
        following[1] = Following(len(tokens[1]), decided=False)
        following[2] = replace(following[2], whole=True)
        step.begin()
        first = 0
        for one, own in enumerate(tokens):
            step.add(one, first, together[one].length, len(own), token_ids=own)
            first += len(own)
        step.send()
        total = rows(first, turn)
        flat = torch.tensor([token for own in chosen for token in own], device=total.device)
        committed: list[list[int]] = []
        assert blocks.takes(following)

        issued = blocks.issue(step, following, flat, total, lambda counts, to=committed: to.append(counts.tolist()))

        first, [counts] = 0, committed
        produced, proposed = issued.produced(), issued.draft_tokens()
        for one, (ask, own) in enumerate(zip(following, tokens, strict=True)):
            expected = accept(own[1:], chosen[one], STOPS) if ask.decided else []
            kept = len(expected)
            if ask.whole:
                expected, kept = chosen[one][-1:], len(own)
            assert produced[one] == expected
            assert counts[one] == len(expected)
            counts_seen.add(kept)
            if ask.state is not None:
                drafting.engine.append(alone[one], Features(total=total[first : first + kept]), alone[one].length)
                assert_same(together[one], alone[one])
                if ask.draft_tokens:
                    request = DraftRequest(turn, alone[one].length, expected[-1], ask.draft_tokens)
                    assert proposed[one] == drafting.engine.propose(alone[one], request)
            assert len(proposed[one]) == ask.draft_tokens or (name == "dspark" and len(proposed[one]) > 0)
            first += len(own)
    assert len(counts_seen) > 2


@pytest.mark.parametrize("name", ["sliding-causal", "dflash2"] if ON_GPU else ["sliding-causal"])
@torch.inference_mode()
def test_a_step_is_completed_by_what_the_device_decided(tiny: Tiny, name: str) -> None:
    """Two steps are issued before the host reads the outcome of the first: the second one's rows begin where the first
    one's that count end, its tokens are the blocks issued with that, and a session that ended has none that count. A
    session that comes with the second step stands among them."""
    from shard_worker.drafting.ahead import BlocksAhead, Following
    from shard_worker.model.kernels.step_parameters import BASE, ENDED, StepParameters

    drafting, place = Drafting(tiny, name), device().torch_device
    together, alone = drafting.contexts((0, 250, 30, 5))
    step = StepParameters(place, 3, rows=512, sessions=MAX_SESSIONS, twins=2)
    blocks = BlocksAhead(drafting.together, drafting.embedding)
    tokens = [ids(4, seed=1), ids(3, seed=2), ids(4, seed=3)]
    # The second session stops with its second row, of the third one all rows count.
    chosen = [[*tokens[0][1:3], 100, 5], [tokens[1][1], 7, 9], [*tokens[2][1:], 50]]
    kept, known = [3, 2, 4], [100, 7, 50]
    step.begin()
    first = 0
    for one, own in enumerate(tokens):
        step.add(one, first, together[one].length, len(own), token_ids=own)
        first += len(own)
    step.send()
    asked = [Following(len(own), state, 2, STOPS) for own, state in zip(tokens, together, strict=False)]
    flat = torch.tensor([token for own in chosen for token in own], device=place)
    total, begun = rows(first, 1), [state.length for state in together]
    issued = blocks.issue(step, asked, flat, total, None)

    # In another order, with a session before them whose rows the host knows.
    order, lone = [2, 0, 1], ids(3, seed=4)
    step.begin()
    step.add(0, 0, together[3].length, 3, token_ids=lone)
    for number, one in enumerate(order, 1):
        highest = together[one].length + len(tokens[one])
        step.add(number, 3 * number, highest, 3, token_ids=[-1] * 3, behind=one)
    step.send()
    blocks.complete(step)
    completed = step.tokens[:12].tolist()
    assert completed[:3] == lone
    assert [completed[3 * number] for number in (1, 2, 3)] == [known[one] for one in order]
    lines = step.lines[0, :4].cpu()
    assert lines[1:, BASE.value].tolist() == [begun[one] + kept[one] for one in order]
    assert lines[:, ENDED.value].tolist() == [0, 0, 0, 1]
    # The first draft token of each is taken, and not the second.
    flat = torch.tensor([one for row in range(0, 12, 3) for one in (completed[row + 1], 101, 102)], device=place)
    later = [Following(3, together[3], 2, STOPS)]
    later += [Following(3, together[one], 2, STOPS, before=len(tokens[one])) for one in order]
    assert blocks.takes(later)
    committed: list[list[int]] = []
    more = rows(12, 2)
    issued_later = blocks.issue(step, later, flat, more, lambda counts: committed.append(counts.tolist()))

    assert issued.produced() == [[*own[1:count], last] for own, count, last in zip(tokens, kept, known, strict=True)]
    proposed = issued.draft_tokens()
    assert committed[0][:4] == [2, 2, 2, 0]
    first_rows = (0, 4, 7)
    for one, (count, last, row) in enumerate(zip(kept, known, first_rows, strict=True)):
        drafting.engine.append(alone[one], Features(total=total[row : row + count]), alone[one].length)
        request = DraftRequest(0, alone[one].length, last, 2)
        assert proposed[one] == drafting.engine.propose(alone[one], request)
        if one != 1:
            number = 1 + order.index(one)
            assert completed[3 * number + 1 : 3 * number + 3] == [*proposed[one]]
    assert issued_later.produced() == [[completed[row + 1], 101] for row in (0, 3, 6)] + [[]]
    proposed = issued_later.draft_tokens()
    for number, one in enumerate([3, *order]):
        if one != 1:
            features = Features(total=more[3 * number : 3 * number + 2])
            drafting.engine.append(alone[one], features, alone[one].length)
            assert proposed[number] == drafting.engine.propose(alone[one], DraftRequest(1, alone[one].length, 101, 2))
        assert_same(together[one], alone[one])


@pytest.mark.parametrize("name", ["qwen3_5-ratio-3"])
@torch.inference_mode()
def test_recurrent_layers_advance_by_what_the_device_decides(tiny: Tiny, name: str) -> None:
    """A commit of the step launched last leaves the same state as one whose counts the host says."""
    stage = load_stage(tiny.path(name), devices=[device()], dtype=str(DTYPE).removeprefix("torch."))
    [segment] = stage.segments
    runner = BatchRunner(segment, stage.embedding, stage.head, graphs=ON_GPU)
    counts, kept = (3, 1, 4), (2, 1, 3)
    one, other = ([segment.allocate(60, 16) for _ in counts] for _ in range(2))
    for caches in (one, other):
        parts = [
            SessionTokens(0, tuple(ids(count)), own, None, True) for count, own in zip(counts, caches, strict=True)
        ]
        runner.run(parts, (), None)
        if caches is one:
            runner.commit(caches, kept)
        else:
            decided = torch.zeros(MAX_SESSIONS, dtype=torch.int64)
            decided[: len(kept)] = torch.tensor(kept)
            runner.commit_last(decided.to(device().torch_device))
    for here, there in zip(one, other, strict=True):
        assert here.recurrent is not None
        assert there.recurrent is not None
        assert here.recurrent.state.abs().max() > 0
        assert torch.equal(here.recurrent.state, there.recurrent.state)
        before = here.recurrent.taps - 1
        assert torch.equal(here.recurrent.conv[:, :before], there.recurrent.conv[:, :before])
