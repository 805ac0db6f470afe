"""Decoder layers as families put them together."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from coordinator.planning.model_size import read_model_size
from services.model import families
from tests.reference import storage
from tests.shard_worker.tiny import Tiny, ids, unsplit

FAMILY = """
from dataclasses import replace
from services.model.families import qwen3

def read_config(raw):
    return replace(qwen3.read_config(raw), family="newcomer")
"""


def test_a_family_of_known_layers_is_one_file(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module in the families' folder is enough to plan for a checkpoint, to load it and to run it."""
    (tmp_path / "newcomer.py").write_text(FAMILY)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    path = Path(shutil.copytree(tiny.path("qwen3"), tmp_path / "checkpoint"))

    storage.edit_config(path, lambda config: config.update(model_type="newcomer"))

    assert read_model_size(path, None) == read_model_size(tiny.path("qwen3"), None)
    assert torch.equal(unsplit(path)(ids(9)), unsplit(tiny.path("qwen3"))(ids(9)))
