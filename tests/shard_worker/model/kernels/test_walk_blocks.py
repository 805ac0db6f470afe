"""Choosers that walk blocks place by place by kernels, against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from services.model.choosers.domino import CorrectionConfig
from services.model.choosers.dspark import MarkovConfig, MarkovHeadType
from shard_worker.drafting.choosers import NOT_PROPOSED, GuessedRows, load_chooser
from shard_worker.drafting.draft_head import DraftHead
from shard_worker.model.layer_weights import LayerTensors
from shard_worker.ops.norm import rms_norm
from shard_worker.weights.weight import DenseWeight
from tests.shard_worker.model.kernels.machine import device, seldom
from tests.shard_worker.model.kernels.test_block_convolution import blocks_of, random

pytestmark = pytest.mark.gpu

HIDDEN, VOCAB, MOST = 64, 300, 4

CHOOSERS: dict[str, Any] = {
    "dspark": MarkovConfig(24, MarkovHeadType.VANILLA, confidence=False, confidence_with_token=False),
    "dspark-gated": MarkovConfig(24, MarkovHeadType.GATED, confidence=True, confidence_with_token=False),
    "dspark-rnn": MarkovConfig(16, MarkovHeadType.RNN, confidence=True, confidence_with_token=True),
    "domino": CorrectionConfig(state=24, inner=16, uncorrected=1, from_anchor=False),
}


@pytest.mark.parametrize(("counts", "reduced"), [seldom([4], False), ([3, 0, 1, 4], True)])
@pytest.mark.parametrize("name", CHOOSERS)
@torch.inference_mode()
def test_tokens_are_those_of_plain_torch(name: str, counts: list[int], reduced: bool) -> None:
    """Of each session, also where one of them has no block; with blocks that are cut where they are hardly worth it."""
    from shard_worker.drafting.chooser_kernels import LaunchedRows, choose
    from shard_worker.model.kernels.matmul import begin

    config, named = CHOOSERS[name], VOCAB // 2 if reduced else VOCAB
    shapes = config.tensor_shapes(HIDDEN, VOCAB, named)
    tensors = {
        stored: random(*shape, seed=seed) / (2 if len(shape) == 1 else shape[-1] ** 0.5) * (4 if "w2" in stored else 2)
        for seed, (stored, shape) in enumerate(shapes.items(), 20)
    }
    if "confidence_head.proj.bias" in tensors:
        # So unsure that blocks are cut, but not all of them at once.
        tensors["confidence_head.proj.bias"].fill_(-0.7)
    matrices = {stored: DenseWeight(one) for stored, one in tensors.items() if one.dim() == 2}
    chooser = load_chooser(config, LayerTensors(matrices, tensors))
    head = DraftHead(
        DenseWeight(random(named, HIDDEN, seed=1) / HIDDEN**0.5),
        None if not reduced else torch.arange(named, device=device().torch_device) * 2,
        chooser,
    )
    embedding = random(VOCAB, HIDDEN, seed=2)
    own = [count + int(not config.from_anchor) if count else 0 for count in counts]
    rows, places = 16, blocks_of(own, 16)
    x, norm = random(rows, HIDDEN, seed=3), 1 + random(HIDDEN, seed=4, dtype=torch.float32) / 8
    hidden = rms_norm(x, norm, 1e-6)
    logits = head.weight.matmul(hidden)
    known = torch.tensor([17 + 70 * number for number in range(len(counts))], device=x.device)
    chosen = torch.full((rows + 1,), 7777, dtype=torch.int64, device=x.device)

    normed = begin(x, norm, 1e-6)
    choose(head, LaunchedRows(normed, logits.clone(), known, places, config.from_anchor, MOST, embedding), chosen)

    first = cut = changed = 0
    for number, (count, taken) in enumerate(zip(counts, own, strict=True)):
        if count:
            at = slice(first + taken - count, first + taken)
            guessed = GuessedRows(
                hidden[at],
                logits[at],
                [int(known[number])],
                [count],
                head.named,
                lambda ids: embedding[list(ids)],
            )
            expected = chooser.choose(guessed).tolist()
            assert chosen[first + 1 : first + 1 + count].tolist() == expected
            cut += expected.count(NOT_PROPOSED)
            changed += sum(map(int.__ne__, expected, head.named(logits[at].argmax(-1)).tolist()))
        first += taken
    assert changed - cut > 0
    assert (cut > 0) == (name in ("dspark-gated", "dspark-rnn"))
    assert (chosen[first + 1 :] == 7777).all()


@torch.inference_mode()
def test_the_first_of_the_largest_is_taken() -> None:
    """Of more logits than a program looks through, in the middle, at both ends, and where two are as large."""
    from shard_worker.model.kernels.walk_blocks import BlockWalk

    logits = random(16, 9000, seed=1).clamp(-3, 3)
    for row, largest in enumerate(((8999,), (4095, 4096), (0, 5000))):
        logits[row, list(largest)] = 9
    places, known = blocks_of([3], 16), torch.zeros(1, dtype=torch.int64, device=logits.device)
    chosen = torch.zeros(17, dtype=torch.int64, device=logits.device)
    walk = BlockWalk.begin(places, known, logits, from_anchor=True)
    for place in range(4):
        walk.take(place, logits, None, chosen)
    assert chosen[:5].tolist() == [0, 8999, 4095, 0, 0]
