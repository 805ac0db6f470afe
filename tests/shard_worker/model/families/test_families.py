"""Finding a family by its name."""

from __future__ import annotations

import pytest

from services.errors import InvalidArgument, Unimplemented
from shard_worker.model.families import family_of, known_families, qwen3_5
from tests.reference import storage
from tests.shard_worker.tiny import Tiny


def test_a_family_is_found_by_model_type(tiny: Tiny) -> None:
    """Text-only and multimodal configs of a family lead to its module and one shape."""
    flat = family_of(storage.read_config(tiny.path("qwen3_5-ratio-2")))
    nested = family_of(storage.read_config(tiny.path("qwen3_5-nested")))

    assert flat == nested
    assert flat[:2] == ("qwen3_5", qwen3_5)


def test_an_unknown_family_is_refused_with_the_known_ones(tiny: Tiny) -> None:
    """The refusal lists every family that there is."""
    assert known_families() == ["qwen3", "qwen3_5"]
    with pytest.raises(Unimplemented, match=r"'qwen4_exp'.*qwen3, qwen3_5"):
        family_of(storage.read_config(tiny.path("qwen3")) | {"model_type": "qwen4_exp"})
    with pytest.raises(InvalidArgument, match="model_type"):
        family_of({})


def test_a_quantised_checkpoint_is_refused(tiny: Tiny) -> None:
    """quantization_config is refused in a plain config, and inside and outside of a nested one."""
    mark = {"quantization_config": {"quant_method": "fp8"}}
    nested = storage.read_config(tiny.path("qwen3_5-nested"))
    inside = nested | {"text_config": nested["text_config"] | mark}

    for config in (storage.read_config(tiny.path("qwen3")) | mark, nested | mark, inside):
        with pytest.raises(Unimplemented, match="quantization_config"):
            family_of(config)


def test_a_multimodal_config_may_tie_its_head_outside(tiny: Tiny) -> None:
    """tie_word_embeddings outside text_config counts where the text part doesn't say it."""
    nested = storage.read_config(tiny.path("qwen3_5-nested"))
    text = {key: value for key, value in nested["text_config"].items() if key != "tie_word_embeddings"}

    for tied in (True, False):
        _, _, config = family_of(nested | {"text_config": text, "tie_word_embeddings": tied})
        assert config.tied_head is tied
