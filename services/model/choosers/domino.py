"""Domino's correction: what all tokens of the block so far add to a row's logits, by way of a recurrent network.

The network (a GRU) reads the target's embeddings of the known token and of the draft tokens behind it; a small one of
two layers makes logits of its state and of the row's hidden state.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.model.config_reader import ConfigReader


@dataclass(frozen=True, slots=True)
class CorrectionConfig:
    """As of `ChooserConfig`.

    state: numbers of the network's state. inner: numbers between the two layers. uncorrected: how many rows keep their
    logits, from a block's beginning on.
    """

    state: int
    inner: int
    uncorrected: int
    from_anchor: bool
    name: str = "domino"
    layout: str = "Domino"
    needs_embedding: bool = True

    def tensor_shapes(self, hidden_size: int, vocab_size: int, head_rows: int) -> dict[str, tuple[int, ...]]:
        return {
            "prefix_gru.weight_ih_l0": (3 * self.state, hidden_size),
            "prefix_gru.weight_hh_l0": (3 * self.state, self.state),
            "embed_proj.0.weight": (self.inner, hidden_size + self.state),
            "embed_proj.2.weight": (head_rows, self.inner),
        }


def read_config(reader: ConfigReader) -> CorrectionConfig:
    """As of `ChooserFormat`."""
    return CorrectionConfig(
        state=reader.integer("gru_hidden_dim"),
        inner=reader.integer("emb_dim"),
        uncorrected=reader.integer("pure_draft_prefix_len", 0, at_least=0),
        from_anchor=reader.flag("shift_label", False),
    )
