"""How long the products of a step take with packed matrices, beside dense ones and what reading their bytes takes.

All matrices of a model's shape are in memory, random, and multiplied one behind the other as a step does: in a CUDA
graph, with norms, SwiGLU and residuals, without attention. `python -m shard_worker.measure.products` is run by
`flashsplit bench products`; it needs a GPU and prints a line of JSON for each number of rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import torch

from shard_worker.device.graph_capture import capture_graph
from shard_worker.weights.packed import PackedWeight
from shard_worker.weights.random_packed import KINDS, random_packed
from shard_worker.weights.tiled import TiledWeight
from shard_worker.weights.weight import DenseWeight, Weight, concatenate

if TYPE_CHECKING:
    from shard_worker.model.kernels.matmul import Normed
    from shard_worker.model.kernels.product_cuts import Config

EPS = 1e-6
REPEATS = 20


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix that a model has `count` times. paired: the halves of its rows are gates and ups. added: its product is
    added to the residual, and a norm follows; otherwise a norm comes before."""

    name: str
    rows: int
    columns: int
    count: int
    paired: bool = False
    added: bool = False


SHAPES: dict[str, tuple[Matrix, ...]] = {
    "qwen3-8b": (
        Matrix("qkv", 6144, 4096, 36),
        Matrix("out", 4096, 4096, 36, added=True),
        Matrix("gate_up", 24576, 4096, 36, paired=True),
        Matrix("down", 4096, 12288, 36, added=True),
        Matrix("head", 151936, 4096, 1),
    ),
    "qwen3.6-27b": (
        Matrix("projection", 16384, 5120, 48),
        Matrix("qkv", 14336, 5120, 16),
        Matrix("out", 5120, 6144, 64, added=True),
        Matrix("gate_up", 34816, 5120, 64, paired=True),
        Matrix("down", 5120, 17408, 64, added=True),
        Matrix("head", 248320, 5120, 1),
    ),
}
"""The large matrices of published models."""

Q4_K_M = "q4_k_m"
"""The mix of files of that name: Q6_K for the head, half of `down` and half of the values, else Q4_K."""

VALUE_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Figures:
    """Milliseconds of all products for so many rows. floor_ms: of reading the packed matrices once."""

    rows: int
    packed_ms: float
    dense_ms: float | None
    floor_ms: float
    packed_bytes: int


@dataclass(frozen=True, slots=True)
class Part:
    """The figures of the products with one kind of matrix, and what is read a second."""

    name: str
    rows: int
    ms: float
    gb_per_s: float


class Products:
    """The matrices of a shape in memory, and the products with them."""

    def __init__(self, shape: str, packing: str | None, device: torch.device, dtype: torch.dtype) -> None:
        """packing: of KINDS, or `Q4_K_M`; None for dense matrices."""
        self._device, self._dtype = device, dtype
        self._weights = [
            (matrix, self._prepared(self._weight(matrix, packing, number)))
            for matrix in SHAPES[shape]
            for number in range(matrix.count)
        ]

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for _, weight in self._weights)

    def _prepared(self, weight: Weight) -> Weight:
        """The form that kernels multiply by; they run on GPUs alone."""
        return weight if self._device.type == "cpu" else weight.prepared()

    def _weight(self, matrix: Matrix, packing: str | None, number: int) -> Weight:
        rows, columns = matrix.rows, matrix.columns
        if packing is None:
            made = torch.empty(rows, columns, dtype=self._dtype, device=self._device)
            return DenseWeight(made.normal_(std=0.02))
        if packing != Q4_K_M:
            return self._packed(packing, rows, columns)
        if matrix.name == "qkv" and number % 2:
            first = self._packed("q4_k", rows - VALUE_ROWS, columns)
            return concatenate([first, self._packed("q6_k", VALUE_ROWS, columns)])
        wide = matrix.name == "head" or (matrix.name == "down" and number % 2)
        return self._packed("q6_k" if wide else "q4_k", rows, columns)

    def _packed(self, kind: str, rows: int, columns: int) -> PackedWeight:
        return random_packed(kind, rows, columns, self._dtype, self._device)

    def parts(self, rows: int) -> Iterator[Part]:
        """Measure the products with each kind of matrix by itself."""
        for matrix, same in itertools.groupby(self._weights, lambda pair: pair[0]):
            weights = [weight for _, weight in same]
            seconds = self._seconds(self._job(rows, [(matrix, weight) for weight in weights]))
            yield Part(matrix.name, rows, seconds * 1e3, sum(weight.nbytes for weight in weights) / seconds / 1e9)

    def seconds(self, rows: int) -> float:
        """Measure all products, layer by layer."""
        return self._seconds(self._job(rows, self.layer_by_layer()))

    def layer_by_layer(self) -> list[tuple[Matrix, Weight]]:
        """Return all matrices in the order of layers, each kind spread evenly over them, and the head last."""
        numbered = [
            (number / matrix.count if matrix.count > 1 else 1.0, matrix, weight)
            for matrix, same in itertools.groupby(self._weights, lambda pair: pair[0])
            for number, (_, weight) in enumerate(same)
        ]
        return [(matrix, weight) for _, matrix, weight in sorted(numbered, key=lambda place: place[0])]

    def cuts(self, name: str, rows: int) -> list[tuple[float, Config]]:
        """Measure the products with one kind of matrix for many ways to cut them; return the fastest first."""
        from shard_worker.model.kernels.product_cuts import Config

        chosen = [pair for pair in self._weights if pair[0].name == name]
        chosen = [pair for pair in chosen if type(pair[1]) is type(chosen[0][1])]
        weight = chosen[0][1]
        assert isinstance(weight, TiledWeight)
        heights = [height for height in (8, 16, 32, 64, 128) if rows <= height <= max(16, 2 * rows)] or [64, 128]
        found = []
        for (width, warps), split, stages, height in itertools.product(
            ((16, 1), (32, 2), (64, 2), (64, 4), (128, 4), (128, 8)), (1, 2, 3, 4, 6, 8), (2, 3), heights
        ):
            depth = weight.tiling.columns
            config = Config(width, depth, split, warps, stages, height, serial=split > 1 and rows > 64)
            try:
                found.append((self._seconds(self._job(rows, chosen, config), 5), config))
            except Exception as error:
                print(f"{config}: {error}"[:200], flush=True)
        return sorted(found, key=lambda pair: pair[0])

    def _job(
        self, rows: int, weights: Sequence[tuple[Matrix, Weight]], config: Config | None = None
    ) -> Callable[[], None]:
        from shard_worker.model.kernels.codes import group_sums
        from shard_worker.model.kernels.matmul import SQUARES_WIDTH, Summed, begin, linear

        def summed(x: torch.Tensor) -> torch.Tensor:
            return group_sums(x, SQUARES_WIDTH)

        plain = {columns: self._random(rows, columns) for columns in {weight.columns for _, weight in weights}}
        norms = {count: torch.ones(count, device=self._device) for count in {*plain, *(w.rows for _, w in weights)}}
        normed: dict[int, Normed] = {columns: begin(x, norms[columns], EPS) for columns, x in plain.items()}
        normed = {columns: replace(x, sums=summed(x.scaled)) for columns, x in normed.items()}
        gated = {columns: Summed(x, summed(x)) for columns, x in plain.items()}
        following = [*(weight for _, weight in weights[1:]), None]

        def run() -> None:
            for (matrix, weight), then in zip(weights, following, strict=True):
                if matrix.added:
                    residual, norm = plain.get(weight.rows), norms[weight.rows]
                    linear(
                        gated[weight.columns], weight, residual=residual, norm=norm, eps=EPS, then=then, config=config
                    )
                else:
                    next_gated = then if matrix.paired else None
                    x = normed[weight.columns]
                    linear(x, weight, paired=matrix.paired, then=next_gated, config=config)

        return run

    def _random(self, rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, dtype=self._dtype, device=self._device)

    def _seconds(self, job: Callable[[], None], repeats: int = REPEATS) -> float:
        """Return the median time of a job as a CUDA graph, which is compiled and run a few times before."""
        job()
        graph, _ = capture_graph(job)
        for _ in range(3):
            graph.replay()
        return _median_s(graph.replay, repeats)


def read_bandwidth(device: torch.device) -> float:
    """Return how many bytes a second a large copy reads and writes."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * len(source) / _median_s(lambda: target.copy_(source), 10)


def _median_s(job: Callable[[], object], repeats: int) -> float:
    """Return the median time of what a job makes the GPU do, in seconds."""
    times = []
    for _ in range(repeats):
        began, ended = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        began.record()
        job()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / 1e3)
    return statistics.median(times)


def main() -> None:
    """Print a line of JSON for each number of rows, and what else is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--packing", choices=[*KINDS, Q4_K_M], default=Q4_K_M)
    parser.add_argument("--rows", default="1,16,64,256,512")
    parser.add_argument("--bandwidth", type=float, help="GB/s that the floor is counted with; else that of a copy")
    parser.add_argument("--no-dense", action="store_true", help="leave out dense matrices, which may not fit")
    parser.add_argument("--each", action="store_true", help="also measure each kind of matrix by itself")
    parser.add_argument("--cuts", metavar="NAME", help="measure ways to cut the products with one kind of matrix")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "there is no GPU that torch can use\n")
    device, dtype = torch.device("cuda"), torch.bfloat16
    counts = [int(count) for count in arguments.rows.split(",")]
    bandwidth = arguments.bandwidth * 1e9 if arguments.bandwidth else read_bandwidth(device)
    packed = Products(arguments.shape, arguments.packing, device, dtype)
    with torch.inference_mode():
        if arguments.cuts:
            for count in counts:
                for seconds, config in packed.cuts(arguments.cuts, count)[:8]:
                    print(json.dumps({"rows": count, "ms": seconds * 1e3, "config": config._asdict()}), flush=True)
            return
        packed_s = {count: packed.seconds(count) for count in counts}
        if arguments.each:
            for count in counts:
                for part in packed.parts(count):
                    print(json.dumps(asdict(part)), flush=True)
        size = packed.nbytes
        del packed
        torch.cuda.empty_cache()
        dense = None if arguments.no_dense else Products(arguments.shape, None, device, dtype)
        for count in counts:
            dense_ms = None if dense is None else dense.seconds(count) * 1e3
            figures = Figures(count, packed_s[count] * 1e3, dense_ms, size / bandwidth * 1e3, size)
            print(json.dumps(asdict(figures)), flush=True)


if __name__ == "__main__":
    main()
