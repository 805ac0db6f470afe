"""Embedding rows for a draft, wherever they come from."""

from __future__ import annotations

import pytest
import torch

from services.errors import InvalidArgument
from shard_worker.checkpoint import Checkpoint
from shard_worker.embedding_rows import matrix_name, rows_of_checkpoint, rows_of_stage
from tests.reference import target
from tests.shard_worker.tiny import Tiny, load_stage

TOKENS = (5, 254, 5, 0)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-tied", "qwen3_5-nested"])
@pytest.mark.parametrize("layers", [(0, 4), (0, 1), (1, 2), (3, 4)])
def test_rows_are_the_embeddings(tiny: Tiny, name: str, layers: tuple[int, int]) -> None:
    """From the first stage's matrix, a tied head or the mapped file alike, and equal to transformers' table."""
    expected = target.embedding(tiny.model(name))[list(TOKENS)]
    stage = load_stage(tiny.path(name), layers)

    assert torch.equal(rows_of_stage(stage, Checkpoint(tiny.path(name)))(TOKENS), expected)
    assert torch.equal(rows_of_checkpoint(Checkpoint(tiny.path(name)))(TOKENS), expected)


def test_a_checkpoint_without_an_embedding_is_refused(tiny: Tiny) -> None:
    """A draft's checkpoint has none; the refusal names what is missing."""
    draft = Checkpoint(tiny.draft("qwen3", "plain"))

    with pytest.raises(InvalidArgument, match=r"\*embed_tokens\.weight"):
        rows_of_checkpoint(draft)


def test_tensors_of_other_parts_are_not_mistaken_for_the_targets(tiny: Tiny) -> None:
    """MTP and vision tensors that end alike are passed over."""
    checkpoint = Checkpoint(tiny.path("qwen3_5-nested"))

    assert matrix_name(checkpoint, "norm.weight").startswith("model.language_model.")
