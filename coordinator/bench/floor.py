"""The least time that a step can take: what it must read, or compute, over how fast the device does that.

It follows from the workers' descriptions, the checkpoint's configuration, and a measurement of each stage's device.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coordinator.cluster.cluster import Cluster
from coordinator.planning.model_size import read_model_size
from services.layers import LayerRange
from services.messages.description import TargetDescription
from services.messages.measure import DeviceSpeed, MeasureRequest
from services.model.cached_tensors import CacheDtype, Per
from services.model.checkpoint_files import read_config
from services.model.config import ModelConfig
from services.model.families import read_model_config
from services.model.layers import layer_caches, layer_shapes, read_share
from services.model.stored_experts import experts_in_host, is_in_host


@dataclass(frozen=True, slots=True)
class Floor:
    """What steps of one cluster must read and compute.

    speeds: of each stage's first device. stage_bytes: weights that a step reads there, by stage. host_bytes: those of
    experts that it reads in the host's memory beside a GPU. token_bytes: keys and values of a token, in all stages
    together, by how many of the last tokens layers look at, None for all; state_bytes: recurrent state that a step
    reads and writes, likewise. draft_bytes: weights that a block
    reads, lm_head included. matrix_elements: of all layers' matrices.
    """

    speeds: tuple[DeviceSpeed, ...]
    stage_bytes: tuple[int, ...]
    host_bytes: tuple[int, ...]
    token_bytes: Mapping[int | None, int]
    state_bytes: int
    draft_bytes: int
    matrix_elements: int

    @classmethod
    async def of(cls, cluster: Cluster, model: Path) -> Floor:
        """Measure the devices of a cluster. Raises what `WorkerPort.measure` raises."""
        config = read_model_config(read_config(model))
        targets = [worker.target for worker in cluster.workers if worker.target is not None]
        dtype = cluster.target.dtype
        embedding, head = _ends(model, cluster.target)
        stages = [cls.weights_read(config, target, embedding, head) for target in targets]
        speeds = []
        for address, target in zip(cluster.addresses, targets, strict=True):
            worker = await cluster.worker(address)
            speeds.append((await worker.measure(MeasureRequest(str(model), target.dtype, target.weight_bytes)))[0])
        token_bytes, state_bytes = _state(config, dtype, cluster.target.kv_dtype or dtype)
        draft = cluster.draft
        return cls(
            speeds=tuple(speeds),
            stage_bytes=tuple(device for device, _ in stages),
            host_bytes=tuple(host for _, host in stages),
            token_bytes=token_bytes,
            state_bytes=state_bytes,
            draft_bytes=0 if draft is None else draft.weight_bytes + (head if draft.draft_vocab_size is None else 0),
            matrix_elements=round(_matrix_elements(config, LayerRange(0, config.num_layers))),
        )

    @staticmethod
    def weights_read(config: ModelConfig, target: TargetDescription, embedding: int, head: int) -> tuple[int, int]:
        """Return the bytes of weights that a step of one row reads on a stage's devices, and in the host's memory
        beside them: of an embedding that is not the head too only single rows, and of experts those that the row goes
        through.

        embedding, head: their bytes, which are one matrix where the head is tied.
        """
        first, last = target.layers.first == 0, target.layers.last == target.num_layers
        shared = first and last and config.tied_head
        layers = target.weight_bytes - (embedding if first else 0) - (head if last and not shared else 0)
        experts, in_host = config.experts, 0
        if experts is not None and target.host_weight_bytes:
            in_host = experts_in_host(experts.count, target.host_experts)
        read, held = (_matrix_elements(config, target.layers, read=read, in_host=in_host) for read in (True, False))
        beside = 0 if experts is None else round(target.host_weight_bytes * experts.chosen / experts.count)
        return round(layers * read / held) + (head if last else 0), beside

    def ms(self, kind: str, context: int) -> float:
        """Return the milliseconds of a kind of step behind so many tokens, whatever its number of rows."""
        last = self.speeds[-1].copy_bytes_per_s
        draft = self.draft_bytes / last * 1e3
        if kind == "draft":
            return draft
        seen = sum(
            size * (context if window is None else min(context, window)) for window, size in self.token_bytes.items()
        )
        share = (seen + self.state_bytes) / len(self.speeds)
        target = sum(
            (size + share) / speed.copy_bytes_per_s * 1e3
            + (beside / speed.host.copy_bytes_per_s * 1e3 if beside and speed.host is not None else 0)
            for size, beside, speed in zip(self.stage_bytes, self.host_bytes, self.speeds, strict=True)
        )
        return target + draft if kind == "cycle" else target

    def prefill_ms(self, tokens: int) -> float:
        """Return the milliseconds of the products of so many tokens with all layers' matrices."""
        slowest = min(speed.matmul_flops_per_s for speed in self.speeds)
        return 2 * self.matrix_elements * tokens / slowest * 1e3


def _ends(model: Path, target: TargetDescription) -> tuple[int, int]:
    """Return the bytes of the embedding and of lm_head in a worker's memory. target: how they were loaded."""
    size_of = read_model_size(model, target.dtype, quantization=target.quantization)
    return size_of.embedding_bytes, size_of.head_bytes


def _matrix_elements(config: ModelConfig, layers: LayerRange, *, read: bool = True, in_host: int = 0) -> float:
    """Return the elements of the matrices of some layers, but for the first `in_host` experts of each; `read`: of those
    that a row is multiplied by."""
    shapes = [one for layer in range(layers.first, layers.last) for one in layer_shapes(config, layer).items()]
    matrices = [(name, math.prod(shape)) for name, shape in shapes if len(shape) == 2 and not is_in_host(name, in_host)]
    return sum(elements * (read_share(config, name) if read else 1) for name, elements in matrices)


def _state(config: ModelConfig, dtype: str, kv_dtype: str) -> tuple[Mapping[int | None, int], int]:
    """Return the bytes that a token leaves in all attention layers, by their window, and those of recurrent state that
    a step moves."""
    cached = [tensor for layer in range(config.num_layers) for tensor in layer_caches(config, layer)]
    sizes = [(tensor, tensor.size_bytes(dtype, kv_dtype)) for tensor in cached]
    token: Counter[int | None] = Counter()
    for tensor, size in sizes:
        if tensor.per is Per.TOKEN:
            token[tensor.window] += size
    # Read and written; the convolution's inputs beside it are few.
    state = 2 * sum(size for tensor, size in sizes if tensor.per is Per.SESSION and tensor.dtype is CacheDtype.FLOAT32)
    return token, state
