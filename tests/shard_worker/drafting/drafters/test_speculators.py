"""Drafts that the speculators package has made and written, against its own modelling code in float32."""

from __future__ import annotations

import operator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from shard_worker.drafting.choosers.dspark import LEAST_CHANCE
from shard_worker.drafting.draft_head import DraftHead
from shard_worker.drafting.drafters.dflash import DFlashDraft
from shard_worker.model.features import Features
from shard_worker.weights.weight import DenseWeight
from tests.shard_worker.tiny import Tiny, load_draft

BLOCK, KNOWN, HIDDEN = 8, 17, 64
FULL, SLIDING = "full_attention", "sliding_attention"
WINDOWS = {"layer_types": [SLIDING, FULL], "sliding_window": 48, "use_sliding_window": True}
"""No window ends here: the package's one begins so many tokens before the block, as drafts are trained by it; ours, as
in z-lab's code, so many tokens before each row."""
DFLASH2 = {"conv_kernel_size": 3, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 6}
DSPARK = {"markov_rank": 8, "enable_confidence_head": False}
REDUCED = range(1, 256, 3)
LAYOUTS: dict[str, dict[str, Any]] = {
    "dflash": {"kind": "dflash"},
    "dflash-windows": {"kind": "dflash", "decoder": WINDOWS},
    "dflash-windows-both-ways": {"kind": "dflash", "decoder": WINDOWS, "sliding_window_non_causal": True},
    "dflash-biases": {"kind": "dflash", "decoder": {"attention_bias": True}},
    "dflash-reduced": {"kind": "dflash", "token_ids": REDUCED},
    "dflash2": {"kind": "dflash2", **DFLASH2},
    "dflash2-windows": {"kind": "dflash2", "decoder": WINDOWS, **DFLASH2},
    "dspark": {"kind": "dspark", **DSPARK},
    "dspark-gated": {"kind": "dspark", **DSPARK, "markov_head_type": "gated"},
    "dspark-rnn": {"kind": "dspark", **DSPARK, "markov_head_type": "rnn"},
    "dspark-reduced": {"kind": "dspark", **DSPARK, "token_ids": REDUCED},
    "dspark-behind-the-known-token": {"kind": "dspark", **DSPARK, "sample_from_anchor": False},
    "dspark-confident": {"kind": "dspark", **DSPARK, "enable_confidence_head": True},
    "dspark-confident-by-rows": {
        "kind": "dspark",
        **DSPARK,
        "enable_confidence_head": True,
        "confidence_head_with_markov": False,
    },
}


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


EMBEDDING, HEAD = random(256, HIDDEN, seed=1), random(256, HIDDEN, seed=2) / 4


def head_of(draft: DFlashDraft) -> DraftHead:
    return draft.own_head or DraftHead(DenseWeight(HEAD), chooser=draft.chooser)


@torch.no_grad()
# Of torch's own compiler, which the package imports.
@pytest.mark.filterwarnings("ignore:.*script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_and_tokens_are_the_packages(tiny: Tiny, tmp_path: Path, name: str) -> None:
    """Hidden rows, logits and draft tokens along a context; where a chooser corrects logits, it overrules some."""
    # It takes seconds, which a run without this test need not wait for.
    from tests.reference import speculators_drafts

    options = dict(LAYOUTS[name])
    reference = speculators_drafts.make(
        options.pop("kind"), tiny.path("qwen3"), EMBEDDING, HEAD, block_size=BLOCK, **options
    )
    draft = load_draft(speculators_drafts.write(reference, tmp_path / "draft"))
    first = 0 if reference.config.sample_from_anchor else 1
    tokens, head = BLOCK - first, head_of(draft)
    matrix = reference.lm_head.weight
    joined = random(40, 2 * HIDDEN, seed=3)
    state, overruled, lengths = draft.allocate(60), 0, set[int]()
    for piece in joined.split([1, 4, 1, 8, 1, 5, 1, 19]):
        draft.append([state], [len(piece)], Features(slices=dict(enumerate(piece.split(HIDDEN, -1)))))

        own = draft.propose([state], EMBEDDING[[KNOWN, draft.config.mask_token_id]], [tokens])
        [chosen] = head.choose(own, [KNOWN], [tokens], lambda ids: EMBEDDING[list(ids)])

        hidden, logits = speculators_drafts.block_of(reference, joined[: state.length], KNOWN)
        torch.testing.assert_close(own, hidden[first:], rtol=0, atol=3e-5)
        torch.testing.assert_close(own @ matrix.T, logits[first:], rtol=0, atol=2e-4)
        expected = speculators_drafts.choose(reference, hidden, logits, KNOWN)
        if "confident" in name:
            each = speculators_drafts.chances(reference, hidden, KNOWN, expected)
            together = accumulate(each, operator.mul)
            expected = expected[: max(1, sum(chance >= LEAST_CHANCE for chance in together))]
        assert list(chosen) == expected
        lengths.add(len(expected))
        plain = logits[first:].argmax(-1)
        named = plain if reference.d2t is None else plain + reference.d2t[plain]
        overruled += sum(one != other for one, other in zip(expected, named.tolist(), strict=False))
    assert (overruled > 0) == (not name.startswith("dflash-") and name != "dflash")
    assert (min(lengths) < tokens) == ("confident" in name)
