"""Mistral: what its config.json may say."""

from __future__ import annotations

from typing import Any

import pytest

from services.errors import Unimplemented
from services.model.config import LayerKind
from services.model.families import mistral
from tests.services.model.families import test_llama

RAW: dict[str, Any] = {**test_llama.RAW, "model_type": "mistral", "rope_scaling": None, "sliding_window": None}


def test_a_window_is_one_of_all_layers() -> None:
    """None where it is null; where it is not mentioned, that of the first release."""
    assert mistral.read_config(RAW).layer_kinds == (LayerKind.FULL,) * 2
    assert mistral.read_config(RAW).sliding_window is None
    sliding = mistral.read_config(RAW | {"sliding_window": 6})
    assert (sliding.layer_kinds, sliding.sliding_window) == ((LayerKind.SLIDING,) * 2, 6)
    assert mistral.read_config({key: RAW[key] for key in RAW if key != "sliding_window"}).sliding_window == 4096


@pytest.mark.parametrize("key", ["attention_bias", "mlp_bias"])
def test_there_are_no_biases(key: str) -> None:
    """A config that names some asks for another model."""
    with pytest.raises(Unimplemented, match=key):
        mistral.read_config(RAW | {key: True})
