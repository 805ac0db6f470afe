"""The target: a small qwen3_5-type hybrid that can be trained, compiled and stepped.

Parameter names equal the checkpoint's. Whole sequences go through ``forward``, single tokens
through ``step`` with caches of fixed size, so that a step can be captured in a CUDA graph.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from delta import LinearMixer
from layers import CenteredNorm, Mlp, rotary, rotate
from shapes import TargetShape


class FullMixer(nn.Module):
    """Grouped attention with a sigmoid gate on its output."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.heads, self.groups = shape.num_attention_heads, shape.num_key_value_heads
        self.dim, self.rotary_dim, self.theta = shape.head_dim, shape.rotary_dim, shape.rope_theta
        width = self.heads * self.dim
        self.q_proj = nn.Linear(shape.hidden_size, 2 * width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, self.groups * self.dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, self.groups * self.dim, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)
        self.q_norm = CenteredNorm(self.dim, shape.rms_norm_eps)
        self.k_norm = CenteredNorm(self.dim, shape.rms_norm_eps)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        q, gate = self.q_proj(x).unflatten(-1, (self.heads, 2 * self.dim)).chunk(2, -1)
        k = self.k_norm(self.k_proj(x).unflatten(-1, (self.groups, self.dim)))
        v = self.v_proj(x).unflatten(-1, (self.groups, self.dim))
        return rotate(self.q_norm(q), cos, sin), rotate(k, cos, sin), v, gate.flatten(-2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v, gate = self.project(x, cos[:, None], sin[:, None])
        q, k, v = (part.transpose(1, 2) for part in (q, k, v.to(q.dtype)))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2) * gate.sigmoid())

    def cache(self, rows: int, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        size = (rows, self.groups, length, self.dim)
        return like.new_zeros(size), like.new_zeros(size)

    def step(self, x: Tensor, cache: tuple[Tensor, Tensor], position: Tensor) -> Tensor:
        keys, values = cache
        cos, sin = rotary(position, self.rotary_dim, self.theta)
        q, k, v, gate = self.project(x, cos, sin)
        keys.index_copy_(2, position, k[:, :, None])
        values.index_copy_(2, position, v[:, :, None])
        q = q.unflatten(1, (self.groups, -1))
        scores = (q @ keys.mT).float() * self.dim**-0.5
        seen = torch.arange(keys.shape[2], device=x.device) <= position
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).to(values.dtype)
        out = (weights @ values).flatten(1)
        return self.o_proj(out * gate.sigmoid())


class Block(nn.Module):
    def __init__(self, shape: TargetShape, full: bool) -> None:
        super().__init__()
        mixer = FullMixer(shape) if full else LinearMixer(shape)
        self.mixer_name = "self_attn" if full else "linear_attn"
        self.add_module(self.mixer_name, mixer)
        self.mlp = Mlp(shape.hidden_size, shape.intermediate_size)
        self.input_layernorm = CenteredNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = CenteredNorm(shape.hidden_size, shape.rms_norm_eps)
        self.dropout = shape.dropout

    @property
    def mixer(self) -> LinearMixer | FullMixer:
        return self.get_submodule(self.mixer_name)  # type: ignore[return-value]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        mixed = self.mixer(self.input_layernorm(x), cos, sin)
        x = x + F.dropout(mixed, self.dropout, self.training)
        widened = self.mlp(self.post_attention_layernorm(x))
        return x + F.dropout(widened, self.dropout, self.training)

    def step(self, x: Tensor, cache: tuple[Tensor, Tensor], position: Tensor) -> Tensor:
        x = x + self.mixer.step(self.input_layernorm(x), cache, position)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape, shape.is_full(index)) for index in range(shape.num_hidden_layers))
        self.norm = CenteredNorm(shape.hidden_size, shape.rms_norm_eps)

    @property
    def blocks(self) -> list[Block]:
        return [block for block in self.layers if isinstance(block, Block)]


class Target(nn.Module):
    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Backbone(shape)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
                scale = (2 * shape.num_hidden_layers) ** -0.5 if residual else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    @property
    def head(self) -> Tensor:
        """The output matrix, tied to the embedding."""
        return self.model.embed_tokens.weight

    def forward(self, ids: Tensor, capture: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Normed hidden states [B, T, H] and the captured block outputs side by side."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        cos, sin = rotary(positions, self.shape.rotary_dim, self.shape.rope_theta)
        x = self.model.embed_tokens(ids)
        outputs = {}
        for index, block in enumerate(self.model.layers):
            x = block(x, cos, sin)
            if index in capture:
                outputs[index] = x
        features = torch.cat([outputs[index] for index in capture], -1) if capture else None
        return self.model.norm(x), features
