"""A dense restatement of the drafts that share DFlash's layers, written from its formulas alone.

Every call sees the whole context: there is no cache, no batching and no fused projection.
One head is computed at a time, which keeps the grouping of key heads visible. Use it in
float64 as the yardstick for faster implementations.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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
            flat = {**raw, **nested}
            self.target_layer_ids = list(flat["target_layer_ids"])
            self.mask_token_id = flat["mask_token_id"]
            sliding_causal = True
            causal = raw.get("is_causal", nested.get("causal"))
        self.own: dict[str, Any] = {**raw, **nested}
        self.group: int | None = self.own.get("conv_group_size")
        # DSpark calls it so, where it says it at all, Domino otherwise.
        says = self.own.get("sample_from_anchor", self.own.get("shift_label"))
        self.from_anchor: bool = "markov_rank" in self.own if says is None else says
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

    def convolved(self, x: torch.Tensor, kernels: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        """Rows of one block, each summed with those before it, by kernels [n, taps, groups] and base [taps, H]."""
        assert self.group is not None
        result = torch.zeros_like(x)
        for row in range(len(x)):
            for tap in range(min(row + 1, len(base))):
                factor = base[tap] + torch.repeat_interleave(kernels[row, tap], self.group)
                result[row] += factor * x[row - tap]
        return result

    def around(self, prefix: str, x: torch.Tensor, sublayer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """A sublayer, and in DFlash2 a convolution before and behind it, by kernels made of what comes before both."""
        base = self.tensors.get(prefix + ".base_kernel")
        if base is None:
            return sublayer(x)
        kernels = self.linear(x, prefix + ".kernel_projection").reshape(len(x), 2, base.shape[1], -1)
        return self.convolved(sublayer(self.convolved(x, kernels[:, 0], base[0])), kernels[:, 1], base[1])

    def choose(self, output: DraftOutput, known: int, embedding: torch.Tensor) -> list[int]:
        """Greedy draft tokens, one after the other: the most probable ones, by logits that the layout corrects.

        Logits of a reduced vocabulary are named by `d2t`.
        """
        chosen, state = [known], None
        for place, (hidden, row) in enumerate(zip(output.hidden, output.logits, strict=True)):
            logits = row
            if "selector_top_k" in self.own:
                logits = self.selected(hidden, row, chosen[-1])
            if "markov_rank" in self.own:
                added, state = self.markov(hidden, chosen[-1], state)
                logits = row + added
            if "gru_hidden_dim" in self.own:
                state = self.gru(embedding[chosen[-1]].to(self.dtype), state)
                if place >= self.own["pure_draft_prefix_len"]:
                    inner = self.tensors["embed_proj.0.weight"] @ torch.cat([hidden, state])
                    logits = row + self.tensors["embed_proj.2.weight"] @ (inner * torch.sigmoid(inner))
            best = int(logits.argmax())
            chosen.append(best + int(self.tensors["d2t"][best]) if "d2t" in self.tensors else best)
        return chosen[1:]

    def selected(self, hidden: torch.Tensor, logits: torch.Tensor, before: int) -> torch.Tensor:
        """DFlash2: the scores of the likeliest tokens, and nothing for all others."""
        prefix = "candidate_selector."
        weighing = self.tensors[prefix + "hidden_projection.weight"] @ hidden
        predecessor = self.tensors[prefix + "predecessor_codebook"][before]
        scores = torch.full_like(logits, float("-inf"))
        for token in logits.topk(self.own["selector_top_k"]).indices.tolist():
            successor = self.tensors[prefix + "successor_codebook"][token]
            scores[token] = logits[token] + (predecessor * weighing * successor).sum()
        return scores

    def markov(
        self, hidden: torch.Tensor, before: int, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """DSpark: what the token before adds to the logits, and the state behind it."""
        embedded = self.tensors["markov_head.markov_w1.weight"][before]
        kind, mixed = self.own["markov_head_type"], embedded
        if kind == "gated":
            gate = self.tensors["markov_head.gate_proj.weight"] @ torch.cat([hidden, embedded])
            mixed = torch.sigmoid(gate + self.tensors["markov_head.gate_proj.bias"]) * embedded
        if kind == "rnn":
            old = torch.zeros_like(embedded) if state is None else state
            joint = self.tensors["markov_head.joint_proj.weight"] @ torch.cat([old, embedded, hidden])
            gate, candidate, out = (joint + self.tensors["markov_head.joint_proj.bias"]).chunk(3)
            state = torch.sigmoid(gate) * old + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
            mixed = torch.tanh(out)
        return self.tensors["markov_head.markov_w2.weight"] @ mixed, state

    def gru(self, embedded: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        """Domino: the state behind one more token, by torch's own cell."""
        of_token, of_state = self.tensors["prefix_gru.weight_ih_l0"], self.tensors["prefix_gru.weight_hh_l0"]
        cell = torch.nn.GRUCell(of_token.shape[1], of_state.shape[1], bias=False, dtype=self.dtype)
        cell.load_state_dict({"weight_ih": of_token, "weight_hh": of_state})
        with torch.no_grad():
            return cell(embedded, state)

    def chances(self, output: DraftOutput, known: int, chosen: list[int]) -> list[float]:
        """DSpark: how likely each draft token and all before it are to be accepted, by the confidence head."""
        chance, chances = 1.0, []
        for hidden, before in zip(output.hidden, [known, *chosen], strict=False):
            embedded = self.tensors["markov_head.markov_w1.weight"][before]
            seen = torch.cat([hidden, embedded]) if self.own["confidence_head_with_markov"] else hidden
            weight, bias = (self.tensors["confidence_head.proj." + part] for part in ("weight", "bias"))
            chance *= float(torch.sigmoid(weight[0] @ seen + bias[0]))
            chances.append(chance)
        return chances

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
        # A block that begins with the known token's own guess has no row for it alone.
        size = self.block_size if rows is None else rows - self.from_anchor
        context = self.context_vectors(features)
        before = torch.arange(start - count, start)
        block = torch.arange(start, start + size)
        ids = torch.tensor([known] + [self.mask_token_id] * (size - 1))
        x = embedding.to(self.dtype)[ids]
        for layer in range(self.layers):
            prefix = f"layers.{layer}."
            attention = partial(self.attention, layer, context=context, rows=block, before=before)
            x = x + self.around(prefix + "attention_conv", self.norm(x, prefix + "input_layernorm"), attention)
            mlp = partial(self.mlp, layer)
            x = x + self.around(prefix + "mlp_conv", self.norm(x, prefix + "post_attention_layernorm"), mlp)
        hidden = self.norm(x, "norm")[0 if self.from_anchor else 1 :]
        return DraftOutput(hidden, torch.einsum("nh,vh->nv", hidden, lm_head.to(self.dtype)))
