"""Finding a family by its name, and what all families' configurations have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.errors import InvalidArgument, Unimplemented
from services.model.families import known_families, read_model_config
from services.model.packings import logical_headers
from tests.services.model.families import (
    test_gemma3,
    test_gemma4,
    test_glm4_moe,
    test_gpt_oss,
    test_hybrid_experts,
    test_laguna,
    test_llama,
    test_mistral,
    test_qwen3,
    test_qwen3_5,
    test_qwen3_moe,
)

RAW: dict[str, dict[str, Any]] = {
    "gemma3": test_gemma3.RAW,
    "gemma4": test_gemma4.RAW,
    "glm4_moe": test_glm4_moe.RAW,
    "gpt_oss": test_gpt_oss.RAW,
    "laguna": test_laguna.RAW,
    "llama": test_llama.RAW,
    "mistral": test_mistral.RAW,
    "qwen3": test_qwen3.RAW,
    "qwen3_5": test_qwen3_5.RAW,
    "qwen3_5_moe": test_hybrid_experts.RAW,
    "qwen3_moe": test_qwen3_moe.RAW,
    "qwen3_next": test_hybrid_experts.RAW | {"model_type": "qwen3_next"},
}
NESTED: dict[str, Any] = {"model_type": "qwen3_5", "text_config": RAW["qwen3_5"], "vision_config": {"depth": 1}}


def test_a_family_is_found_by_model_type() -> None:
    """Text-only and multimodal configs of a family lead to one shape, which names the family."""
    config = read_model_config(RAW["qwen3_5"])

    assert config == read_model_config(NESTED)
    assert config.family == "qwen3_5"


def test_every_family_is_named_after_its_file() -> None:
    """The name that a family gives itself is that under which it is found."""
    assert sorted(RAW) == known_families()
    for name, raw in RAW.items():
        assert read_model_config(raw).family == name


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    """The refusal lists every family that there is."""
    with pytest.raises(Unimplemented, match=r"'qwen4_exp'.*qwen3, qwen3_5"):
        read_model_config(RAW["qwen3"] | {"model_type": "qwen4_exp"})
    with pytest.raises(InvalidArgument, match="model_type"):
        read_model_config({})


def test_an_unknown_way_of_packing_is_refused(tmp_path: Path) -> None:
    """quantization_config is read in a plain config, and inside and outside of a nested one."""
    mark = {"quantization_config": {"quant_method": "bitsandbytes"}}
    inside = NESTED | {"text_config": NESTED["text_config"] | mark}

    for raw in (RAW["qwen3"] | mark, NESTED | mark, inside):
        with pytest.raises(Unimplemented, match=r"quantization_config.*'bitsandbytes'.*fp8") as caught:
            logical_headers(raw, {}, tmp_path)
        assert caught.value.where["field"] == "quantization_config"
    for settings in ({"bits": 4}, "fp8", {"quant_method": 8}):
        with pytest.raises(InvalidArgument, match="must be an object with a quant_method, one of .*fp8"):
            logical_headers(RAW["qwen3"] | {"quantization_config": settings}, {}, tmp_path)


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({}, None),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "auto"}, None),
    ],
)
def test_the_element_type_is_read(keys: dict[str, str], dtype: str | None) -> None:
    """By its old name and its new one, inside a text part too."""
    inside = NESTED | {"text_config": NESTED["text_config"] | keys}
    assert [read_model_config(raw).dtype for raw in (RAW["qwen3"] | keys, inside, NESTED | keys)] == [dtype] * 3


def test_a_multimodal_config_may_tie_its_head_outside() -> None:
    """tie_word_embeddings outside text_config counts where the text part doesn't say it."""
    text = {key: value for key, value in NESTED["text_config"].items() if key != "tie_word_embeddings"}

    for tied in (True, False):
        assert read_model_config(NESTED | {"text_config": text, "tie_word_embeddings": tied}).tied_head is tied


OTHER_MATH = [("embedding_multiplier", 12.0), ("attn_logit_softcapping", 50.0)]
CAPPED = ("final_logit_softcapping", 30.0)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        *((family, *one) for family in RAW for one in OTHER_MATH),
        *((family, *CAPPED) for family in RAW if not family.startswith("gemma")),
    ],
)
def test_math_that_no_family_has_is_refused(family: str, key: str, value: float) -> None:
    """Though the reference would not look at the key: scaled embeddings, capped logits and such; not where a key says
    that there is none of it."""
    plain = read_model_config(RAW[family] | {"embedding_multiplier": 1.0, "final_logit_softcapping": None})
    assert plain == read_model_config(RAW[family])
    with pytest.raises(Unimplemented, match=f"{key} {value} is not supported") as caught:
        read_model_config(RAW[family] | {key: value})
    assert caught.value.where["field"] == key
