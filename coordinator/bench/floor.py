"""The least time a step can take: what it must read, or compute, over how fast the device does that.

From the workers' descriptions, the checkpoint's configuration, and a measurement of every stage's first device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.cluster.cluster import Cluster
from coordinator.text.tokenizer import read_json_object
from services.messages.description import TargetDescription
from services.messages.measure import DeviceSpeed, MeasureRequest
from services.messages.tensors import ITEM_BYTES

STATE_BYTES = 4
"""Recurrent state is float32."""


@dataclass(frozen=True, slots=True)
class Floor:
    """stage_bytes: weights that a step reads, by stage; token_bytes: keys and values of a token, state_bytes: recurrent
    state, of all stages together. draft_bytes: weights that a block reads, lm_head included."""

    speeds: tuple[DeviceSpeed, ...]
    stage_bytes: tuple[int, ...]
    token_bytes: int
    state_bytes: int
    draft_bytes: int
    matrix_elements: int

    @classmethod
    async def of(cls, cluster: Cluster, model: Path) -> Floor:
        """Measures the devices. Errors as of `WorkerPort.measure`."""
        config = text_config(model)
        targets = [worker.target for worker in cluster.workers if worker.target is not None]
        item = ITEM_BYTES[cluster.target.dtype]
        head = targets[0].vocab_size * targets[0].hidden_size * item
        stages = [_weights_read(target, head, bool(config.get("tie_word_embeddings"))) for target in targets]
        speeds = []
        for address, target in zip(cluster.addresses, targets, strict=True):
            worker = await cluster.worker(address)
            speeds.append((await worker.measure(MeasureRequest(str(model), target.dtype, target.weight_bytes)))[0])
        token_bytes, state_bytes = _state(config, ITEM_BYTES[cluster.target.kv_dtype or cluster.target.dtype])
        return cls(
            speeds=tuple(speeds),
            stage_bytes=tuple(stages),
            token_bytes=token_bytes,
            state_bytes=state_bytes,
            draft_bytes=0 if cluster.draft is None else cluster.draft.weight_bytes + head,
            matrix_elements=(sum(stages) - head) // item,
        )

    def ms(self, kind: str, context: int) -> float:
        """Of a step behind so many tokens, whatever its number of rows."""
        last = self.speeds[-1].copy_bytes_per_s
        draft = self.draft_bytes / last * 1e3
        if kind == "draft":
            return draft
        share = (context * self.token_bytes + self.state_bytes) / len(self.speeds)
        target = sum(
            (size + share) / speed.copy_bytes_per_s * 1e3
            for size, speed in zip(self.stage_bytes, self.speeds, strict=True)
        )
        return target + draft if kind == "cycle" else target

    def prefill_ms(self, tokens: int) -> float:
        """Of the products with all layers' matrices."""
        slowest = min(speed.matmul_flops_per_s for speed in self.speeds)
        return 2 * self.matrix_elements * tokens / slowest * 1e3


def text_config(model: Path) -> Mapping[str, Any]:
    """The decoder's part of config.json."""
    config = read_json_object(model / "config.json")
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, Mapping) else config


def _weights_read(target: TargetDescription, head: int, tied: bool) -> int:
    """Of an embedding that is not the head too, a step reads single rows."""
    first, last = target.layers.first == 0, target.layers.last == target.num_layers
    return target.weight_bytes - (head if first and not (tied and last) else 0)


def _state(config: Mapping[str, Any], kv_item: int) -> tuple[int, int]:
    """Bytes that a token leaves in all attention layers, and that a step moves of recurrent state."""
    layers = config["num_hidden_layers"]
    keys = config.get("num_key_value_heads", config["num_attention_heads"])
    dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    kinds = config.get("layer_types")
    if kinds is None:
        interval = config.get("full_attention_interval", 4) if "linear_num_value_heads" in config else 1
        linear = sum(1 for layer in range(layers) if (layer + 1) % interval)
    else:
        linear = sum(kind == "linear_attention" for kind in kinds)
    state = 0
    if linear:
        heads, key = config["linear_num_value_heads"], config["linear_key_head_dim"]
        # Read and written.
        state = 2 * linear * heads * key * config["linear_value_head_dim"] * STATE_BYTES
    return 2 * (layers - linear) * keys * dim * kv_item, state
