"""How RoPE is asked for anew on the command line, and how far it then reaches."""

from __future__ import annotations

import json

import pytest

from services.errors import FlashsplitError, InvalidArgument, Unimplemented
from services.model.families import read_model_config
from services.model.rope import LinearScaling, YarnScaling, parse_rope_scaling, with_rope_scaling
from tests.services.model.families import test_qwen3, test_qwen3_5

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


@pytest.mark.parametrize("spelled", ["rope_parameters", "rope_scaling"])
def test_it_takes_the_place_of_what_the_checkpoint_says(spelled: str) -> None:
    """The base stays, the scaling does not, and the context is the original one times YaRN's factor."""
    raw = {**test_qwen3.RAW, "rope_parameters": None, "rope_theta": 7e5}
    raw[spelled] = {"rope_type": "linear", "factor": 2.0}
    assert read_model_config(raw).rope.scaling == LinearScaling(2.0)
    assert read_model_config(raw).max_position == 4096

    config = read_model_config(with_rope_scaling(raw, parse_rope_scaling(json.dumps(YARN))))

    assert isinstance(config.rope.scaling, YarnScaling)
    assert (config.rope.theta, config.rope.scaling.original_length, config.max_position) == (7e5, 2048, 8192)
    assert with_rope_scaling(raw, None) == raw


def test_the_text_part_of_a_model_with_towers_is_meant() -> None:
    """What is said beside the scaling stays too, such as which part of a head rotates."""
    raw = {"model_type": "qwen3_5", "text_config": test_qwen3_5.RAW, "vision_config": {"depth": 1}}

    changed = with_rope_scaling(raw, parse_rope_scaling(json.dumps(YARN)))

    plain, scaled = read_model_config(raw), read_model_config(changed)
    assert scaled.rope.rotary_dim == plain.rope.rotary_dim < plain.head_dim
    assert (scaled.rope.theta, plain.rope.scaling) == (plain.rope.theta, None)
    assert isinstance(scaled.rope.scaling, YarnScaling)


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("yarn", InvalidArgument, "is not JSON"),
        ("[4]", InvalidArgument, "must be an object with a rope_type"),
        ('{"factor": 4}', InvalidArgument, "must be an object with a rope_type"),
        ('{"rope_type": "yarn", "scale": 4}', InvalidArgument, "scale is not a key of RoPE"),
        ('{"rope_type": "yarn"}', InvalidArgument, "factor is None; it must be above 0"),
        ('{"rope_type": "linear", "factor": "4"}', InvalidArgument, "factor is '4'; it must be above 0"),
        ('{"rope_type": "longrope", "factor": 4}', Unimplemented, "'longrope' is not supported, only default, linear"),
        ('{"type": "dynamic", "factor": 4}', Unimplemented, "'dynamic' is not supported"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(text: str, kind: type[FlashsplitError], words: str) -> None:
    """Before any worker is asked."""
    with pytest.raises(kind, match=words):
        parse_rope_scaling(text)
