"""Domino's correction of logits: a recurrent network that reads a block's tokens, from the known one on.

It reads their rows of the target's embedding, so it can only choose where these are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from services.model.choosers.domino import CorrectionConfig
from shard_worker.drafting.choosers import GuessedRows
from shard_worker.model.layer_weights import LayerTensors
from shard_worker.weights.weight import Weight


@dataclass(frozen=True, slots=True)
class Correction:
    """As of `Chooser`.

    of_token, of_state: [3 * state, hidden] and [3 * state, state], the rows of [reset | update | new] of the network.
    inner: [inner, hidden + state]. outer: [rows of lm_head, inner]. uncorrected: how many rows at a block's beginning
    keep their logits. dtype: what it computes in.
    """

    of_token: Weight
    of_state: Weight
    inner: Weight
    outer: Weight
    uncorrected: int
    dtype: torch.dtype
    takes_logits: bool = True
    cuts_blocks: bool = False

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.multiplied)

    @property
    def multiplied(self) -> tuple[Weight, ...]:
        return self.of_token, self.of_state, self.inner, self.outer

    def choose(self, rows: GuessedRows) -> torch.Tensor:
        assert rows.embedding is not None
        device = rows.logits.device
        hidden = rows.hidden.to(self.dtype)
        known = torch.tensor(rows.known, device=device)
        state = torch.zeros(len(known), self.of_state.columns, dtype=self.dtype, device=device)
        chosen = torch.empty(len(hidden), dtype=torch.int64, device=device)
        for place, (own, at) in enumerate(rows.places()):
            embedded = rows.embedding(tuple(known[own].tolist())).to(device, self.dtype)
            state[own] = behind = self._read(rows, embedded, state[own])
            logits = rows.logits[at].float()
            if place >= self.uncorrected:
                logits = logits + self._added(rows, torch.cat([hidden[at], behind], -1)).float()
            known[own] = chosen[at] = rows.named(logits.argmax(-1))
        return chosen

    def _read(self, rows: GuessedRows, embedded: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Return the state [m, state] behind tokens whose embedding rows these are, [m, hidden]."""
        fixed_rows = rows.batch_invariant_rows
        of_token = self.of_token.matmul(embedded, None, fixed_rows).chunk(3, -1)
        of_state = self.of_state.matmul(state, None, fixed_rows).chunk(3, -1)
        reset, update = (rows.each(torch.sigmoid, of_token[part] + of_state[part]) for part in (0, 1))
        new = rows.each(torch.tanh, of_token[2] + reset * of_state[2])
        return (1 - update) * new + update * state

    def _added(self, rows: GuessedRows, seen: torch.Tensor) -> torch.Tensor:
        """Return what is added to the logits of rows, [m, rows of lm_head]; seen: their hidden rows, and the states."""
        inner = rows.each(F.silu, self.inner.matmul(seen, None, rows.batch_invariant_rows))
        return self.outer.matmul(inner, None, rows.batch_invariant_rows)


def load(config: CorrectionConfig, tensors: LayerTensors) -> Correction:
    """As of `ChooserModule`."""
    matrices = tensors.matrices
    of_token = matrices["prefix_gru.weight_ih_l0"].prepared()
    return Correction(
        of_token=of_token,
        of_state=matrices["prefix_gru.weight_hh_l0"].prepared(),
        inner=matrices["embed_proj.0.weight"].prepared(),
        outer=matrices["embed_proj.2.weight"].prepared(),
        uncorrected=config.uncorrected,
        dtype=of_token.dtype,
    )
