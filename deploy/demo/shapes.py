"""Sizes of the two models: everything their config files are written from."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TargetShape:
    vocab_size: int = 8192
    hidden_size: int = 384
    intermediate_size: int = 896
    num_hidden_layers: int = 12
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 64
    rotary_dim: int = 16
    rope_theta: float = 100_000.0
    linear_num_key_heads: int = 3
    linear_num_value_heads: int = 6
    linear_head_dim: int = 64
    linear_conv_kernel_dim: int = 4
    full_attention_interval: int = 4
    rms_norm_eps: float = 1e-6
    dropout: float = 0.0

    def is_full(self, index: int) -> bool:
        return (index + 1) % self.full_attention_interval == 0


@dataclass(frozen=True)
class DraftShape:
    """The draft shares the target's width, vocabulary, embedding and output matrix.

    ``conv_kernel_size`` (rows that a convolution around a sublayer mixes) and ``selector_rank``
    (numbers of a token in the candidate selector) make a DFlash2 draft of it; 0: a DFlash draft.
    """

    hidden_size: int = 384
    intermediate_size: int = 1024
    num_hidden_layers: int = 3
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 100_000.0
    rms_norm_eps: float = 1e-6
    block_size: int = 16
    target_layer_ids: tuple[int, ...] = (1, 3, 5, 8, 10)
    sliding_window: int = 256
    sliding_layers: int = 2
    vocab_size: int = 8192
    conv_kernel_size: int = 0
    conv_group_size: int = 16
    selector_rank: int = 0
    selector_top_k: int = 16

    @property
    def layer_types(self) -> list[str]:
        full = self.num_hidden_layers - self.sliding_layers
        return ["sliding_attention"] * self.sliding_layers + ["full_attention"] * full
