"""A draft by kernels against the same draft in plain torch, and a block issued before its step's outcome is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shard_worker.device.dtypes import to_wire
from shard_worker.drafting.choosers.dflash2 import Selector
from shard_worker.drafting.draft_head import DraftHead
from shard_worker.drafting.drafters.dflash import DFlashDraft, DFlashState, read_fc
from shard_worker.model.features import Features
from shard_worker.sampling.acceptance import accept
from shard_worker.stage.loader import CaptureRequest
from shard_worker.stage.stage import Stage
from shard_worker.stage.step_graph import StepOutput
from shard_worker.stage.step_runner import StepRunner
from shard_worker.weights.opening import open_checkpoint
from shard_worker.weights.weight import DenseWeight
from tests.reference.draft_checkpoints import DFLASH2, DOMINO, DSPARK
from tests.shard_worker.model.kernels.machine import DTYPE, ON_GPU, device
from tests.shard_worker.tiny import Tiny, ids, load_draft, load_stage

if TYPE_CHECKING:
    from shard_worker.drafting.runner import DFlashRunner

pytestmark = pytest.mark.gpu

FULL, SLIDING = "full_attention", "sliding_attention"
SHAPES: dict[str, dict[str, Any]] = {
    "full": {},
    "full-causal": {"is_causal": True},
    "biases": {"attention_bias": True, "is_causal": False},
    "sliding": {"layer_types": (SLIDING, FULL), "sliding_window": 10},
    "sliding-non-causal": {"layer_types": (SLIDING, SLIDING), "sliding_window": 200, "is_causal": False},
}
NAME = str(DTYPE).removeprefix("torch.")


def make(tiny: Tiny, name: str, **options: Any) -> tuple[DFlashDraft, DFlashRunner, torch.Tensor, torch.Tensor]:
    """A draft, its runner, and an embedding and a head of the target's."""
    from shard_worker.drafting.runner import DFlashRunner

    draft = load_draft(tiny.draft("qwen3", f"kernels-{name}", **options), NAME, device())
    generator = torch.Generator().manual_seed(1)
    embedding, head = (torch.randn(256, 64, generator=generator).to(draft.device.torch_device, DTYPE) for _ in range(2))
    return draft, DFlashRunner(draft, DraftHead(DenseWeight(head)), graphs=ON_GPU), embedding, head


@pytest.mark.parametrize("name", SHAPES)
@torch.inference_mode()
def test_a_block_is_that_of_plain_torch(tiny: Tiny, name: str) -> None:
    """Keys and values of the context, and the most probable tokens where they are clear, along a context that grows."""
    draft, runner, embedding, head = make(tiny, name, **SHAPES[name])
    own, expected = draft.allocate(640), draft.allocate(640)
    features = torch.randn(600, 64, generator=torch.Generator().manual_seed(3)).to(draft.device.torch_device)
    for count, draft_tokens in ((1, 7), (240, 7), (5, 3), (8, 7), (8, 1), (250, 7), (3, 7)):
        piece = Features(total=features[own.length : own.length + count])
        draft.append([expected], [count], piece)
        if runner.takes([own], [0], [count], [draft_tokens]):
            runner.append([own], [count], draft.mix(piece))
        else:
            draft.append([own], [count], piece)
        rows = embedding[[17, draft.config.mask_token_id]]
        logits = (draft.propose([expected], rows, [draft_tokens]) @ head.T).float()
        found = torch.tensor(runner.propose([own], rows, [draft_tokens], [17]), device=logits.device)[0]
        missed = logits.amax(-1) - logits.gather(1, found[:, None])[:, 0]
        assert (missed <= 0.05 * logits.std()).all(), (count, missed)
        assert_close(own, expected)


@pytest.mark.parametrize(("taps", "is_causal"), [(2, False), (3, True)])
@torch.inference_mode()
def test_a_dflash2_block_is_that_of_plain_torch(tiny: Tiny, taps: int, is_causal: bool) -> None:
    """Along a context, each token is the one that the selector of plain torch takes behind the token before, where that
    is clear."""
    from shard_worker.drafting.runner import DFlashRunner

    own = DFLASH2 | {"conv_kernel_size": taps}
    draft, _, embedding, matrix = make(tiny, f"dflash2-{taps}", own=own, is_causal=is_causal)
    chooser = draft.chooser
    assert isinstance(chooser, Selector)
    head = DraftHead(DenseWeight(matrix), chooser=chooser)
    runner, state, expected = DFlashRunner(draft, head, graphs=ON_GPU), draft.allocate(640), draft.allocate(640)
    features, overruled = torch.randn(80, 64, generator=torch.Generator().manual_seed(3)), 0
    for count, draft_tokens in ((1, 7), (5, 3), (8, 7), (3, 7), (8, 1)):
        piece = Features(total=features[state.length : state.length + count].to(matrix.device))
        for one in (state, expected):
            draft.append([one], [count], piece)
        rows = embedding[[17, draft.config.mask_token_id]]
        hidden = draft.propose([expected], rows, [draft_tokens])
        logits = (hidden @ matrix.T).float()
        weighing = chooser.projection.matmul(hidden.to(chooser.projection.dtype)).float()

        [found] = runner.propose([state], rows, [draft_tokens], [17])

        for place, (before, token) in enumerate(zip((17, *found), found, strict=False)):
            scores = logits[place] + chooser.successors.float() @ (
                weighing[place] * chooser.predecessors[before].float()
            )
            best = scores[logits[place].topk(chooser.candidates).indices].max()
            assert best - scores[token] <= 0.05 * logits.std(), (count, place)
            overruled += int(token != logits[place].argmax())
    assert overruled > 5


@pytest.mark.parametrize(
    "own",
    [
        pytest.param(DSPARK, id="dspark"),
        pytest.param(DSPARK | {"enable_confidence_head": True}, id="dspark-confident"),
        pytest.param(DOMINO | {"shift_label": False}, id="domino"),
        pytest.param(DFLASH2 | {"sample_from_anchor": True}, id="dflash2-from-anchor"),
    ],
)
@torch.inference_mode()
def test_a_block_that_is_walked_through_is_that_of_plain_torch(tiny: Tiny, own: dict[str, Any]) -> None:
    """Along a context, from the known token's row on and behind it: the same blocks, but where rounding decides."""
    from shard_worker.drafting.runner import DFlashRunner

    name = "-".join(map(str, own.values()))
    draft, _, embedding, matrix = make(tiny, f"walked-{name}", own=own, layers=1, block_size=7)
    assert draft.has_kernels or not ON_GPU
    assert draft.chooser is not None
    head = DraftHead(DenseWeight(matrix / 8), chooser=draft.chooser)
    runner, state, expected = DFlashRunner(draft, head, graphs=ON_GPU), draft.allocate(640), draft.allocate(640)
    runner.set_mask_row(embedding[draft.config.mask_token_id], embedding)
    features, same = torch.randn(80, 64, generator=torch.Generator().manual_seed(3)), 0
    asked = ((1, 6), (5, 3), (8, 6), (3, 5), (8, 1), (2, 6))
    for count, draft_tokens in asked:
        piece = Features(total=features[state.length : state.length + count].to(matrix.device))
        for one in (state, expected):
            draft.append([one], [count], piece)
        rows = embedding[[17, draft.config.mask_token_id]]
        hidden = draft.propose([expected], rows, [draft_tokens])
        block = head.choose(hidden, [17], [draft_tokens], lambda ids: embedding[list(ids)])
        found = runner.propose([state], rows, [draft_tokens], [17])
        assert 0 < len(found[0]) <= draft_tokens
        same += int(found == block)
    assert same >= len(asked) - 1


def assert_close(own: DFlashState, expected: DFlashState) -> None:
    """The same context, but for rounding."""
    assert own.length == expected.length
    first = max(0, own.length - 10)
    for one, other in zip(own.views(), expected.views(), strict=True):
        torch.testing.assert_close(
            one.read(first, own.length).float(), other.read(first, own.length).float(), rtol=0.02, atol=0.08
        )


class Pair:
    """A target with a draft beside it, and one session on both. cut: where a stage before this one, in plain torch, has
    the layers below."""

    def __init__(self, tiny: Tiny, name: str, stops: frozenset[int], cut: int | None) -> None:
        from shard_worker.drafting.ahead import Ahead, BlocksAhead
        from shard_worker.drafting.runner import DFlashRunner

        path = tiny.draft(name, "kernels-ahead", target_layer_ids=(2, 0))
        _, fc = read_fc(open_checkpoint(path, "--draft"))
        captures = CaptureRequest((2, 0), fc)
        whole = load_stage(tiny.path(name), devices=[device()], dtype=NAME, capture=captures)
        layers = None if cut is None else (cut, whole.layers.last)
        stage = load_stage(tiny.path(name), layers, devices=[device()], dtype=NAME, capture=captures)
        self.front: Stage | None = None
        if cut is not None:
            self.front = load_stage(tiny.path(name), (0, cut), devices=[device()], dtype=NAME, capture=captures)
            self.front_state = self.front.allocate(400, 8)
        self.draft = load_draft(path, NAME, device())
        assert stage.head is not None
        assert whole.embedding is not None
        self.embedding = whole.embedding.tensor
        [segment] = stage.segments
        self.step = StepRunner(segment, stage.embedding, stage.head, graphs=ON_GPU)
        self.stage: Stage = replace(stage, runners=(self.step,))
        self.runner = DFlashRunner(self.draft, DraftHead(stage.head.weight), graphs=ON_GPU)
        self.runner.prepare(self.embedding[self.draft.config.mask_token_id])
        self.state, self.context = self.stage.allocate(400, 8), self.draft.allocate(400)
        self.stops = stops
        self.ahead = Ahead(self.step, BlocksAhead(self.runner, self.embedding), self.context, stops)

    def prefill(self, tokens: list[int]) -> None:
        features = Features()
        self.run(tokens, features, uncommitted=False)
        self.draft.append([self.context], [len(tokens)], features)

    def run(self, tokens: Sequence[int], features: Features | None, *, uncommitted: bool) -> StepOutput:
        hidden = None
        if self.front is not None:
            hidden = to_wire(self.front.step(self.front_state, tokens, features, uncommitted=uncommitted).hidden)
        return self.stage.step(self.state, tokens, features, uncommitted=uncommitted, hidden=hidden)

    def commit_front(self) -> None:
        if self.front is not None:
            self.front.commit(self.front_state, self.state.length)

    def issue(self, tokens: list[int], draft_tokens: int) -> tuple[list[int], tuple[int, ...]]:
        """A step and its block together: tokens produced and draft tokens for the next one."""
        features, uncommitted = Features(), len(tokens) > 1
        output = self.run(tokens, features, uncommitted=uncommitted)
        assert output.argmax is not None
        assert features.total is not None
        assert self.ahead.takes(len(tokens))
        issued = self.ahead.issue(
            self.state.caches[0], output.argmax, features.total, draft_tokens, uncommitted=uncommitted
        )
        produced = issued.produced()
        if uncommitted:
            self.state.length, self.state.pending = self.state.length + len(produced), 0
            self.commit_front()
        return produced, issued.draft_tokens()

    def one_after_the_other(self, tokens: list[int], draft_tokens: int) -> tuple[list[int], tuple[int, ...]]:
        """The same with the host deciding."""
        features, uncommitted = Features(), len(tokens) > 1
        output = self.run(tokens, features, uncommitted=uncommitted)
        assert output.argmax is not None
        produced = accept(tokens[1:], output.argmax.tolist(), self.stops)
        if uncommitted:
            self.stage.commit(self.state, self.state.length + len(produced))
            self.commit_front()
        self.runner.append([self.context], [len(produced)], self.draft.mix(features.rows(len(produced))))
        rows = self.embedding[[produced[-1], self.draft.config.mask_token_id]]
        [block] = self.runner.propose([self.context], rows, [draft_tokens], [produced[-1]])
        return produced, block


@pytest.mark.parametrize("cut", [None, 1])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5-ratio-3"])
@torch.inference_mode()
def test_a_block_issued_ahead_is_the_same(tiny: Tiny, name: str, cut: int | None) -> None:
    """Whatever number of rows counts, right draft tokens, wrong ones and stop tokens: both results are the same."""
    stops = frozenset({7, 40, 200})
    here, there = Pair(tiny, name, stops, cut), Pair(tiny, name, stops, cut)
    prompt = ids(30)
    for pair in (here, there):
        pair.prefill(prompt[:-1])
    tokens, counts = [prompt[-1]], set()
    for right, draft_tokens in ((0, 7), (7, 7), (3, 7), (7, 3), (1, 7), (5, 7), (0, 1), (7, 7), (7, 7)):
        own, expected = here.issue(tokens, draft_tokens), there.one_after_the_other(tokens, draft_tokens)
        assert own == expected
        assert here.state.length == there.state.length == here.context.length == there.context.length
        counts.add(len(own[0]))
        known = own[0][-1]
        block = foreseen(there, known, right)
        tokens = [known, *block, *(own[1][len(block) :])]
    assert len(counts) > 2


def foreseen(pair: Pair, known: int, count: int) -> list[int]:
    """The tokens that the target chooses behind a known one, by verifying what it chose before, without commits."""
    found: list[int] = []
    length = pair.state.length
    for _ in range(count):
        output = pair.run((known, *found, 0), None, uncommitted=True)
        assert output.argmax is not None
        found.append(int(output.argmax[len(found)]))
        pair.state.pending = 0
        if pair.front is not None:
            pair.front_state.pending = 0
        assert pair.state.length == length
    return found
