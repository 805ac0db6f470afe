"""Embedding rows for a draft, wherever they come from."""

from __future__ import annotations

import pytest
import torch

from services.errors import InvalidArgument
from shard_worker.device.devices import parse_devices
from shard_worker.drafting.embedding_rows import (
    copied_embedding,
    matrix_name,
    resident_embedding,
    rows_of_checkpoint,
    rows_of_stage,
)
from shard_worker.weights.opening import open_checkpoint
from tests.reference import target
from tests.shard_worker.tiny import Tiny, load_stage

TOKENS = (5, 254, 5, 0)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-tied", "qwen3_5-nested"])
@pytest.mark.parametrize("layers", [(0, 4), (0, 1), (1, 2), (3, 4)])
def test_rows_are_the_embeddings(tiny: Tiny, name: str, layers: tuple[int, int]) -> None:
    """From the first stage's matrix, a tied head or the mapped file alike, and equal to transformers' table."""
    expected = target.embedding(tiny.model(name))[list(TOKENS)]
    matrix = resident_embedding(load_stage(tiny.path(name), layers))
    checkpoint = open_checkpoint(tiny.path(name))

    assert torch.equal(rows_of_stage(matrix, checkpoint)(TOKENS), expected)
    assert torch.equal(rows_of_checkpoint(checkpoint)(TOKENS), expected)


def test_no_copy_where_the_file_is_as_near(tiny: Tiny) -> None:
    """A CPU's stage reads its rows from the mapped file."""
    assert copied_embedding(open_checkpoint(tiny.path("qwen3")), parse_devices("cpu")[0], torch.bfloat16) is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5-nested"])
def test_a_copy_beside_a_draft_on_a_gpu(tiny: Tiny, name: str) -> None:
    """Of all rows, in the stage's element type."""
    matrix = copied_embedding(open_checkpoint(tiny.path(name)), parse_devices("cuda:0")[0], torch.bfloat16)
    assert matrix is not None
    assert matrix.device.type == "cuda"
    assert torch.equal(matrix.tensor.cpu(), target.embedding(tiny.model(name)).bfloat16())


def test_a_checkpoint_without_an_embedding_is_refused(tiny: Tiny) -> None:
    """A draft's checkpoint has none; the refusal names what is missing."""
    draft = open_checkpoint(tiny.draft("qwen3", "plain"))

    with pytest.raises(InvalidArgument, match=r"\*embed_tokens\.weight"):
        rows_of_checkpoint(draft)


def test_tensors_of_other_parts_are_not_mistaken_for_the_targets(tiny: Tiny) -> None:
    """MTP and vision tensors that end alike are passed over."""
    checkpoint = open_checkpoint(tiny.path("qwen3_5-nested"))

    assert matrix_name(checkpoint, "norm.weight").startswith("model.language_model.")
