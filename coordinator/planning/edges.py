"""What travels between the workers in one step: bytes of tensors and token ids, without the frames around them."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.cluster.placement import Plan
from coordinator.planning.memory import Models
from services.layers import LayerRange
from services.messages.description import FeatureTransport, HeadPlace
from services.messages.steps import TOKEN_BYTES

SUM_BYTES = 4
"""Bytes of an element of the float32 sum of features."""


@dataclass(frozen=True, slots=True)
class Edge:
    """One connection, and the bytes that go down it in a decode step, a verify of a block and a prefill chunk.

    verify_bytes is 0 without a draft. The answers that come back are a few token ids.
    """

    source: str
    to: str
    decode_bytes: int
    verify_bytes: int
    prefill_bytes: int


def plan_edges(models: Models, plan: Plan, prefill_rows: int) -> list[Edge]:
    """Return the connections from the coordinator down the chain, and to the draft's own worker where there is one."""
    draft, block = models.draft, models.block_rows if models.draft is not None else 0
    edges = [
        Edge("coordinator", "stage 0", TOKEN_BYTES, TOKEN_BYTES * block, TOKEN_BYTES * prefill_rows),
    ]
    for index, stage in enumerate(plan.stages[1:], start=1):
        plain = models.target.hidden_size * models.target.item_bytes + TOKEN_BYTES
        row = plain + feature_bytes(models, stage.layers.first)
        edges.append(Edge(f"stage {index - 1}", f"stage {index}", plain, row * block, row * prefill_rows))
    if draft is not None and plan.draft is not None:
        row = feature_bytes(models, len(models.target.layers))
        projected = 0
        if models.head_place is HeadPlace.PROJECTED:
            # Two embedding rows there; the draft tokens' hidden rows back, unless the draft has an lm_head of its own.
            rows = 2 + (block - 1 if draft.config.draft_vocab_size is None else 0)
            projected = rows * draft.hidden_size * draft.item_bytes
        last = f"stage {len(plan.stages) - 1}"
        edges.append(Edge(last, "draft", 0, row * block + projected, row * prefill_rows))
    return edges


def feature_bytes(models: Models, first_layer: int) -> int:
    """Return the bytes of one row of what the blocks before a layer captured for the draft."""
    target, draft = models.target, models.draft
    captured = 0 if draft is None else draft.captured(LayerRange(0, first_layer))
    if draft is None or not captured:
        return 0
    if models.transport is FeatureTransport.SUM:
        return draft.hidden_size * SUM_BYTES
    return captured * target.hidden_size * target.item_bytes
