"""Checks of the dense draft, so that a disagreement points at the project.

Its blocks are compared with those of transformers' Qwen3, whose key and value cache is filled
by hand with the projected context; the config spellings are compared with each other.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from tests.reference import checkpoints, storage
from tests.reference.dense_draft import DenseDraft
from tests.reference.target import with_cache


def draft_case(tmp_path: Path, **options: Any) -> tuple[DenseDraft, list[Any]]:
    """A draft with random captures and target matrices in float64."""
    goal = checkpoints.write_qwen3(tmp_path / "target", vocab=32)
    draft = DenseDraft(checkpoints.write_draft(tmp_path / "draft", goal, **options))
    gen = torch.Generator().manual_seed(5)
    make = [(20, 64 * len(draft.target_layer_ids)), (32, 64), (32, 64)]
    return draft, [torch.randn(*s, generator=gen, dtype=torch.float64) for s in make]


SLIDING = ("sliding_attention", "full_attention")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attention_bias": True, "is_causal": True, "form": "nested"},
        {"layer_types": SLIDING, "sliding_window": 10},
        {"layer_types": SLIDING, "sliding_window": 5, "is_causal": False},
    ],
)
def test_dense_draft_equals_transformers_blocks(options: dict[str, Any], tmp_path: Path) -> None:
    draft, (features, embed, head) = draft_case(tmp_path, **options)
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        attention_bias=draft.tensors.get("layers.0.self_attn.q_proj.bias") is not None,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        attn_implementation="eager",
        dtype=torch.float64,
    )
    model = Qwen3ForCausalLM(config).double().eval()
    own = {f"model.{k}": t for k, t in draft.tensors.items() if k.startswith(("layers", "norm"))}
    model.load_state_dict(own | {"model.embed_tokens.weight": embed, "lm_head.weight": head})
    cache = DynamicCache(config=config)
    context = draft.context_vectors(features)
    rope = model.model.rotary_emb
    with torch.no_grad():
        for i, layer in enumerate(model.model.layers):
            attn = layer.self_attn
            k = attn.k_norm(attn.k_proj(context).view(1, 20, 2, 16)).transpose(1, 2)
            v = attn.v_proj(context).view(1, 20, 2, 16).transpose(1, 2)
            cos, sin = rope(k, torch.arange(20)[None])
            cache.update(apply_rotary_pos_emb(k, k, cos, sin)[1], v, i)
        x = embed[[7] + [draft.mask_token_id] * 7][None]
        for i, layer in enumerate(model.model.layers):
            ahead = torch.arange(28)[None, :] - torch.arange(20, 28)[:, None]
            allowed = torch.ones_like(ahead, dtype=torch.bool)
            slides = draft.layer_types[i] == "sliding_attention"
            if options.get("is_causal", slides):
                allowed &= ahead <= 0
            if slides:
                allowed &= ahead.abs() < options["sliding_window"]
            mask = torch.zeros(8, 28, dtype=torch.float64).masked_fill(~allowed, -1e300)
            x = layer(
                x,
                attention_mask=mask[None, None],
                **with_cache(layer, cache),
                position_embeddings=rope(x, torch.arange(20, 28)[None]),
            )
        hidden = model.model.norm(x)[0, 1:]
        rows = model.lm_head(hidden)
    out = draft.forward(features, embed, head, known=7)
    # transformers computes rotation angles and norms in float32
    torch.testing.assert_close(out.hidden, hidden, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out.logits, rows, rtol=1e-4, atol=1e-4)


def test_dense_draft_reacts_to_what_it_should(tmp_path: Path) -> None:
    draft, (features, embed, head) = draft_case(tmp_path, target_layer_ids=(2, 0))
    base = draft.forward(features, embed, head, 7).logits
    assert base.shape == (7, 32)
    assert draft.target_layer_ids == [2, 0]
    swapped = torch.cat([features[:, 64:], features[:, :64]], dim=1)
    assert not torch.allclose(draft.forward(swapped, embed, head, 7).logits, base)
    assert not torch.allclose(draft.forward(features, embed, head, 8).logits, base)
    assert not torch.allclose(draft.forward(features[1:], embed, head, 7).logits, base)
    moved = draft.forward(features, embed, head, 7, position=120).logits
    torch.testing.assert_close(moved, base)
    assert draft.forward(features, embed, head, 7, rows=3).logits.shape == (2, 32)
    assert draft.forward(features[:0], embed, head, 7).logits.shape == (7, 32)


def test_draft_forms_describe_one_draft(tmp_path: Path) -> None:
    options: dict[str, Any] = {"layer_types": SLIDING, "sliding_window": 6, "is_causal": False}
    outputs = []
    for form in ("zlab", "nested", "rope_parameters", "speculators"):
        draft, inputs = draft_case(tmp_path, form=form, **options)
        assert (draft.block_size, draft.mask_token_id) == (8, 30)
        assert draft.target_layer_ids == [1, 2]
        assert draft.causal == [False, False]
        outputs.append(draft.forward(*inputs, known=7).logits)
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0], rtol=0, atol=0)
    ids = storage.read_config(tmp_path / "draft")["aux_hidden_state_layer_ids"]
    assert ids == [2, 3]
    with pytest.raises(ValueError, match="cannot make"):
        draft_case(tmp_path, form="speculators", is_causal=True)
