"""The logits behind the last committed token: computed, or brought back."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

from services.errors import FailedPrecondition
from shard_worker.model.head import Head
from shard_worker.sampling.last_row import LastRow
from shard_worker.weights.weight import DenseWeight

HEAD = Head(torch.full((4,), 2.0), DenseWeight(torch.arange(12.0).view(3, 4)), 1e-6)
HIDDEN = torch.tensor([[3.0, -1.0, 0.5, 2.0]])


def test_the_last_row_gives_the_logits() -> None:
    """They are the head's, from the row that counted last; a later row replaces it."""
    last = LastRow(HEAD)
    for hidden in (HIDDEN, -HIDDEN.flip(-1)):
        last.remember(functools.partial(torch.clone, hidden))
        expected = F.linear(hidden / hidden.square().mean().sqrt() * 2, HEAD.weight.tensor)
        torch.testing.assert_close(last.read(0, 9), expected)
        assert last.logits().shape == (1, 3)


def test_restored_logits_hold_until_the_first_step() -> None:
    """What was written comes back, until a step has a row of its own; before either there is nothing to tell."""
    last = LastRow(HEAD)
    with pytest.raises(FailedPrecondition, match="leave its last token to the first step") as caught:
        last.read(0, 9)
    assert caught.value.reason == "SNAPSHOT_LENGTH"

    last.write(torch.tensor([[7.0, 8.0, 9.0]]), 0, 9)
    assert last.logits().tolist() == [[7.0, 8.0, 9.0]]

    last.remember(lambda: HIDDEN)
    assert last.logits().tolist() != [[7.0, 8.0, 9.0]]
