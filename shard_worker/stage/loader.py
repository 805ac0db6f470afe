"""Loading a stage from a checkpoint: only its own layers, checked name by name and shape by shape."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from services.errors import FailedPrecondition, InvalidArgument
from services.freed_memory import return_freed_memory
from services.layers import LayerRange
from services.model.config import ModelConfig
from services.model.families import read_model_config
from services.model.stored_experts import experts_in_host, is_in_host
from services.model.target_tensors import (
    PER_LAYER_PROJECTION,
    PER_LAYER_PROJECTION_NORM,
    PER_LAYER_TABLE,
    TargetTensors,
    cpu_bytes,
    loaded_bytes,
    loaded_dtype,
)
from services.sizes import format_size
from shard_worker.cache.page_pool import PagePool
from shard_worker.device.devices import HOST, Device, check_room, free_bytes, has_flash_attention
from shard_worker.device.dtypes import dtype_from_name, dtype_to_name, kv_dtype_from_name
from shard_worker.model.features import Capture, fc_columns
from shard_worker.model.head import Head
from shard_worker.model.kernel_support import can_prefill, can_prefill_experts, can_run_model, check_float8
from shard_worker.model.layer_weights import DecoderWeights, LayerTensors, LoadedWhenAsked, norm_factor
from shard_worker.model.layers import decoder
from shard_worker.model.per_layer import PerLayerInputs
from shard_worker.model.rows import PLAIN, RowOperations
from shard_worker.model.synthetic_acceptance import read_synthetic_acceptance
from shard_worker.ops.attention import attend_with_sinks, flash_with_sinks
from shard_worker.ops.rope import Rotation
from shard_worker.stage.batch_runner import BatchRunner
from shard_worker.stage.segment import Segment
from shard_worker.stage.stage import LayerBytes, Stage
from shard_worker.stage.step_runner import make_runner
from shard_worker.weights.checkpoint import Checkpoint, MappedRows
from shard_worker.weights.packed import PackedWeight
from shard_worker.weights.scaled_rows import scaled_rows
from shard_worker.weights.tiled import TiledWeight
from shard_worker.weights.unread import in_memory
from shard_worker.weights.weight import DenseWeight, RowLookup, Weight

Progress = Callable[[int, int], None]
"""Called with bytes loaded so far and bytes in all."""

T = TypeVar("T")

_RETURNED_EVERY = 1 << 28
"""Each time so many bytes of the checkpoint are loaded, memory that was freed on the way goes back to the system."""


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """What a draft wants of the target.

    layers: the 0-based blocks whose output it reads, in its own order. fc: its matrix [draft hidden, N * hidden] over
    those N blocks, or None for the blocks' outputs as they are.
    """

    layers: tuple[int, ...]
    fc: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """Weights that are in a worker's memory already, of another stage of the same checkpoint in the same element types.

    layers: a layer's weights and their bytes, by its index and the segment's device. embedding: None where there is
    none, and where it is lm_head too. head: None where there is none.
    """

    layers: Mapping[tuple[int, torch.device], tuple[DecoderWeights, LayerBytes]] = field(default_factory=dict)
    embedding: RowLookup | None = None
    head: Head | None = None

    @classmethod
    def of(cls, stage: Stage, wanted: LayerRange) -> HeldWeights:
        """Return what a stage has of these layers and of the ends that belong to them; the rest of it may go."""
        layers = {}
        sizes = iter(stage.layer_bytes)
        for segment in stage.segments:
            for layer, weights in enumerate(segment.weights, segment.layers.first):
                size = next(sizes)
                if layer in wanted:
                    layers[layer, segment.device.torch_device] = weights, size
        tied, last = stage.config.tied_head, wanted.last == stage.config.num_layers
        embedding = stage.embedding if wanted.first == 0 and not tied else None
        # Tied ends are one matrix, of which who has both keeps one form: see `StageLoader.load`.
        return cls(layers, embedding, stage.head if last and not (tied and wanted.first == 0) else None)

    def has_products_of(self, stage: Stage) -> bool:
        """Return whether all matrices that a stage multiplies with are these."""
        return (stage.head is None or stage.head is self.head) and all(
            segment.per_layer is None and (layer, segment.device.torch_device) in self.layers
            for segment in stage.segments
            for layer in range(segment.layers.first, segment.layers.last)
        )


NOTHING_HELD = HeldWeights()


class StageLoader:
    """Reads one stage.

    config: the whole target's. dtype: that of matrices and activations. total_bytes: how much will be read, known
    before anything is loaded.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        layers: LayerRange,
        dtype: str | None,
        kv_dtype: str | None = None,
        host_experts: float = 0.0,
    ) -> None:
        """Check that the checkpoint has what the stage needs.

        dtype: the name of an element type, None for the checkpoint's own. kv_dtype: that of attention keys and values,
        None for the weights'. host_experts: the share of each layer's routed experts that a GPU leaves to the host's
        memory and CPU; where the stage's device is the CPU, all of them are there anyway.

        Raises InvalidArgument for layers that the model doesn't have, for missing, unknown or mis-shaped tensors, and
        for a share of experts of a model without any, Unimplemented for an unknown family.
        """
        self._checkpoint, self._layers, self._host_experts = checkpoint, layers, host_experts
        self.config = read_model_config(checkpoint.config)
        if host_experts and self.config.experts is None:
            raise InvalidArgument(
                f"--expert-devices would have {host_experts:g} of the experts in the host's memory, and this "
                f"{self.config.family} has none: leave it out, or name a mixture of experts",
                field="--expert-devices",
            )
        if layers.last > self.config.num_layers:
            raise InvalidArgument(
                f"layers {layers} do not exist: the model has {self.config.num_layers} layers",
                field="layers",
            )
        if layers.first and layers.first > self.config.last_cut:
            raise InvalidArgument(
                f"layers {layers} read keys and values of layers before them: begin them with layer "
                f"{self.config.last_cut} or one before it",
                field="layers",
            )
        tensors = TargetTensors(self.config, checkpoint.headers, checkpoint.directory)
        self._layer_names = {layer: tensors.layer(layer) for layer in range(layers.first, layers.last)}
        if self.is_first:
            tensors.check_first()
        if self.is_last:
            tensors.check_last()
        self._per_layer_names = tensors.per_layer()
        self._tensors = tensors
        self.dtype = dtype_from_name(tensors.dtype(layers.first) if dtype is None else dtype, "--dtype")
        self._kv_dtype = kv_dtype_from_name(kv_dtype)
        self.total_bytes = sum(checkpoint.size_bytes(name) for name in self._all_names())

    @property
    def is_first(self) -> bool:
        """Whether the stage begins with the embedding."""
        return self._layers.first == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage ends with lm_head."""
        return self._layers.last == self.config.num_layers

    def load(
        self,
        devices: Sequence[Device],
        capture: CaptureRequest | None,
        on_progress: Progress,
        *,
        graphs: bool = True,
        pools: Mapping[Device, PagePool] | None = None,
        held: HeldWeights = NOTHING_HELD,
    ) -> Stage:
        """Return the stage, its layers spread evenly over the devices in order.

        capture: what a draft wants, None without one. on_progress: called after every tensor. graphs: whether steps may
        run as CUDA graphs. pools: where each device's pages come from, None for pools without a bound. held: what is
        taken where it is on the right device, and not loaded again.

        Raises FailedPrecondition for a device that cannot keep keys and values in the element type asked for, for one
        whose limit has no room for its weights, and for a host that has none for experts beside its GPUs.
        """
        if self._kv_dtype is not None:
            for device in devices:
                check_float8(device, kernels=can_run_model(device, self.config))
        for device, needed in self._bytes_of(devices, held).items():
            check_room(device, needed, f"the weights of layers {self._layers}")
        self._check_host(devices, held)
        reader = _Reader(self._checkpoint, self._dtype_of, self.total_bytes, on_progress)
        threads = _Threads(
            by_cpu=self._host_experts > 0 or any(device.torch_device.type == "cpu" for device in devices)
        )

        def load_layer(device: torch.device, in_host: int, layer: int) -> tuple[DecoderWeights, LayerBytes]:
            names, later = self._layer_names[layer], self._layer_names.get(layer + threads.count)
            if later is not None and (layer + threads.count, device) not in held.layers:
                self._checkpoint.read_ahead(later.values())
            if (layer, device) in held.layers:
                weights, size = held.layers[layer, device]
                reader.count(size.device, *names.values(), host_bytes=size.host)
                return weights, size
            sizes = {False: 0, True: 0}

            def place(short: str) -> torch.device:
                return HOST.torch_device if is_in_host(short, in_host) else device

            def matrix(short: str) -> Weight:
                weight = reader.matrix(names[short], place(short), in_host=is_in_host(short, in_host))
                sizes[is_in_host(short, in_host)] += weight.nbytes
                return weight

            def vector(short: str) -> torch.Tensor:
                tensor = reader.vector(names[short], place(short), in_host=is_in_host(short, in_host))
                sizes[is_in_host(short, in_host)] += tensor.nbytes
                return tensor

            matrices = {short for short, name in names.items() if len(self._checkpoint.shape(name)) == 2}
            vectors = names.keys() - matrices
            tensors = LayerTensors(LoadedWhenAsked(matrices, matrix), LoadedWhenAsked(vectors, vector), in_host)
            return decoder.pack(self.config, layer, tensors), LayerBytes(sizes[False], sizes[True])

        segments: tuple[Segment, ...] = ()
        layer_bytes: list[LayerBytes] = []
        with threads:
            # They begin first: no layer takes as long as a large vocabulary.
            loaded_ends = threads.start(functools.partial(self._load_ends, reader, devices, held))
            for layers, device in _spread(self._layers, devices, self.config.last_cut):
                load = functools.partial(load_layer, device.torch_device, self._experts_in_host(device))
                started = [threads.start(functools.partial(load, layer)) for layer in range(layers.first, layers.last)]
                loaded = [one.result() for one in started]
                layer_bytes += [size for _, size in loaded]
                pool = (pools or {}).get(device, PagePool())
                segment = self._segment(layers, device, capture, tuple(weights for weights, _ in loaded))
                segments += (replace(segment, pool=pool),)
            embedding, head = loaded_ends.result()
        if self._per_layer_names:
            first, *others = segments
            given = [(first, embedding), *((one, None) for one in others)]
            segments = tuple(replace(one, per_layer=self._per_layer(one, rows)) for one, rows in given)
            reader.resident += sum(one.per_layer.projection.nbytes for one in segments if one.per_layer is not None)
        ends = [
            (segment, embedding if segment is segments[0] else None, head if segment is segments[-1] else None)
            for segment in segments
        ]
        runners = tuple(make_runner(*end, graphs=graphs) for end in ends)
        return Stage(
            config=self.config,
            layers=self._layers,
            segments=segments,
            embedding=embedding,
            head=head,
            dtype=self.dtype,
            weight_bytes=reader.resident,
            layer_bytes=tuple(layer_bytes),
            host_weight_bytes=reader.host_resident,
            captures=capture.layers if capture is not None else (),
            summed=capture is not None and capture.fc is not None,
            runners=runners,
            batch_runners=tuple(BatchRunner(*end, graphs=graphs) for end in ends) if all(runners) else (),
        )

    def _load_ends(
        self, reader: _Reader, devices: Sequence[Device], held: HeldWeights
    ) -> tuple[RowLookup | None, Head | None]:
        """Return the embedding of a stage that is the first, and the head of one that is the last."""
        embedding: RowLookup | None = None
        tied: Weight | None = None
        if self.is_first and held.embedding is not None and _is_on(held.embedding, devices[0]):
            embedding = held.embedding
            reader.count(embedding.nbytes)
        elif self.is_first:
            matrix = reader.matrix(self._tensors.embedding, devices[0].torch_device)
            if self.is_last and self.config.tied_head and held.head is None and _is_on(matrix, devices[-1]):
                tied = matrix
            else:
                embedding = self._embedding(in_memory(matrix))
        if not self.is_last:
            return embedding, None
        if held.head is not None and _is_on(held.head.weight, devices[-1]):
            reader.count(held.head.norm.nbytes + held.head.weight.nbytes)
            return embedding, held.head
        last = devices[-1].torch_device
        weight = (tied or reader.matrix(self._tensors.head, last)).prepared()
        norm = norm_factor(self.config, reader.vector(self._tensors.norm, last))
        synthetic = read_synthetic_acceptance(self._checkpoint.config, self.config.vocab_size, last)
        if tied is not None:
            # Not both in memory: rows are looked up in what the head has, or in the mapped file.
            in_order = isinstance(weight, DenseWeight | PackedWeight | TiledWeight)
            embedding = self._embedding(weight if in_order else MappedRows(self._checkpoint, self._tensors.embedding))
        return embedding, Head(norm, weight, self.config.norm_eps, synthetic, self.config.logit_cap)

    def _per_layer(self, segment: Segment, embedding: RowLookup | None) -> PerLayerInputs:
        """Return what makes the inputs of a segment's layers. embedding: the model's where it is in memory there.

        The table and, behind the first layers, the embedding stay in the mapped file: a step reads its tokens' rows.
        """
        config, names, device = self.config, self._per_layer_names, segment.device.torch_device
        assert config.per_layer is not None
        size, layers = config.per_layer.size, segment.layers
        columns = slice(layers.first * size, layers.last * size)
        projection = self._checkpoint.weight(names[PER_LAYER_PROJECTION], device, self.dtype).select_rows(columns)
        norm = self._checkpoint.place(names[PER_LAYER_PROJECTION_NORM], device, torch.float32)
        table = MappedRows(self._checkpoint, names[PER_LAYER_TABLE])
        return PerLayerInputs(
            embedding=embedding or self._embedding(MappedRows(self._checkpoint, self._tensors.embedding)),
            table=scaled_rows(table, size**0.5, self.dtype),
            columns=columns,
            projection=projection.prepared(),
            scale=config.hidden_size**-0.5,
            norm=norm_factor(config, norm),
            eps=config.norm_eps,
        )

    def _embedding(self, matrix: RowLookup) -> RowLookup:
        return scaled_rows(matrix, self.config.embedding_scale, self.dtype)

    def _dtype_of(self, name: str) -> torch.dtype:
        """Return the element type that a tensor is loaded in, or takes activations of where it is packed."""
        return dtype_from_name(loaded_dtype(name, self._checkpoint.headers[name], dtype_to_name(self.dtype)))

    def _segment(
        self,
        layers: LayerRange,
        device: Device,
        capture: CaptureRequest | None,
        weights: tuple[DecoderWeights, ...],
    ) -> Segment:
        return Segment(
            config=self.config,
            layers=layers,
            device=device,
            weights=weights,
            rotations=Rotation.of_all(self.config.ropes, device.torch_device),
            capture=self._capture(layers, device, capture),
            dtype=self.dtype,
            operations=row_operations(device, self.config, weights, self.dtype),
            kv_dtype=self._kv_dtype,
        )

    def _capture(self, layers: LayerRange, device: Device, request: CaptureRequest | None) -> Capture | None:
        if request is None:
            return None
        indices = {layer: request.layers.index(layer) for layer in sorted(request.layers) if layer in layers}
        if not indices:
            return None
        fc = None
        if request.fc is not None:
            columns = fc_columns(request.fc, indices, self.config.hidden_size)
            fc = DenseWeight(columns.to(device.torch_device, self.dtype)).prepared()
        return Capture(indices, fc)

    def _bytes_of(self, devices: Sequence[Device], held: HeldWeights) -> dict[Device, int]:
        """Return the bytes of weights that each device is to load."""
        dtype = dtype_to_name(self.dtype)

        def size(device: Device, *names: str) -> int:
            bytes_of = cpu_bytes if device.torch_device.type == "cpu" else loaded_bytes
            return sum(bytes_of(name, self._checkpoint.headers[name], dtype) for name in names)

        found = dict.fromkeys(devices, 0)
        for layers, device in _spread(self._layers, devices, self.config.last_cut):
            for layer in range(layers.first, layers.last):
                if (layer, device.torch_device) not in held.layers:
                    names, in_host = self._layer_names[layer], self._experts_in_host(device)
                    found[device] += size(device, *(name for name in names.values() if not is_in_host(name, in_host)))
        if self.is_first and (held.embedding is None or not _is_on(held.embedding, devices[0])):
            found[devices[0]] += size(devices[0], self._tensors.embedding)
        if self.is_last and (held.head is None or not _is_on(held.head.weight, devices[-1])):
            shared = self.is_first and self.config.tied_head and devices[0] == devices[-1]
            found[devices[-1]] += size(devices[-1], self._tensors.norm, *([] if shared else [self._tensors.head]))
        return found

    def _check_host(self, devices: Sequence[Device], held: HeldWeights) -> None:
        """Check that the host has room for the experts that its GPUs leave to it, as `load` says."""
        dtype, needed = dtype_to_name(self.dtype), 0
        for layers, device in _spread(self._layers, devices, self.config.last_cut):
            in_host = self._experts_in_host(device)
            for layer in range(layers.first, layers.last) if in_host else ():
                if (layer, device.torch_device) not in held.layers:
                    names = (name for name in self._layer_names[layer].values() if is_in_host(name, in_host))
                    needed += sum(cpu_bytes(name, self._checkpoint.headers[name], dtype) for name in names)
        free = free_bytes(HOST)[0] if needed else 0
        if needed > free:
            raise FailedPrecondition(
                f"--expert-devices leaves {format_size(needed)} of experts of layers {self._layers} to the host, which "
                f"has {format_size(free)} free: give the host a smaller share or this stage fewer layers, or pack "
                "matrices with --quantize",
                reason="DOES_NOT_FIT",
                field="--expert-devices",
            )

    def _experts_in_host(self, device: Device) -> int:
        """Return how many experts of each layer on a device are in the host's memory beside it."""
        experts = self.config.experts
        return experts_in_host(experts.count, self._host_experts) if device.is_gpu and experts is not None else 0

    def _all_names(self) -> list[str]:
        names = [name for named in self._layer_names.values() for name in named.values()]
        if self.is_first:
            names.append(self._tensors.embedding)
        if self.is_last:
            names.append(self._tensors.norm)
            if not (self.is_first and self.config.tied_head):
                names.append(self._tensors.head)
        return names


class _Reader:
    """Loads tensors of a checkpoint and counts them, on any number of threads.

    resident: bytes that they take on the stage's devices. host_resident: those of experts beside a GPU.
    """

    def __init__(
        self, checkpoint: Checkpoint, dtype_of: Callable[[str], torch.dtype], total_bytes: int, on_progress: Progress
    ) -> None:
        """dtype_of: returns what a tensor is loaded in. total_bytes: of all that will be read."""
        self._checkpoint, self._dtype_of = checkpoint, dtype_of
        self._total_bytes, self._on_progress = total_bytes, on_progress
        self._lock, self._loaded = threading.Lock(), 0
        self.resident = self.host_resident = 0

    def vector(self, name: str, device: torch.device, *, in_host: bool = False) -> torch.Tensor:
        """Return a tensor that is no matrix. in_host: whether it is an expert's in the host's memory beside a GPU."""
        tensor = self._checkpoint.place(name, device, self._dtype_of(name))
        self._count_one(name, tensor.nbytes, in_host=in_host)
        return tensor

    def matrix(self, name: str, device: torch.device, *, in_host: bool = False) -> Weight:
        """Return a matrix, dense or packed. in_host: as of `vector`."""
        weight = self._checkpoint.weight(name, device, self._dtype_of(name))
        self._count_one(name, weight.nbytes, in_host=in_host)
        return weight

    def _count_one(self, name: str, nbytes: int, *, in_host: bool) -> None:
        self.count(0 if in_host else nbytes, name, host_bytes=nbytes if in_host else 0)

    def count(self, nbytes: int, *names: str, host_bytes: int = 0) -> None:
        """Count tensors that are loaded. nbytes, host_bytes: what they take, as of `resident` and `host_resident`."""
        with self._lock:
            self.resident += nbytes
            self.host_resident += host_bytes
            before = self._loaded
            self._loaded += sum(self._checkpoint.size_bytes(name) for name in names)
            self._on_progress(self._loaded, self._total_bytes)
            is_time = self._loaded // _RETURNED_EVERY > before // _RETURNED_EVERY
        if is_time:
            return_freed_memory()


class _Threads:
    """Loads parts of a stage, several at a time where a CPU is to multiply by matrices of it.

    These are as many as it has threads, and each is loaded by one: bringing many small matrices to another form, one
    after the other, keeps several threads waiting for each other. A context manager: behind it none is at work. count:
    how many parts are loaded at a time.
    """

    def __init__(self, *, by_cpu: bool) -> None:
        self.count = torch.get_num_threads() if by_cpu else 1
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> _Threads:
        if self.count > 1:
            self._pool = ThreadPoolExecutor(self.count, "loading", torch.set_num_threads, (1,))
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            # Torch keeps the last number that any thread was given for threads to come.
            torch.set_num_threads(self.count)

    def start(self, load: Callable[[], T]) -> Future[T]:
        """Have a part loaded, which is over on return where there is one thread.

        What it raises, this or the result does.
        """
        if self._pool is not None:
            return self._pool.submit(load)
        done: Future[T] = Future()
        done.set_result(load())
        return done


def row_operations(
    device: Device, config: ModelConfig, layers: Sequence[DecoderWeights], dtype: torch.dtype
) -> RowOperations:
    """Return what suits a device, the layers that it has and the type that is computed in: kernels where they run,
    plain torch elsewhere."""
    if not can_run_model(device, config):
        return PLAIN
    # Only where kernels can run is Triton installed.
    from shard_worker.model.kernels import delta_prefill, elementwise, expert_prefill, heads

    widest = max((shape.head_dim for shape in config.attention_shapes.values()), default=0)
    return RowOperations(
        rms_norm=elementwise.rms_norm,
        swiglu=elementwise.swiglu,
        geglu=elementwise.geglu,
        recurrent_prefill=delta_prefill.run_layer if can_prefill(device, config) else None,
        mixture=expert_prefill.run if can_prefill_experts(device, layers) else None,
        session_pages=heads.session_pages,
        finished_heads=heads.finish_rows,
        attend_with_sinks=flash_with_sinks if has_flash_attention(device, dtype, widest) else attend_with_sinks,
    )


def _is_on(matrix: RowLookup, device: Device) -> bool:
    return matrix.device == device.torch_device


def _spread(layers: LayerRange, devices: Sequence[Device], last_cut: int) -> list[tuple[LayerRange, Device]]:
    """The layers of each device, in order. last_cut: as of `LayerRange.spread`."""
    if layers.most_parts(last_cut) < len(devices):
        shared = f", of which those from {last_cut} on share keys and values," if last_cut < layers.last - 1 else ""
        raise InvalidArgument(
            f"{len(layers)} layers{shared} cannot be spread over {len(devices)} devices: name fewer devices or give "
            "this stage more layers",
            field="layers",
        )
    return list(zip(layers.spread(len(devices), last_cut), devices, strict=True))
