"""Gated DeltaNet (arXiv 2412.06464) with its causal convolution: a recurrent layer, whose state does not grow."""

from __future__ import annotations

from services.model.cached_tensors import CachedTensor, CacheDtype, Per
from services.model.config import LinearAttentionConfig, ModelConfig


def sizes(config: ModelConfig) -> LinearAttentionConfig:
    """Return the layer's sizes, which every family with such layers reads."""
    assert config.linear is not None
    return config.linear


def tensor_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors. in_proj_z makes the output's gate, in_proj_b beta and in_proj_a the decay."""
    linear, hidden = sizes(config), config.hidden_size
    qkv, z, heads = linear.conv_channels, linear.value_dim, linear.value_heads
    rows = {"qkvz": qkv + z} if linear.qkvz_grouped else {"qkv": qkv, "z": z}
    rows |= {"ba": 2 * heads} if linear.ba_grouped else {"b": heads, "a": heads}
    return {
        **{f"linear_attn.in_proj_{part}.weight": (count, hidden) for part, count in rows.items()},
        "linear_attn.conv1d.weight": (linear.conv_channels, 1, linear.conv_taps),
        "linear_attn.A_log": (linear.value_heads,),
        "linear_attn.dt_bias": (linear.value_heads,),
        "linear_attn.norm.weight": (linear.value_head_dim,),
        "linear_attn.out_proj.weight": (hidden, linear.value_dim),
    }


def cached_tensors(config: ModelConfig, layer: int) -> tuple[CachedTensor, ...]:
    """Return the state and the convolution's last inputs; and what a verify records of its rows to commit them later.

    The record holds the convolution's input, the key, the corrected value and the decay of every row.
    """
    linear, heads = sizes(config), sizes(config).value_heads
    state = (heads, linear.key_head_dim, linear.value_head_dim)
    inputs = (linear.conv_taps - 1, linear.conv_channels)
    return (
        CachedTensor("recurrent", state, Per.SESSION, CacheDtype.FLOAT32),
        CachedTensor("conv", inputs, Per.SESSION, CacheDtype.ACTIVATIONS),
        CachedTensor("block_conv", (linear.conv_channels,), Per.BLOCK_ROW, CacheDtype.ACTIVATIONS),
        CachedTensor("block_keys", (heads, linear.key_head_dim), Per.BLOCK_ROW, CacheDtype.FLOAT32),
        CachedTensor("block_corrected", (heads, linear.value_head_dim), Per.BLOCK_ROW, CacheDtype.FLOAT32),
        CachedTensor("block_decays", (heads,), Per.BLOCK_ROW, CacheDtype.FLOAT32),
    )
