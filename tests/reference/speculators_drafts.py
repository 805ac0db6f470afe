"""Tiny drafts made, written and computed by the speculators package, the reference for its layouts.

The package asks for an older transformers and for vision and audio libraries that its models don't use, so the tests
install it without what it depends on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from speculators import SpeculatorModel, SpeculatorModelConfig, SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import Qwen3Config

from tests.reference import storage

KINDS: dict[str, tuple[type[DFlashSpeculatorConfig], type[DFlashDraftModel]]] = {
    "dflash": (DFlashSpeculatorConfig, DFlashDraftModel),
    "dflash2": (DFlash2SpeculatorConfig, DFlash2DraftModel),
    "dspark": (DSparkSpeculatorConfig, DSparkDraftModel),
}


def make(
    kind: str,
    target_path: Path,
    embedding: torch.Tensor,
    head: torch.Tensor,
    *,
    block_size: int,
    decoder: Mapping[str, Any] | None = None,
    token_ids: Sequence[int] | None = None,
    **own: Any,
) -> DFlashDraftModel:
    """Return a draft with random weights for the target at `target_path`.

    embedding, head: [vocabulary, hidden] of the target. decoder: keys of its layers' configuration beside the default
    ones. token_ids: ascending, those of a reduced vocabulary, which has a head of its own. own: keys of the kind.
    """
    target = storage.read_config(target_path)
    vocabulary, hidden = embedding.shape
    layers = Qwen3Config(
        **{
            "hidden_size": hidden,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": vocabulary,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
            "attn_implementation": "eager",
            "dtype": "float32",
        }
        | dict(decoder or {})
    )
    config_of, model_of = KINDS[kind]
    config: SpeculatorModelConfig = config_of(
        transformer_layer_config=layers,
        draft_vocab_size=vocabulary if token_ids is None else len(token_ids),
        block_size=block_size,
        # The first one is what goes into the first layer.
        aux_hidden_state_layer_ids=[2, 5],
        mask_token_id=vocabulary - 2,
        target_hidden_size=hidden,
        speculators_config=SpeculatorsConfig(
            algorithm=kind,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=block_size - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=str(target_path), architectures=target["architectures"]),
        ),
        **own,
    )
    torch.manual_seed(7)
    model = model_of(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape) / (weight.shape[-1] ** 0.5 if weight.ndim > 1 else 4.0)
            weight.copy_(drawn + (1.0 if "norm" in name else 0.0))
        for name, weight in model.named_parameters():
            if name.endswith("base_kernel"):
                weight[:, 0] += 1.0
        model.embed_tokens.weight.copy_(embedding)
        if token_ids is None:
            model.lm_head.weight.copy_(head)
        else:
            kept = torch.tensor(token_ids)
            assert model.d2t is not None
            assert model.t2d is not None
            model.d2t.copy_(kept - torch.arange(len(kept)))
            model.t2d[kept] = True
    return model


def write(model: SpeculatorModel, path: Path) -> Path:
    """Write a draft as the package does, and return the folder."""
    model.save_pretrained(path)
    return path


@torch.no_grad()
def block_of(model: DFlashDraftModel, joined: torch.Tensor, known: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the hidden rows [block, hidden] and logits [block, vocabulary] of the block behind `joined`.

    joined: what the target's layers put out for each token before the known one, [tokens, captures * hidden].
    """
    length, rows = len(joined), model.block_size
    total = length + rows + 1
    captures = torch.cat([joined, torch.randn(total - length, joined.shape[1])])[None]
    ids = torch.zeros(1, total, dtype=torch.long)
    ids[0, length] = known
    only = torch.zeros(1, total)
    only[0, length] = 1.0
    hidden, logits, *_ = model._backbone_forward(
        captures,
        ids,
        only,
        torch.zeros(1, total, model.hidden_size),
        torch.zeros(1, total, dtype=torch.long),
        max_anchors=1,
    )
    return hidden[0], logits[0]


@torch.no_grad()
def choose(model: DFlashDraftModel, hidden: torch.Tensor, logits: torch.Tensor, known: int) -> list[int]:
    """Return the greedy draft tokens of a block, each by those before it, as the package's heads score them."""
    first = 0 if model.config.sample_from_anchor else 1
    before, chosen = known, []
    # Of the token before each row's; a row without draft token has the known one.
    previous = torch.full((1, model.block_size), known)
    for row in range(first, model.block_size):
        previous[0, row] = before
        if isinstance(model, DFlash2DraftModel):
            candidates, scores = model.candidate_selector.select(
                logits[row : row + 1], hidden[row : row + 1], torch.tensor([before])
            )
            best = int(candidates[0, scores[0].argmax()])
        elif isinstance(model, DSparkDraftModel):
            assert model.markov_head is not None
            bias = model.markov_head.block_bias(prev_token_ids=previous, hidden_states=hidden[None])
            best = int((logits[row] + bias[0, row]).argmax())
        else:
            best = int(logits[row].argmax())
        before = best + int(model.d2t[best]) if model.d2t is not None else best
        chosen.append(before)
    return chosen


@torch.no_grad()
def chances(model: DSparkDraftModel, hidden: torch.Tensor, known: int, tokens: Sequence[int]) -> list[float]:
    """Return how likely the confidence head takes each draft token of a block to be accepted behind those before it."""
    assert model.confidence_head is not None
    assert model.markov_head is not None
    features = hidden
    if model.config.confidence_head_with_markov:
        before = torch.tensor([known, *tokens[:-1]])
        features = torch.cat([hidden, model.markov_head.prev_embeddings(before)], dim=-1)
    return torch.sigmoid(model.confidence_head(features)).tolist()
