"""The small model that reads a prompt: layer by layer over all tokens, so that one layer's keys are held at a time.

Only Qwen3 is served: `scoring` needs its queries and keys before RoPE. There is no cache, no head and no sampling.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from services.errors import InvalidArgument, Unimplemented
from services.layers import LayerRange
from services.model.config import LayerKind, ModelConfig
from services.model.families import read_model_config
from shard_worker.device.devices import Device
from shard_worker.model.layer_weights import AttentionWeights, DecoderWeights, MlpWeights
from shard_worker.model.layers import swiglu
from shard_worker.ops.norm import rms_norm
from shard_worker.ops.rope import apply_rope, rope_table
from shard_worker.pflash.scoring import TAIL_QUERIES, TokenScores, chunk_means
from shard_worker.pflash.selection import CHUNK_TOKENS
from shard_worker.pflash.sparse import attend_sparsely
from shard_worker.stage.loader import Progress, StageLoader
from shard_worker.stage.segment import Segment
from shard_worker.weights.checkpoint import Checkpoint
from shard_worker.weights.weight import RowLookup

SPARSE_FROM_CPU, SPARSE_FROM_GPU = 4096, 1 << 17
"""Tokens of a prompt from which attention to chosen blocks is faster than to all: a GPU computes all in one kernel."""

MLP_ROWS = 4096
"""Rows of the feed-forward part that are computed at once: inside it they are at their widest."""


@dataclass(frozen=True, slots=True)
class Drafter:
    """A loaded Qwen3. embedding: [vocab, hidden]; the segment holds all its layers."""

    config: ModelConfig
    segment: Segment
    embedding: RowLookup
    fingerprint: str
    weight_bytes: int

    def score(self, token_ids: tuple[int, ...]) -> Iterator[int | list[float]]:
        """Yield the number of layers done after each layer, and at last the mean weight of every CHUNK_TOKENS tokens.

        It runs on the device thread, one layer at a time, so that other work gets its turn between layers.
        """
        device = self.segment.device.torch_device
        hidden = self.embedding.lookup(torch.tensor(token_ids)).to(self.segment.dtype)
        rotation = self.segment.rotations[self.config.rope]
        rope = rope_table(torch.arange(len(token_ids), device=device), rotation, hidden.dtype)
        scores, last = TokenScores(), len(self.segment.weights) - 1
        for number, weights in enumerate(self.segment.weights):
            hidden = self._layer(weights, hidden, rope, scores, last=number == last)
            yield number + 1
        yield chunk_means(scores.tokens(), CHUNK_TOKENS)

    def _layer(
        self,
        weights: DecoderWeights,
        hidden: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        scores: TokenScores,
        *,
        last: bool,
    ) -> torch.Tensor:
        """Compute one layer of a prompt and add its weights to `scores`. hidden: [n, hidden], also what is returned.

        Of the last layer only the queries and keys are needed: its input is returned as it is.
        """
        config, attention, mlp = self.config, weights.mixer, weights.mlp
        assert isinstance(attention, AttentionWeights)
        assert isinstance(mlp, MlpWeights)
        assert attention.qk_norm is not None
        length, heads, kv_heads = len(hidden), config.heads, config.kv_heads
        normed = rms_norm(hidden, weights.input_norm, config.norm_eps)
        projected = attention.qkv.matmul(normed, attention.qkv_bias).view(length, -1, config.head_dim)
        qk = rms_norm(projected[:, : heads + kv_heads], attention.qk_norm, config.norm_eps)
        scores.add(qk[-TAIL_QUERIES:, :heads], qk[:, heads:])
        if last:
            return hidden
        qk = apply_rope(qk, rope)
        mixed = attend_causally(qk[:, :heads], qk[:, heads:], projected[:, heads + kv_heads :])
        hidden = hidden + attention.out.matmul(mixed, attention.out_bias)
        parts = [
            part + swiglu.run(mlp, rms_norm(part, weights.post_norm, config.norm_eps))
            for part in torch.split(hidden, MLP_ROWS)
        ]
        return torch.cat(parts)


def attend_causally(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sparse_from: int | None = None
) -> torch.Tensor:
    """Return causal attention, [n, heads * dim]; the arguments have the shapes of `attend_sparsely`'s.

    sparse_from: the number of rows from which only chosen blocks are attended to; by default where that is faster.
    """
    if len(queries) >= (sparse_from or (SPARSE_FROM_CPU if queries.device.type == "cpu" else SPARSE_FROM_GPU)):
        return attend_sparsely(queries, keys, values)
    q, k, v = (x.transpose(0, 1)[None] for x in (queries, keys, values))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return mixed[0].transpose(0, 1).flatten(1)


def load_drafter(checkpoint: Checkpoint, device: Device, dtype: str | None, on_progress: Progress) -> Drafter:
    """Load all layers of a Qwen3. dtype: None keeps the checkpoint's own.

    Raises Unimplemented for another family and for sliding windows, and what `StageLoader` raises.
    """
    config = read_model_config(checkpoint.config)
    if config.family != "qwen3" or set(config.layer_kinds) != {LayerKind.FULL}:
        raise Unimplemented(
            f"{checkpoint.directory} is of model_type {config.family!r}; prompts are compressed by a Qwen3 without "
            "sliding windows, like Qwen3-0.6B",
            reason="UNKNOWN_FAMILY",
            field="--prefill-drafter",
        )
    stage = StageLoader(checkpoint, LayerRange(0, config.num_layers), dtype).load([device], None, on_progress)
    assert stage.embedding is not None
    return Drafter(config, stage.segments[0], stage.embedding, checkpoint.fingerprint, stage.weight_bytes)


def check_prompt(drafter: Drafter, token_ids: tuple[int, ...]) -> None:
    """Check that there is a prompt, of the drafter's tokens alone. Raises InvalidArgument otherwise."""
    if not token_ids:
        raise InvalidArgument("token_ids is empty: there is nothing to compress", field="token_ids")
    vocabulary = drafter.config.vocab_size
    foreign = [token for token in token_ids if not 0 <= token < vocabulary]
    if foreign:
        raise InvalidArgument(
            f"token_ids has {foreign[0]}; the drafter's tokens are 0 to {vocabulary - 1}", field="token_ids"
        )
