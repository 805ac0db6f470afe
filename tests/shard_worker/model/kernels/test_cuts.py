"""How kernels are cut for a GPU: by its shared memory and registers, and as ever for those that were measured."""

from __future__ import annotations

import pytest
import torch

from shard_worker.device.devices import KernelTarget
from shard_worker.model.kernels import attention, codes, delta_prefill, experts, matmul, product_cuts
from shard_worker.weights.random_packed import random_packed
from shard_worker.weights.tiled import TiledWeight, tiling_of
from tests.shard_worker.model.kernels.compiling import TARGETS

H100 = TARGETS["sm_90"]


@pytest.mark.parametrize("dim", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("queries", [1, 6, 16, 17, 96, 384])
def test_attention_on_an_h100(dim: int, size: int, queries: int) -> None:
    """Figures and bits were measured with these tiles: keys of 32 KiB, 16 or 32 queries, four warps."""
    rows = 32 if dim <= 32 or queries > 16 else 16
    keys = {2: 128, 4: 64}[size] // (2 if dim == 256 else 1)
    stages = 1 if (dim, size) == (256, 4) else 3
    assert attention.choose(queries, dim, size, H100) == attention.Tiles(rows, keys, 4, stages)


PRODUCTS = [
    (34816, 5120, False, 128, 2, product_cuts.Config(128, 128, 1, 4, 4)),
    (14336, 5120, False, 256, 2, product_cuts.Config(256, 64, 2, 4, 4)),
    (5120, 6144, False, None, 2, product_cuts.Config(32, 256, 2, 4, 3)),
    (17408, 5120, True, None, 2, product_cuts.Config(32, 128, 1, 4, 4)),
    (5120, 17408, False, None, 2, product_cuts.Config(32, 256, 2, 4, 3)),
    (16480, 5120, False, None, 2, product_cuts.Config(128, 128, 1, 4, 4)),
    (248320, 5120, False, None, 2, product_cuts.Config(128, 128, 1, 4, 4)),
    (17408, 5120, True, None, 4, product_cuts.Config(32, 64, 1, 4, 4)),
    (384, 896, False, None, 4, product_cuts.Config(32, 128, 1, 4, 3)),
    (6144, 4096, False, 128, 2, product_cuts.Config(128, 128, 2, 4, 4)),
    (5120, 2048, False, 128, 2, product_cuts.Config(128, 128, 2, 4, 4)),
    (5120, 2880, False, 64, 2, product_cuts.Config(64, 128, 2, 4, 4)),
    (4096, 1024, False, 128, 2, product_cuts.Config(128, 128, 2, 4, 4)),
]


@pytest.mark.parametrize(("width", "depth", "paired", "dim", "size", "expected"), PRODUCTS)
def test_products_on_an_h100(
    width: int, depth: int, paired: bool, dim: int | None, size: int, expected: product_cuts.Config
) -> None:
    """The cuts that were measured, for the matrices of a 27B and one of the demo pair, and those of heads of an 8B, a
    30B-A3B, gpt-oss-20b and a 0.6B."""
    assert product_cuts.choose(width, depth, paired, dim, size, H100) == expected


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize(("width", "depth", "paired", "dim", "size"), [product[:5] for product in PRODUCTS])
def test_a_sum_has_the_same_parts_for_any_number_of_rows(
    target: KernelTarget, width: int, depth: int, paired: bool, dim: int | None, size: int
) -> None:
    """Tiles may have any shape that fits, where instructions for many rows keep the order of those for few."""
    few, *many = (
        product_cuts.choose(width, depth, paired, dim, size, target, rows) for rows in (1, 17, 64, 128, 256, 512)
    )
    for config in many:
        assert config.split == few.split
        assert config.height == 16 or not target.one_tile_height
        assert config.height <= 32 or target.tensor_engine
        if config.descriptors:
            stage = (config.height + config.width * (2 if paired else 1)) * config.depth * size
            assert config.stages >= 2
            assert config.stages * stage < target.shared_bytes


PACKED_27B = [
    (34816, 5120, True, None, "q4_k"),
    (5120, 17408, False, None, "q6_k"),
    (5120, 6144, False, None, "q4_k"),
    (1024, 5120, False, 256, "q6_k"),
    (16384, 5120, False, None, "q4_k"),
    (248320, 5120, False, None, "q6_k"),
    (5120, 2880, False, None, "nvfp4"),
    (1024, 2880, False, 64, "int4"),
    (12288, 4096, True, None, "fp8"),
    (896, 896, False, None, "int8"),
]


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize(("width", "depth", "paired", "dim", "kind"), PACKED_27B)
@pytest.mark.parametrize("size", [2, 4])
def test_packed_matrices_are_cut_alike_for_any_number_of_rows(
    target: KernelTarget, width: int, depth: int, paired: bool, dim: int | None, kind: str, size: int
) -> None:
    """In the same parts and spans; activations fit, tiles are as high as sums in one order allow, and a warp has 16 or
    32 rows of weights where threads read codes for their own lanes."""
    dtype = torch.bfloat16 if size == 2 else torch.float32
    packed = random_packed(kind, 1, depth, dtype, torch.device("cpu"))
    form = codes.form_of(TiledWeight(packed, tiling_of(packed, lane_columns=target.lane_columns)))
    assert form.chunk % form.bytes == 0
    assert depth % form.span == 0
    configs = [
        product_cuts.choose_packed(form, width, depth, paired, dim, size, target, rows)
        for rows in (1, 8, 16, 17, 64, 512)
    ]
    for config in configs:
        assert config.split == configs[0].split
        assert config.height <= 16 or not target.one_tile_height
        assert config.height <= 32 or target.tensor_engine
        assert config.depth == form.columns
        assert depth % config.depth == 0
        assert config.depth % form.span == 0
        assert not target.lane_columns or config.width in (16 * config.warps, 32 * config.warps)
        stage = config.height * config.depth * size
        assert (config.stages - 1) * stage <= target.shared_bytes // 4 or config.stages == 2
        assert stage < target.shared_bytes


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize(
    ("hidden", "inner", "count", "chosen", "kind"),
    [(2048, 768, 128, 8, "q4_k"), (2880, 2880, 32, 4, "mxfp4"), (4096, 1536, 128, 8, "fp8")],
)
@pytest.mark.parametrize("size", [2, 4])
def test_packed_experts_are_cut_alike_for_any_number_of_rows(
    target: KernelTarget, hidden: int, inner: int, count: int, chosen: int, kind: str, size: int
) -> None:
    """In the same parts, with tiles as high as those that rows are sorted into; a row alone gets enough programs."""
    dtype = torch.bfloat16 if size == 2 else torch.float32
    for first, width, depth in ((True, inner, hidden), (False, hidden, inner)):
        packed = random_packed(kind, 1, depth, dtype, torch.device("cpu"))
        form = codes.form_of(TiledWeight(packed, tiling_of(packed, lane_columns=target.lane_columns)))
        forms = [form, form]
        heights = [
            (rows, experts.tile_height(rows, chosen, count, forms, size, target)) for rows in (1, 8, 16, 17, 64, 512)
        ]
        cuts = [
            experts.choose_packed(form, width, depth, first, chosen, size, rows, height, target)
            for rows, height in heights
        ]
        for cut, (rows, height) in zip(cuts, heights, strict=True):
            assert cut.split == cuts[0].split
            assert cut.height == height or (cut.height, rows <= 8) == (8, True) or cut.height == rows == 1
            assert cut.width % matmul.SQUARES_WIDTH == 0
            assert depth % cut.depth == 0
        assert not cuts[0].serial
        assert cuts[0].split == 1 or not product_cuts.few_registers(target) or not first


def test_prefill_on_an_h100() -> None:
    """Two chunks in shared memory, eight warps for each."""
    assert delta_prefill.choose(H100) == delta_prefill.Cut(warps=8, stages=2)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("dim", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("size", [2, 4])
def test_keys_do_not_depend_on_the_number_of_queries(target: KernelTarget, dim: int, size: int) -> None:
    """A row's sums run over the same tiles of keys whatever is beside it; tiles have one height where others would be
    summed otherwise."""
    tiles = [attention.choose(queries, dim, size, target) for queries in (1, 2, 16, 17, 64, 384)]
    assert len({(tile.keys, tile.warps) for tile in tiles}) == 1
    if target.one_tile_height:
        assert {tile.queries for tile in tiles} == {16}


def test_prefill_needs_shared_memory_or_registers() -> None:
    """Kernels take prompts through recurrent layers on Hopper and CDNA, and nowhere else."""
    able = {name for name, target in TARGETS.items() if delta_prefill.choose(target) is not None}
    assert able == {"sm_90", "sm_100", "gfx908", "gfx90a", "gfx942", "gfx950"}
