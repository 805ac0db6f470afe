"""How choosers choose by kernels: for the blocks of all sessions of a captured launch, which knows none of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shard_worker.drafting.choosers import NOT_PROPOSED
from shard_worker.drafting.choosers.dflash2 import Selector
from shard_worker.drafting.choosers.domino import Correction
from shard_worker.drafting.choosers.dspark import LEAST_CHANCE, MarkovHead
from shard_worker.drafting.draft_head import DraftHead
from shard_worker.model.kernels.matmul import Normed, linear, row_factors
from shard_worker.model.kernels.select_tokens import select_tokens
from shard_worker.model.kernels.step_parameters import Places
from shard_worker.model.kernels.walk_blocks import BlockWalk, carry, gate, recur


@dataclass(frozen=True, slots=True)
class LaunchedRows:
    """The rows of blocks in a launch, of which the sessions' parameters tell the device which stand for what.

    normed: behind the draft's last norm. logits: [rows, tokens], in the head's element type. known: int64 [sessions],
    the token before each block. places: where the rows stand. from_anchor: whether a block's first row chooses a token
    too. most: how many tokens the longest block has. embedding: the target's [vocab, hidden]; None where it is not
    on the device.
    """

    normed: Normed
    logits: torch.Tensor
    known: torch.Tensor
    places: Places
    from_anchor: bool
    most: int
    embedding: torch.Tensor | None = None

    def walk(self, dtype: torch.dtype) -> BlockWalk:
        """Begin to go through the blocks, whose hidden rows are given in this element type."""
        hidden = (self.normed.scaled.float() * row_factors(self.normed)[:, None]).to(dtype)
        return BlockWalk.begin(self.places, self.known, hidden, from_anchor=self.from_anchor)


def choose(head: DraftHead, rows: LaunchedRows, chosen: torch.Tensor) -> None:
    """Queue choosing the tokens of all blocks. chosen: int64 [rows + 1], gets each behind the place of the one before
    it, the first one behind that of the block's first row."""
    chooser, count = head.chooser, len(rows.logits)
    if isinstance(chooser, Selector):
        _select(chooser, head, rows, chosen)
    elif isinstance(chooser, MarkovHead):
        _follow(chooser, head, rows, chosen)
    elif isinstance(chooser, Correction):
        _correct(chooser, head, rows, chosen)
    else:
        first = int(rows.from_anchor)
        if head.token_ids is None:
            torch.argmax(rows.logits, -1, out=chosen[first : first + count])
        else:
            chosen[first : first + count].copy_(head.named(rows.logits.argmax(-1)))


def _select(chooser: Selector, head: DraftHead, rows: LaunchedRows, chosen: torch.Tensor) -> None:
    largest, candidates = head.capped(rows.logits).topk(chooser.candidates, -1)
    weighing, _ = linear(rows.normed, chooser.projection)
    select_tokens(
        largest,
        candidates,
        weighing,
        chooser.predecessors,
        chooser.successors,
        rows.known,
        rows.places,
        chosen,
        from_anchor=rows.from_anchor,
    )


def _follow(chooser: MarkovHead, head: DraftHead, rows: LaunchedRows, chosen: torch.Tensor) -> None:
    """DSpark's Markov head, as `MarkovHead.choose`."""
    table, logits, confidence = chooser.before, head.capped(rows.logits), chooser.confidence
    walk = rows.walk(table.dtype)
    state = torch.zeros((len(walk.order), table.shape[1]), dtype=table.dtype, device=table.device)
    chances = torch.ones(len(walk.order), dtype=torch.float32, device=table.device)
    for place in range(rows.most):
        if chooser.joint is None:
            mixed = walk.side_by_side(place, table, ("token",))
        elif chooser.is_gated:
            seen = walk.side_by_side(place, table, ("hidden", "token"))
            gates, _ = linear(seen, chooser.joint, bias=chooser.joint_bias)
            mixed = gate(gates, walk.side_by_side(place, table, ("token",)))
        else:
            seen = walk.side_by_side(place, table, ("state", "token", "hidden"), state)
            mixed = carry(linear(seen, chooser.joint, bias=chooser.joint_bias)[0], state)
        added, _ = linear(mixed, chooser.after)
        if confidence is None:
            walk.take(place, logits, added, chosen, head.token_ids)
            continue
        # Before the token is taken: that of the place before is the one that it sees.
        walk.weigh(place, table, confidence.weight, confidence.bias, chances, with_token=confidence.with_token)
        walk.take(place, logits, added, chosen, head.token_ids, chances, LEAST_CHANCE, NOT_PROPOSED)


def _correct(chooser: Correction, head: DraftHead, rows: LaunchedRows, chosen: torch.Tensor) -> None:
    """Domino's correction, as `Correction.choose`."""
    assert rows.embedding is not None
    logits, walk = head.capped(rows.logits), rows.walk(chooser.dtype)
    state = torch.zeros((len(walk.order), chooser.of_state.columns), dtype=chooser.dtype, device=rows.embedding.device)
    for place in range(rows.most):
        embedded = walk.side_by_side(place, rows.embedding, ("token",)).to(chooser.dtype)
        recur(linear(embedded, chooser.of_token)[0], linear(state, chooser.of_state)[0], state)
        added = None
        if place >= chooser.uncorrected:
            seen = walk.side_by_side(place, rows.embedding, ("hidden", "state"), state)
            added, _ = linear(torch.nn.functional.silu(linear(seen, chooser.inner)[0]), chooser.outer)
        walk.take(place, logits, added, chosen, head.token_ids)
