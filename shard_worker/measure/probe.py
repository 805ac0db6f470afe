"""How fast a device is at what decoding asks of it: reading weights at one row, and what a layer costs beside that.

The first is measured with products of the model's own width over as many bytes as the device would hold, the second
with real layers of the model's family: on a CPU as wide and as many as it would hold, less what reading them takes,
since operators cost more among weights that leave nothing in its caches; where those are too large, and on a GPU, cut
down to a width at which reading weights costs nothing. Bounded in time and memory; keeps nothing.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from services.layers import LayerRange
from services.messages.measure import DeviceSpeed, HostSpeed, MeasureRequest
from services.messages.sampling import SamplingParams
from services.model.config import ModelConfig
from services.model.families import read_model_config
from services.model.layers import layer_shapes
from services.model.stored_experts import ROUTERS, is_in_host
from shard_worker.device.devices import HOST, Device, describe
from shard_worker.device.dtypes import dtype_from_name
from shard_worker.model.head import Head
from shard_worker.model.layer_weights import LayerTensors
from shard_worker.model.layers import decoder
from shard_worker.model.rows import SessionRows
from shard_worker.ops.rope import Rotation
from shard_worker.sampling.sampler import Sampler
from shard_worker.stage.segment import Segment
from shard_worker.weights.weight import DenseWeight, Weight

READ_S, LAYER_S, MATMUL_S = 0.4, 0.3, 0.1
"""Seconds for which each figure is measured: LAYER_S once for each kind of layer and number of layers."""

REST_S = 0.003
"""Seconds of rest before each run, for each other stage that would compute meanwhile: the caches then hold other
programs' data, which makes a stage slower by up to a fifth."""

MOST_STAGES = 4
"""No rest is longer than with so many stages: it changes nothing any more, and measuring takes its time."""

NARROW = 64
"""Hidden and MLP width, and vocabulary, of layers whose weights cost nothing to read."""

FEW, MANY, POSITION = 1, 5, 100
PREFILL_ROWS = 512
MATMUL_ELEMENTS = {"cpu": 4 << 20, "gpu": 1 << 30}
"""Most weights of the product of many rows, which takes 2 * PREFILL_ROWS operations for each."""

MOST_BYTES = {"cpu": 256 << 20, "gpu": 2 << 30}
"""Most weights that are read in turns: above that no cache helps any more."""


def measure(device: Device, config: Mapping[str, Any], request: MeasureRequest) -> DeviceSpeed:
    """Measure a device for a model; to be called on the device's thread. config: the model's config.json.

    Raises what `read_model_config` raises, and ResourceExhausted when not even this fits.
    """
    shape = read_model_config(config)
    described = describe(device)
    most = MOST_BYTES["gpu" if device.is_gpu else "cpu"]
    if described.free_bytes:
        most = min(most, described.free_bytes // 4)
    rest_s = (min(request.stages, MOST_STAGES) - 1) * REST_S
    probe = _Probe(device, shape, dtype_from_name(request.dtype), most, request.resident_bytes, rest_s)
    read_bytes_per_s, flops_per_s = probe.product_rates()
    layer_s, step_s = probe.layer_costs(read_bytes_per_s)
    speed = DeviceSpeed(
        name=device.name,
        total_bytes=described.total_bytes,
        free_bytes=described.free_bytes,
        read_bytes_per_s=read_bytes_per_s,
        matmul_flops_per_s=flops_per_s,
        layer_s=layer_s,
        step_s=step_s,
        choose_s=probe.choose_s(),
        copy_bytes_per_s=probe.copy_rate(),
        limited=device.limit_bytes is not None,
        host=probe.host_speed() if device.is_gpu and shape.experts is not None else None,
    )
    if device.is_gpu:
        # What torch keeps for later would look taken to whoever asks next.
        torch.cuda.empty_cache()
    return speed


@dataclass(frozen=True, slots=True)
class _Probe:
    """What is measured, on which device.

    most_bytes: weights that are held at a time. resident_bytes: weights that the stage would hold. rest_s: seconds of
    rest before each run. in_host: whether layers' routed experts are in the host's memory beside the device.
    """

    device: Device
    shape: ModelConfig
    dtype: torch.dtype
    most_bytes: int
    resident_bytes: int
    rest_s: float
    in_host: bool = False

    def product_rates(self) -> tuple[float, float]:
        """Return bytes read a second by products of one row, and operations a second at PREFILL_ROWS."""
        extents = (2 * self.shape.mlp_size, self.shape.hidden_size)
        size = extents[0] * extents[1] * self.dtype.itemsize
        count = max(1, min(self.most_bytes, self.resident_bytes) // size)
        # Zeros would be read as fast, but a CPU maps them all to one page.
        matrices = [self._weight(*extents) for _ in range(count)]
        tiny, row = self._weight(NARROW, NARROW), self._full(1, NARROW)
        # What a product costs without weights is in the layers' own figure.
        bare_s = self._seconds(_products(row, [tiny] * 32), READ_S / 6) / 32
        read_s = self._seconds(_products(self._full(1, extents[1]), matrices), READ_S) / count
        elements = MATMUL_ELEMENTS["gpu" if self.device.is_gpu else "cpu"]
        part = self._weight(min(extents[0], max(1, elements // extents[1])), extents[1])
        full_s = self._seconds(_products(self._full(PREFILL_ROWS, extents[1]), [part]), MATMUL_S)
        return size / max(read_s - bare_s, read_s / 10), 2 * part.rows * part.columns * PREFILL_ROWS / full_s

    def host_speed(self) -> HostSpeed:
        """Return how fast a mixture's experts are on the CPU beside the device."""
        experts = self.shape.experts
        assert experts is not None
        described = describe(HOST)
        most = min(MOST_BYTES["cpu"], described.free_bytes // 4) if described.free_bytes else MOST_BYTES["cpu"]
        there = replace(
            self,
            device=HOST,
            shape=replace(self.shape, mlp_size=experts.size),
            most_bytes=most,
            resident_bytes=min(most, self.resident_bytes),
        )
        read_bytes_per_s, _ = there.product_rates()
        layer_s, _ = replace(self, in_host=True).layer_costs(read_bytes_per_s)
        return HostSpeed(
            described.total_bytes, described.free_bytes, read_bytes_per_s, layer_s, copy_bytes_per_s=there.copy_rate()
        )

    def copy_rate(self) -> float:
        """Return bytes read and written a second by a large copy."""
        source = torch.ones(self.most_bytes, dtype=torch.uint8, device=self.device.torch_device)
        target = torch.empty_like(source)
        return 2 * self.most_bytes / self._seconds(lambda: target.copy_(source), MATMUL_S)

    def layer_costs(self, read_bytes_per_s: float) -> tuple[dict[str, float], float]:
        """Return seconds of one layer of each kind beside reading its weights, and of a step apart from its layers."""
        costs, steps = {}, []
        for kind in dict.fromkeys(self.shape.layer_kinds):
            # What a layer alone has no part in is left out: others' keys and values, and the tokens' own inputs.
            shape = replace(self.shape, layer_kinds=(kind,), vocab_size=NARROW, sharing_layers=0, per_layer=None)
            many, size = MANY, _matrix_bytes(shape, self.dtype)
            if self.device.is_gpu or MANY * size > self.most_bytes:
                shape, size = replace(shape, hidden_size=NARROW, mlp_size=NARROW), 0
                if shape.experts is not None:
                    shape = replace(shape, experts=replace(shape.experts, size=NARROW))
            else:
                many = max(MANY, min(self.most_bytes, self.resident_bytes) // size)
            few_s = self._seconds(self._step(shape, FEW), LAYER_S)
            many_s = self._seconds(self._step(shape, many), LAYER_S)
            whole_s = (many_s - few_s) / (many - FEW)
            costs[kind.value] = max(whole_s - size / read_bytes_per_s, 0.0)
            steps.append(max(few_s - FEW * whole_s, 0.0))
        return costs, statistics.mean(steps)

    def choose_s(self) -> float:
        """Return seconds of the last stage's norm and of choosing a token, apart from reading lm_head."""
        device, vocabulary = self.device.torch_device, self.shape.vocab_size
        head = Head(torch.ones(NARROW, device=device), self._weight(NARROW, NARROW), 1e-6)
        hidden, logits = self._full(1, NARROW), self._full(1, vocabulary)
        sampler = Sampler(SamplingParams(), 1, vocabulary, device)

        def choose() -> None:
            head.logits(hidden)
            sampler.choose(logits, (0,), POSITION)

        return self._seconds(choose, MATMUL_S)

    def _step(self, shape: ModelConfig, layers: int) -> Callable[[], None]:
        """Return a step of one row through so many layers of one kind; heads and state are those of the model."""
        shape = _of_layers(shape, layers)
        weights = []
        for layer in range(layers):
            shapes = layer_shapes(shape, layer).items()
            tensors = {name: self._full(*extents) for name, extents in shapes}
            # As it is loaded: `services.model.target_tensors.loaded_dtype`.
            tensors |= {name: self._full(*extents).float() for name, extents in shapes if name in ROUTERS}
            in_host = 0 if shape.experts is None or not self.in_host else shape.experts.count
            tensors = {name: tensor.cpu() if is_in_host(name, in_host) else tensor for name, tensor in tensors.items()}
            weights.append(decoder.pack(shape, layer, replace(LayerTensors.of(tensors), experts_in_host=in_host)))
        segment = Segment(
            config=shape,
            layers=LayerRange(0, layers),
            device=self.device,
            weights=tuple(weights),
            rotations=Rotation.of_all(shape.ropes, self.device.torch_device),
            capture=None,
            dtype=self.dtype,
        )
        caches = segment.allocate(POSITION + 1, 1)
        hidden = self._full(1, shape.hidden_size)

        def step() -> None:
            segment.run(hidden, [SessionRows(POSITION, len(hidden), caches, False)], None)

        return step

    def _weight(self, *extents: int) -> Weight:
        return DenseWeight(self._full(*extents)).prepared()

    def _full(self, *extents: int) -> torch.Tensor:
        tensor = torch.full(extents, 0.01, dtype=self.dtype, device=self.device.torch_device)
        # Products of equal numbers take a GPU less power, and so less time, than any real ones.
        return tensor.normal_(std=0.01) if self.device.is_gpu else tensor

    def _seconds(self, job: Callable[[], object], budget_s: float) -> float:
        """Return the median time of one run, each after a rest, within the budget.

        There are at least three runs, after two that do not count.
        """
        for _ in range(2):
            job()
        self.device.synchronize()
        times: list[float] = []
        deadline = time.perf_counter() + budget_s
        while len(times) < 3 or time.perf_counter() < deadline:
            if self.rest_s:
                time.sleep(self.rest_s)
            began = time.perf_counter()
            job()
            self.device.synchronize()
            times.append(time.perf_counter() - began)
        return statistics.median(times)


def _products(x: torch.Tensor, weights: list[Weight]) -> Callable[[], None]:
    def run() -> None:
        for weight in weights:
            weight.matmul(x)

    return run


def _of_layers(shape: ModelConfig, layers: int) -> ModelConfig:
    """Return a model of so many layers of the only kind of `shape`; of experts it has those that one row goes
    through."""
    experts = shape.experts
    if experts is not None:
        experts = replace(experts, count=experts.chosen, layers=frozenset(range(layers)))
    return replace(shape, layer_kinds=shape.layer_kinds[:1] * layers, layer_heads=None, experts=experts)


def _matrix_bytes(shape: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one layer's matrices."""
    extents = layer_shapes(_of_layers(shape, 1), 0).values()
    return sum(math.prod(extent) for extent in extents if len(extent) > 1) * dtype.itemsize
