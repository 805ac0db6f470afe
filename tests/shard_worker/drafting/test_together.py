"""A draft in plain torch for several sessions at once against the same sessions alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from services.errors import FailedPrecondition
from shard_worker.drafting.drafters import DraftState
from shard_worker.drafting.engine import CommittedRows, DraftEngine, DraftRequest, make_engine
from shard_worker.model.features import Features
from shard_worker.weights.weight import DenseWeight
from tests.reference.draft_checkpoints import DFLASH2, DOMINO, DSPARK
from tests.shard_worker.tiny import Tiny, ids, load_draft

FULL, SLIDING = "full_attention", "sliding_attention"
SHAPES: dict[str, dict[str, Any]] = {
    "biases": {"attention_bias": True, "is_causal": False},
    "sliding": {"layer_types": (SLIDING, FULL), "sliding_window": 10, "is_causal": True},
    "sliding-non-causal": {"layer_types": (SLIDING, SLIDING), "sliding_window": 10, "is_causal": False},
    "dflash2": {"own": DFLASH2},
    "dspark": {"own": DSPARK | {"markov_head_type": "rnn", "enable_confidence_head": True}, "block_size": 7},
    "domino": {"own": DOMINO, "block_size": 7},
}


def make(tiny: Tiny, name: str, dtype: str) -> DraftEngine:
    """A draft with a random embedding and lm_head."""
    draft = load_draft(tiny.draft("qwen3", f"together-{name}", **SHAPES[name]), dtype)
    generator = torch.Generator().manual_seed(1)
    embedding, head = (torch.randn(256, 64, generator=generator).to(draft.dtype) for _ in range(2))
    weight = DenseWeight(head).prepared()
    return make_engine(draft, lambda token_ids: embedding[list(token_ids)], weight, graphs=False)


def contexts(state: DraftState) -> list[torch.Tensor]:
    """Keys and values of the last positions, those that a window keeps too."""
    return [view.read(max(0, state.length - 10), state.length).float() for view in state.views()]


@pytest.mark.parametrize(("dtype", "exact"), [("float32", False), ("float32", True), ("bfloat16", True)])
@pytest.mark.parametrize("name", SHAPES)
@torch.inference_mode()
def test_draft_tokens_are_the_same_alone_and_together(
    tiny: Tiny, name: str, dtype: str, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever rows of whatever sessions come together: the same draft tokens in float32, and in 16 bits where rows are
    batch-invariant; there the contexts are the same to the last bit too."""
    if exact:
        # Without oneDNN's blocks already products of this size round one row otherwise than sixteen.
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    engine = make(tiny, name, dtype)
    draft, rows = engine.draft, 16 if exact else None
    draw = random.Random(name)
    features = [torch.randn(90, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
    alone, together = ([draft.allocate(90, rows) for _ in features] for _ in range(2))
    for turn in range(8):
        chosen = draw.sample(range(len(features)), draw.randint(2, len(features)))
        # Prompts of some, and then what a step commits; the window of 10 rows is passed by one and not by another.
        counts = [draw.choice((1, 2, 5, 8) if alone[one].length else (1, 3, 30)) for one in chosen]
        starts = [alone[one].length for one in chosen]
        pieces = [
            features[one][start : start + count] for one, start, count in zip(chosen, starts, counts, strict=True)
        ]
        committed = [
            CommittedRows(together[one], start, count) for one, start, count in zip(chosen, starts, counts, strict=True)
        ]
        engine.append_together(committed, Features(total=torch.cat(pieces)))
        requests = [
            DraftRequest(turn, start + count, token_id, draw.choice((1, 3, 7)))
            for start, count, token_id in zip(starts, counts, ids(len(chosen), seed=turn), strict=True)
        ]
        found = engine.propose_together([together[one] for one in chosen], requests)
        for one, start, piece, request, draft_tokens in zip(chosen, starts, pieces, requests, found, strict=True):
            engine.append(alone[one], Features(total=piece), start)
            assert draft_tokens == engine.propose(alone[one], request)
            assert len(draft_tokens) == request.tokens or (name == "dspark" and 0 < len(draft_tokens) < request.tokens)
            for here, there in zip(contexts(together[one]), contexts(alone[one]), strict=True):
                if exact:
                    assert torch.equal(here, there)
                else:
                    torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_what_does_not_follow_one_context_is_taken_of_none(tiny: Tiny) -> None:
    """Features and proposals of several sessions are checked before anything is changed."""
    engine = make(tiny, "biases", "float32")
    first, second = (engine.draft.allocate(20) for _ in range(2))
    with pytest.raises(FailedPrecondition, match="start at position 3, the draft's context ends at 0"):
        engine.append_together(
            [CommittedRows(first, 0, 2), CommittedRows(second, 3, 2)], Features(total=torch.zeros(4, 64))
        )
    assert first.length == second.length == 0
    with pytest.raises(FailedPrecondition, match="propose is for position 5, the draft's context ends at 0"):
        engine.propose_together([first, second], [DraftRequest(0, 0, 7, 3), DraftRequest(0, 5, 7, 3)])
