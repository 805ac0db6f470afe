"""A dense restatement of the DFlash draft forward, written from its formulas alone.

Every call sees the whole context: there is no cache, no batching and no fused projection.
One head is computed at a time, which keeps the grouping of key heads visible. Use it in
float64 as the yardstick for faster implementations.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.reference import storage


@dataclass(frozen=True)
class DraftOutput:
    """Rows 1..B-1 of a block: hidden after the final norm, and logits of the target's head."""

    hidden: torch.Tensor
    logits: torch.Tensor


class DenseDraft:
    """A draft checkpoint and its config, whichever of the known spellings it uses."""

    def __init__(self, path: Path | str, dtype: torch.dtype = torch.float64) -> None:
        raw = storage.read_config(path)
        nested = raw.get("dflash_config", {})
        decoder: dict[str, Any] = raw.get("transformer_layer_config", raw)
        self.dtype = dtype
        self.tensors = {k: t.to(dtype) for k, t in storage.load_tensors(path).items()}
        self.layers: int = decoder["num_hidden_layers"]
        self.heads: int = decoder["num_attention_heads"]
        self.kv_heads: int = decoder["num_key_value_heads"]
        self.head_dim: int = decoder["head_dim"]
        self.eps: float = decoder["rms_norm_eps"]
        self.frequencies, self.attention_factor = self.rope(decoder)
        self.window: int | None = decoder.get("sliding_window")
        self.layer_types: list[str] = decoder["layer_types"]
        self.block_size: int = raw["block_size"] if "block_size" in raw else nested["block_size"]
        if "speculators_model_type" in raw:
            # These ids name the block that reads a state, not the one that wrote it.
            self.target_layer_ids = [i - 1 for i in raw["aux_hidden_state_layer_ids"]]
            self.mask_token_id: int = raw["mask_token_id"]
            sliding_causal = not raw.get("sliding_window_non_causal", False)
            causal: bool | None = None
        else:
            self.target_layer_ids = list(nested["target_layer_ids"])
            self.mask_token_id = nested["mask_token_id"]
            sliding_causal = True
            causal = raw.get("is_causal", nested.get("causal"))
        self.causal = [
            (kind == "sliding_attention" and sliding_causal) if causal is None else causal for kind in self.layer_types
        ]

    def rope(self, decoder: dict[str, Any]) -> tuple[torch.Tensor, float]:
        """Angles a position of each pair, and what cos and sin are multiplied by; where it is scaled, transformers'."""
        nested = decoder.get("rope_parameters") or decoder.get("rope_scaling") or {}
        parameters = {"rope_theta": decoder.get("rope_theta"), "rope_type": "default", **nested}
        if parameters["rope_type"] == "default":
            exponent = torch.arange(self.head_dim // 2, dtype=self.dtype) * 2 / self.head_dim
            return parameters["rope_theta"] ** -exponent, 1.0
        config = Qwen3Config(head_dim=self.head_dim, rope_parameters=parameters)
        frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
        return frequencies.to(self.dtype), factor

    def weight(self, name: str) -> torch.Tensor:
        return self.tensors[name + ".weight"]

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        y = torch.einsum("ni,oi->no", x, self.weight(name))
        bias = self.tensors.get(name + ".bias")
        return y if bias is None else y + bias

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        mean_square = (x * x).mean(-1, keepdim=True)
        return x / torch.sqrt(mean_square + self.eps) * self.weight(name)

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate the pairs (d, d + D/2) of [n, D] by position times the pair's frequency."""
        half = self.head_dim // 2
        angle = positions.to(self.dtype)[:, None] * self.frequencies[None, :]
        first, second = x[:, :half], x[:, half:]
        return self.attention_factor * torch.cat(
            [
                first * torch.cos(angle) - second * torch.sin(angle),
                second * torch.cos(angle) + first * torch.sin(angle),
            ],
            dim=-1,
        )

    def visible(self, layer: int, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Which key positions each row position may read."""
        ahead = keys[None, :] - rows[:, None]
        allowed = torch.ones_like(ahead, dtype=torch.bool)
        if self.causal[layer]:
            allowed &= ahead <= 0
        if self.layer_types[layer] == "sliding_attention":
            if self.window is None:
                raise ValueError("a sliding layer without sliding_window")
            allowed &= -ahead < self.window
            allowed &= ahead < self.window
        return allowed

    def attention(
        self,
        layer: int,
        x: torch.Tensor,
        context: torch.Tensor,
        rows: torch.Tensor,
        before: torch.Tensor,
    ) -> torch.Tensor:
        """Block rows `x` read the context vectors and the block through the same k and v."""
        prefix = f"layers.{layer}.self_attn."
        source = torch.cat([context, x])
        positions = torch.cat([before, rows])
        q_all = self.linear(x, prefix + "q_proj").split(self.head_dim, dim=-1)
        k_all = self.linear(source, prefix + "k_proj").split(self.head_dim, dim=-1)
        v_all = self.linear(source, prefix + "v_proj").split(self.head_dim, dim=-1)
        hidden_from = ~self.visible(layer, rows, positions)
        outputs = []
        for head in range(self.heads):
            group = head // (self.heads // self.kv_heads)
            q = self.rotate(self.norm(q_all[head], prefix + "q_norm"), rows)
            k = self.rotate(self.norm(k_all[group], prefix + "k_norm"), positions)
            scores = torch.einsum("qd,kd->qk", q, k) / self.head_dim**0.5
            scores = scores.masked_fill(hidden_from, float("-inf"))
            outputs.append(torch.einsum("qk,kd->qd", torch.softmax(scores, -1), v_all[group]))
        return self.linear(torch.cat(outputs, dim=-1), prefix + "o_proj")

    def mlp(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        prefix = f"layers.{layer}.mlp."
        gate = self.linear(x, prefix + "gate_proj")
        gated = gate * torch.sigmoid(gate) * self.linear(x, prefix + "up_proj")
        return self.linear(gated, prefix + "down_proj")

    def context_vectors(self, features: torch.Tensor) -> torch.Tensor:
        """Concatenated captures [n, N*H] to the vectors [n, H] that every layer reads."""
        return self.norm(self.linear(features.to(self.dtype), "fc"), "hidden_norm")

    @torch.no_grad()
    def forward(
        self,
        features: torch.Tensor,
        embedding: torch.Tensor,
        lm_head: torch.Tensor,
        known: int,
        position: int | None = None,
        rows: int | None = None,
    ) -> DraftOutput:
        """Draft the block whose known token sits at `position`.

        The features belong to the positions just before it; without `position` they are the
        whole context. `rows` shortens the block.
        """
        count = features.shape[0]
        start = count if position is None else position
        size = self.block_size if rows is None else rows
        context = self.context_vectors(features)
        before = torch.arange(start - count, start)
        block = torch.arange(start, start + size)
        ids = torch.tensor([known] + [self.mask_token_id] * (size - 1))
        x = embedding.to(self.dtype)[ids]
        for layer in range(self.layers):
            prefix = f"layers.{layer}."
            normed = self.norm(x, prefix + "input_layernorm")
            x = x + self.attention(layer, normed, context, block, before)
            x = x + self.mlp(layer, self.norm(x, prefix + "post_attention_layernorm"))
        hidden = self.norm(x, "norm")[1:]
        return DraftOutput(hidden, torch.einsum("nh,vh->nv", hidden, lm_head.to(self.dtype)))
