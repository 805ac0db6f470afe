"""What the demo's training computes and writes is what the drafts' formulas make of its files."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from services.model.drafts import dflash
from tests.reference import storage
from tests.reference.dense_draft import DenseDraft

DEMO = Path(__file__).parents[2] / "deploy" / "demo"
MASK = 3


@pytest.mark.parametrize("own", [{}, {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6}])
def test_exported_drafts_guess_as_in_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: dict[str, int]
) -> None:
    """DFlash and DFlash2, of random weights: hidden rows and tokens of two blocks, and a config that the service reads;
    before its own parts are trained, a DFlash2 draft made from a DFlash draft guesses as that one, and one made from a
    trained DFlash2 draft has all of its parts."""
    monkeypatch.syspath_prepend(str(DEMO))
    draft, export, shapes = (importlib.import_module(name) for name in ("draft", "export", "shapes"))
    torch.manual_seed(0)
    target = shapes.TargetShape(vocab_size=96, hidden_size=32, num_hidden_layers=4)
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 96, "block_size": 5}
    layers = {"num_hidden_layers": 2, "sliding_layers": 1, "sliding_window": 8, "target_layer_ids": (0, 2)}
    plain = draft.Draft(shapes.DraftShape(32, 48, **sizes, **layers))
    made = draft.Draft(shapes.DraftShape(32, 48, **sizes, **layers, **own))
    embedding = torch.randn(96, 32).bfloat16().float()
    made.start_from(plain, embedding)
    places = torch.tensor([[9, 14]])
    tokens = [11, 70]
    features = torch.randn(1, 20, 64)

    def rows(model: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():
            hidden: torch.Tensor = model(features, embedding[tokens][None], embedding[MASK], places)
        return hidden[0]

    assert torch.equal(rows(made), rows(plain))
    for name, parameter in made.named_parameters():
        if "conv" in name or "successor" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    again = draft.Draft(shapes.DraftShape(32, 48, **sizes, **layers, **own))
    again.start_from(made, torch.randn(96, 32))
    assert all(torch.equal(one, other) for one, other in zip(again.parameters(), made.parameters(), strict=True))
    export.write_draft(made, target, tmp_path, MASK)
    written = export.read_draft(tmp_path)
    config = dflash.read_config(storage.read_config(tmp_path))
    shapes_written = {name: tuple(tensor.shape) for name, tensor in storage.load_tensors(tmp_path).items()}
    assert shapes_written == dflash.tensor_shapes(config)
    reference, wide = DenseDraft(tmp_path), embedding.double()
    for block, place, known in zip(rows(written), places[0].tolist(), tokens, strict=True):
        expected = reference.forward(features[0, :place].double(), wide, wide, known)
        torch.testing.assert_close(block.double(), expected.hidden, atol=1e-5, rtol=1e-5)
        chosen = reference.choose(expected, known, wide)
        assert written.choose(block, embedding, torch.tensor([known, *chosen[:-1]])).tolist() == chosen
