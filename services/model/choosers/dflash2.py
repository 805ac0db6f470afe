"""DFlash2's candidate selector: of the most probable tokens of each row the one that fits the token before it best.

Two tables have a vector for each token, as one that comes before and as one that follows; the row's hidden state weighs
their products.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.errors import InvalidArgument
from services.model.config_reader import ConfigReader


@dataclass(frozen=True, slots=True)
class SelectorConfig:
    """As of `ChooserConfig`. rank: numbers of a token's vectors. candidates: how many tokens of a row are weighed."""

    rank: int
    candidates: int
    name: str = "dflash2"
    layout: str = "DFlash2"
    from_anchor: bool = False
    needs_embedding: bool = False

    def tensor_shapes(self, hidden_size: int, vocab_size: int, head_rows: int) -> dict[str, tuple[int, ...]]:
        prefix = "candidate_selector."
        return {
            f"{prefix}hidden_projection.weight": (self.rank, hidden_size),
            f"{prefix}predecessor_codebook": (vocab_size, self.rank),
            f"{prefix}successor_codebook": (vocab_size, self.rank),
        }


def read_config(reader: ConfigReader) -> SelectorConfig:
    """As of `ChooserFormat`."""
    vocab_size = reader.integer("vocab_size")
    reduced = reader.integer("draft_vocab_size", vocab_size)
    if reduced != vocab_size:
        raise InvalidArgument(
            f"{reader.source}: draft_vocab_size is {reduced}; a DFlash2 draft proposes all tokens of the target, "
            f"{vocab_size}",
            field="draft_vocab_size",
        )
    config = SelectorConfig(rank=reader.integer("selector_rank"), candidates=reader.integer("selector_top_k"))
    if config.candidates > vocab_size:
        raise InvalidArgument(
            f"{reader.source}: selector_top_k is {config.candidates}; it must be at most vocab_size, {vocab_size}",
            field="selector_top_k",
        )
    return config
