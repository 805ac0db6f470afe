"""DSpark's Markov head: what the token before adds to a row's logits, and how far a block is worth verifying.

Two tables lead from the token before to every token's logit by way of few numbers; these may be gated by the row's
hidden state, or be read out of a state that is carried from row to row. A second, tiny head says how likely each draft
token is to be accepted.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from services.errors import InvalidArgument
from services.model.config_reader import ConfigReader


class MarkovHeadType(enum.StrEnum):
    """What the numbers of the token before become on the way to the logits."""

    VANILLA = "vanilla"
    """Nothing else."""
    GATED = "gated"
    """Each is multiplied by a share that depends on the row's hidden state."""
    RNN = "rnn"
    """Others, out of a state that goes from row to row."""


@dataclass(frozen=True, slots=True)
class MarkovConfig:
    """As of `ChooserConfig`.

    rank: how many numbers stand for the token before. confidence: whether there is a head that says how likely a draft
    token is to be accepted. confidence_with_token: whether that head sees the token before beside the hidden state.
    """

    rank: int
    head_type: MarkovHeadType
    confidence: bool
    confidence_with_token: bool
    name: str = "dspark"
    layout: str = "DSpark"
    from_anchor: bool = True
    needs_embedding: bool = False

    def tensor_shapes(self, hidden_size: int, vocab_size: int, head_rows: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {
            "markov_head.markov_w1.weight": (vocab_size, self.rank),
            "markov_head.markov_w2.weight": (head_rows, self.rank),
        }
        if self.head_type is MarkovHeadType.GATED:
            shapes["markov_head.gate_proj.weight"] = (self.rank, hidden_size + self.rank)
            shapes["markov_head.gate_proj.bias"] = (self.rank,)
        elif self.head_type is MarkovHeadType.RNN:
            shapes["markov_head.joint_proj.weight"] = (3 * self.rank, 2 * self.rank + hidden_size)
            shapes["markov_head.joint_proj.bias"] = (3 * self.rank,)
        if self.confidence:
            columns = hidden_size + (self.rank if self.confidence_with_token else 0)
            shapes["confidence_head.proj.weight"] = (1, columns)
            shapes["confidence_head.proj.bias"] = (1,)
        return shapes


def read_config(reader: ConfigReader) -> MarkovConfig:
    """As of `ChooserFormat`."""
    known, asked = [str(kind) for kind in MarkovHeadType], reader.raw("markov_head_type")
    if asked is not None and asked not in known:
        raise InvalidArgument(
            f"{reader.source}: markov_head_type is {asked!r}; it must be one of {', '.join(known)}",
            field="markov_head_type",
        )
    return MarkovConfig(
        rank=reader.integer("markov_rank"),
        head_type=MarkovHeadType.VANILLA if asked is None else MarkovHeadType(asked),
        confidence=reader.flag("enable_confidence_head", True),
        confidence_with_token=reader.flag("confidence_head_with_markov", True),
    )
