"""The most probable token of each row of a block, whatever stands in the others: DFlash's own way."""

from __future__ import annotations

from dataclasses import dataclass

from services.model.config_reader import ConfigReader


@dataclass(frozen=True, slots=True)
class ArgmaxConfig:
    """As of `ChooserConfig`; there is nothing to say."""

    name: str = "argmax"
    layout: str = "DFlash"
    from_anchor: bool = False
    needs_embedding: bool = False

    def tensor_shapes(self, hidden_size: int, vocab_size: int, head_rows: int) -> dict[str, tuple[int, ...]]:
        return {}


def read_config(reader: ConfigReader) -> ArgmaxConfig:
    """As of `ChooserFormat`."""
    return ArgmaxConfig()
