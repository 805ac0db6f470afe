"""DSpark's Markov head: each row's logits with what the token before adds to them, from the known token on.

A block ends where it is no longer likely enough that all of it is accepted, as far as the confidence head knows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.model.choosers.dspark import MarkovConfig, MarkovHeadType
from shard_worker.drafting.choosers import NOT_PROPOSED, GuessedRows
from shard_worker.model.layer_weights import LayerTensors
from shard_worker.weights.weight import Weight

LEAST_CHANCE = 0.1
"""The chance that a draft token and all before it are accepted, below which a block ends: its row costs more."""


@dataclass(frozen=True, slots=True)
class Confidence:
    """What says how likely a draft token is to be accepted, where all before it are.

    weight: float32 [hidden, or hidden + rank]. bias: float32 []. with_token: whether it sees the token before.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    with_token: bool

    def chance(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Return the chance of each of m rows [m, hidden] behind its token's numbers [m, rank], float32 [m]."""
        seen = torch.cat([hidden, embedded], -1) if self.with_token else hidden
        return ((seen.float() * self.weight).sum(-1) + self.bias).sigmoid()


@dataclass(frozen=True, slots=True)
class MarkovHead:
    """As of `Chooser`.

    before: [vocab, rank], the numbers of the token before. after: [rows of lm_head, rank], what makes logits of them.
    joint, joint_bias: of the gates, [rank, hidden + rank], or of what a state makes, [3 * rank, rank + rank + hidden];
    None for a head without either. confidence: None where blocks are never cut.
    """

    head_type: MarkovHeadType
    before: torch.Tensor
    after: Weight
    joint: Weight | None
    joint_bias: torch.Tensor | None
    confidence: Confidence | None
    takes_logits: bool = True

    @property
    def cuts_blocks(self) -> bool:
        return self.confidence is not None

    @property
    def is_gated(self) -> bool:
        """Whether the numbers of the token before are gated, and no state is carried."""
        return self.head_type is MarkovHeadType.GATED

    @property
    def multiplied(self) -> tuple[Weight, ...]:
        return (self.after,) if self.joint is None else (self.after, self.joint)

    @property
    def nbytes(self) -> int:
        tensors = [self.before, self.joint_bias]
        if self.confidence is not None:
            tensors += [self.confidence.weight, self.confidence.bias]
        held = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        return held + sum(weight.nbytes for weight in self.multiplied)

    def choose(self, rows: GuessedRows) -> torch.Tensor:
        device, sessions = rows.logits.device, len(rows.known)
        hidden = rows.hidden.to(self.before.dtype)
        known = torch.tensor(rows.known, device=device)
        state = torch.zeros(sessions, self.before.shape[1], dtype=self.before.dtype, device=device)
        chance = torch.ones(sessions, device=device)
        chosen = torch.empty(len(hidden), dtype=torch.int64, device=device)
        for place, (own, at) in enumerate(rows.places()):
            embedded = self.before[known[own]]
            mixed, state[own] = self._mixed(rows, hidden[at], embedded, state[own])
            added = self.after.matmul(mixed, None, rows.batch_invariant_rows)
            known[own] = chosen[at] = rows.named((rows.logits[at].float() + added.float()).argmax(-1))
            if self.confidence is not None:
                chance[own] *= self.confidence.chance(hidden[at], embedded)
                if place:
                    chosen[at] = chosen[at].where(chance[own] >= LEAST_CHANCE, NOT_PROPOSED)
        return chosen

    def _mixed(
        self, rows: GuessedRows, hidden: torch.Tensor, embedded: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what logits are made of, and the state behind it, for rows [m, hidden] behind tokens [m, rank]."""
        if self.joint is None:
            return embedded, state
        if self.is_gated:
            gates = self.joint.matmul(torch.cat([hidden, embedded], -1), self.joint_bias, rows.batch_invariant_rows)
            return rows.each(torch.sigmoid, gates) * embedded, state
        seen = torch.cat([state, embedded, hidden], -1)
        gate, candidate, out = self.joint.matmul(seen, self.joint_bias, rows.batch_invariant_rows).chunk(3, -1)
        kept = rows.each(torch.sigmoid, gate)
        state = kept * state + (1 - kept) * rows.each(torch.tanh, candidate)
        return rows.each(torch.tanh, out), state


def load(config: MarkovConfig, tensors: LayerTensors) -> MarkovHead:
    """As of `ChooserModule`."""
    matrices, vectors, prefix = tensors.matrices, tensors.vectors, "markov_head."
    joints = {MarkovHeadType.GATED: f"{prefix}gate_proj", MarkovHeadType.RNN: f"{prefix}joint_proj"}
    joint = joints.get(config.head_type)
    confidence = None
    if config.confidence:
        weight, bias = (vectors[f"confidence_head.proj.{part}"].float() for part in ("weight", "bias"))
        confidence = Confidence(weight[0], bias[0], config.confidence_with_token)
    return MarkovHead(
        head_type=config.head_type,
        before=vectors[f"{prefix}markov_w1.weight"],
        after=matrices[f"{prefix}markov_w2.weight"].prepared(),
        joint=None if joint is None else matrices[f"{joint}.weight"].prepared(),
        joint_bias=None if joint is None else vectors[f"{joint}.bias"],
        confidence=confidence,
    )
