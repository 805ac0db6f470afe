"""The last stage's way to its draft."""

from __future__ import annotations

import pytest
import torch

from services.errors import FailedPrecondition
from shard_worker.device.dtypes import from_wire
from shard_worker.drafting.engine import DraftEngine, check_draft_request
from shard_worker.drafting.link import slices_to_wire
from shard_worker.model.features import Features
from tests.shard_worker.tiny import Tiny, load_draft

CPU = torch.device("cpu")


def test_features_go_out_in_the_drafts_order() -> None:
    """Slices gathered along a chain in layer order leave in capture order, a sum leaves alone."""
    slices = {index: torch.full((3, 2), float(index)) for index in (2, 0, 1)}
    total = torch.ones(3, 2)

    pieces = slices_to_wire(Features(slices=slices), 7)
    [whole] = slices_to_wire(Features(total), 7)

    assert [piece.capture_index for piece in pieces] == [0, 1, 2]
    assert {piece.start_position for piece in (*pieces, whole)} == {7}
    assert [from_wire(piece.features, CPU)[0, 0].item() for piece in pieces] == [0.0, 1.0, 2.0]
    assert whole.capture_index is None
    assert torch.equal(from_wire(whole.features, CPU), total)
    assert slices_to_wire(Features(), 7) == []


@torch.no_grad()
def test_a_context_grows_without_gaps_and_proposals_start_at_its_end(tiny: Tiny) -> None:
    """Features that leave a gap or repeat rows, and proposals from elsewhere, are refused and change nothing."""
    draft = load_draft(tiny.draft("qwen3", "plain"))
    engine, state = DraftEngine(draft), draft.allocate(20)
    engine.append(state, Features(total=torch.zeros(4, 64)), 0)

    for start in (0, 3, 5):
        with pytest.raises(FailedPrecondition, match=f"start at position {start}, .* ends at 4"):
            engine.append(state, Features(total=torch.zeros(2, 64)), start)
    for position in (3, 5):
        with pytest.raises(FailedPrecondition, match=f"propose is for position {position}"):
            check_draft_request(draft, state, position, 3)
    for tokens in (0, 8):
        with pytest.raises(FailedPrecondition, match="this draft proposes 1 to 7"):
            check_draft_request(draft, state, 4, tokens)
    check_draft_request(draft, state, 4, 7)

    assert state.length == 4
