"""Mixtures of experts against transformers: those of all families, and what a router may do at its worst."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from services.errors import FailedPrecondition, InvalidArgument
from services.model.families import read_model_config
from services.model.layers.experts import tensor_shapes
from services.model.quantization import Quantization, QuantizedTo
from shard_worker.model.layer_weights import ExpertsWeights, LayerTensors
from shard_worker.model.layers import experts
from shard_worker.model.rows import Rows
from shard_worker.weights.packed import PackedWeight
from shard_worker.weights.random_packed import random_packed
from shard_worker.weights.tiled import TiledWeight, tiling_of
from shard_worker.weights.weight import DenseWeight, Weight
from tests.combinations import others_slow
from tests.reference import storage, target
from tests.shard_worker.model.layers import family_runner
from tests.shard_worker.tiny import (
    AS_GPU,
    GLM4_MOE,
    GPT_OSS,
    HYBRID_EXPERTS,
    LAGUNA,
    QWEN3_MOE,
    Run,
    Tiny,
    ids,
    load_stage,
    unsplit,
)

ROUTER = "mlp.gate.weight"


STEPS = [(family_runner.check_steps, name) for name in (*QWEN3_MOE, *HYBRID_EXPERTS, *GLM4_MOE)]
OTHERS = [(family_runner.check_commits, "qwen3_5_moe-tied"), (family_runner.check_chunks, "qwen3_moe")]


@pytest.mark.parametrize(("check", "name"), [*STEPS, *OTHERS])
def test_logits_are_those_of_transformers(tiny: Tiny, name: str, check: Callable[[Tiny, str], None]) -> None:
    """Shares that are made to sum up to 1 and others, dense layers between, all experts chosen, windows;
    shared experts, experts in one tensor together, and projections grouped by key head."""
    check(tiny, name)


def test_all_rows_may_go_to_the_same_experts(tiny: Tiny, tmp_path: Path) -> None:
    """A router of which some rows are far larger: the other experts are not used by anyone."""
    path = Path(shutil.copytree(tiny.path("qwen3_moe"), tmp_path / "lopsided"))

    def lopsided(tensors: dict[str, torch.Tensor]) -> None:
        # The stream of these tokens has a mean that all rows share.
        for name in [name for name in tensors if name.endswith(ROUTER)]:
            tensors[name][3:] = tensors[name][3:] * 1e-3
            tensors[name][:3] = tensors[name][:3] * 30

    storage.edit_tensors(path, lopsided)
    tokens = [7] * 12
    torch.testing.assert_close(
        unsplit(path)(tokens), target.logits(target.load(path), tokens), **family_runner.TOLERANCE
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_keeps_its_bits_whatever_stands_beside_it(tiny: Tiny, dtype: str) -> None:
    """Its parts are summed up by the numbers of the experts, and products are those of a fixed number of rows."""
    [layer] = load_stage(tiny.path("qwen3_moe"), (0, 1), dtype=dtype).segments[0].weights
    assert isinstance(layer.mlp, ExpertsWeights)
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(2)).to(getattr(torch, dtype))
    rows = Rows((), {}, batch_invariant_rows=16)

    together = experts.run(layer.mlp, x, rows)

    assert torch.equal(torch.cat([experts.run(layer.mlp, row[None], rows) for row in x]), together)
    assert torch.equal(experts.run(layer.mlp, x.flip(0), rows).flip(0), together)


IN_HOST = [*QWEN3_MOE, *HYBRID_EXPERTS, *GLM4_MOE, *GPT_OSS, *LAGUNA, "gemma4-experts"]


@pytest.mark.parametrize(
    ("name", "share"),
    others_slow(product(IN_HOST, (0.3, 1.0)), ((name, (0.3, 1.0)[number % 2]) for number, name in enumerate(IN_HOST))),
)
def test_experts_in_the_hosts_memory_give_the_same_bits(tiny: Tiny, name: str, share: float) -> None:
    """Some of them or all, of every family, where all products are a CPU's: chunks of a prompt, and rows that are
    verified."""
    stage = load_stage(tiny.path(name), devices=[AS_GPU], host_experts=share)
    everywhere, apart = unsplit(tiny.path(name)), Run([stage])

    for tokens in (ids(20), ids(1, seed=1), ids(7, seed=2)):
        assert torch.equal(apart(tokens), everywhere(tokens))
    assert torch.equal(apart.verify(ids(5, seed=4)), everywhere.verify(ids(5, seed=4)))
    assert stage.host_weight_bytes > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("packed", [None, QuantizedTo.INT4, QuantizedTo.FP8])
def test_a_row_keeps_its_bits_between_device_and_host(tiny: Tiny, dtype: str, packed: QuantizedTo | None) -> None:
    """Whatever stands beside it, and whichever experts are where."""
    quantization = None if packed is None else Quantization(packed)
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(2)).to(getattr(torch, dtype))
    rows = Rows((), {}, batch_invariant_rows=16)
    outcomes = []
    for share in (0.0, 0.5, 1.0):
        stage = load_stage(
            tiny.path("qwen3_moe"),
            (0, 1),
            devices=[AS_GPU],
            dtype=dtype,
            quantization=quantization,
            host_experts=share,
        )
        [layer] = stage.segments[0].weights
        assert isinstance(layer.mlp, ExpertsWeights)
        assert layer.mlp.in_host == round(share * len(layer.mlp.experts))
        together = experts.run(layer.mlp, x, rows)
        assert torch.equal(torch.cat([experts.run(layer.mlp, row[None], rows) for row in x]), together)
        outcomes.append(together)

    assert torch.equal(outcomes[1], outcomes[0])
    assert torch.equal(outcomes[2], outcomes[0])


def test_only_the_experts_that_rows_go_through_are_read(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those in the host's memory as of others."""
    [layer] = load_stage(tiny.path("qwen3_moe"), (0, 1), devices=[AS_GPU], host_experts=1.0).segments[0].weights
    assert isinstance(layer.mlp, ExpertsWeights)
    read: list[Weight] = []
    kinds = {type(matrix) for expert in layer.mlp.experts for matrix in (expert.gate_up, expert.down)}
    for kind in kinds:
        multiply = kind.matmul

        def matmul(self: Weight, *arguments: Any, multiply: Any = multiply) -> torch.Tensor:
            read.append(self)
            return cast(torch.Tensor, multiply(self, *arguments))

        monkeypatch.setattr(kind, "matmul", matmul)
    experts.run(layer.mlp, torch.ones(3, 64))

    used = [expert for expert in layer.mlp.experts if any(matrix is expert.gate_up for matrix in read)]
    assert len(used) == layer.mlp.chosen


def test_a_dense_model_has_no_experts_for_the_host(tiny: Tiny) -> None:
    """The worker refuses it too, and says what would be accepted."""
    with pytest.raises(InvalidArgument, match=r"--expert-devices would have 0.5 .* this qwen3 has none: leave it out"):
        load_stage(tiny.path("qwen3"), host_experts=0.5)


def test_a_host_without_room_for_experts_is_refused(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded, with what would help; on a CPU nobody asks for it."""
    monkeypatch.setattr("shard_worker.stage.loader.free_bytes", lambda _: (1000, 1 << 40))
    with pytest.raises(FailedPrecondition, match=r"leaves .* to the host, which has 1000 B free: give the host a s"):
        load_stage(tiny.path("qwen3_moe"), devices=[AS_GPU], host_experts=0.5)
    load_stage(tiny.path("qwen3_moe"), host_experts=0.5)


def test_on_a_cpu_all_experts_are_in_the_hosts_memory_anyway(tiny: Tiny) -> None:
    """Nothing changes."""
    stage, plain = load_stage(tiny.path("qwen3_moe"), host_experts=0.5), load_stage(tiny.path("qwen3_moe"))
    assert (stage.weight_bytes, stage.host_weight_bytes) == (plain.weight_bytes, 0)
    mixtures = [one.mlp for one in stage.segments[0].weights if isinstance(one.mlp, ExpertsWeights)]
    assert [one.in_host for one in mixtures] == [0] * len(mixtures)


def test_the_router_stays_in_float32(tiny: Tiny) -> None:
    """In a model of 16 bits too, as transformers takes the softmax of its scores."""
    [layer] = load_stage(tiny.path("qwen3_moe"), (0, 1), dtype="bfloat16").segments[0].weights
    assert isinstance(layer.mlp, ExpertsWeights)
    assert layer.mlp.router.dtype is torch.float32
    assert layer.mlp.experts[0].down.dtype is torch.bfloat16
    assert unsplit(tiny.path("qwen3_moe"))(ids(3)).shape == (3, 256)


@pytest.mark.parametrize("unlike", [False, True])
def test_packed_experts_are_tiles_below_each_other(monkeypatch: pytest.MonkeyPatch, unlike: bool) -> None:
    """On a GPU, where they take no more memory than packed; not where one of them has another form."""

    def prepared(weight: PackedWeight, *, unpacked: bool = True) -> Weight:
        return TiledWeight(weight, tiling_of(weight, lane_columns=2))

    monkeypatch.setattr(PackedWeight, "prepared", prepared)
    config = read_model_config({**MIXTURE, "num_hidden_layers": 1})
    matrices: dict[str, Weight] = {}
    for name, (rows, columns) in tensor_shapes(config, 0).items():
        kind = "q8_0" if unlike and name == "mlp.experts.2.down_proj.weight" else "q4_0"
        made = random_packed(kind, rows, columns, torch.float16, torch.device("cpu"))
        matrices[name] = DenseWeight(torch.zeros(rows, columns)) if name == ROUTER else made
    weights = experts.pack(config, 0, LayerTensors(matrices, {}))

    for number, expert in enumerate(weights.experts):
        gate, up, down = (matrices[f"mlp.experts.{number}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        assert torch.equal(elements(expert.gate_up), torch.cat([elements(gate), elements(up)]))
        assert torch.equal(elements(expert.down), elements(down))
    if unlike:
        assert weights.together is None
        return
    assert weights.together is not None
    packed = sum(weight.nbytes for name, weight in matrices.items() if name != ROUTER)
    assert weights.together.gate_up.nbytes + weights.together.down.nbytes == packed
    for whole, each in (
        (weights.together.gate_up, [expert.gate_up for expert in weights.experts]),
        (weights.together.down, [expert.down for expert in weights.experts]),
    ):
        assert torch.equal(elements(whole), torch.cat([elements(one) for one in each]))
        assert isinstance(whole, TiledWeight)
        assert {one.codes.untyped_storage().data_ptr() for one in each if isinstance(one, TiledWeight)} == {
            whole.codes.untyped_storage().data_ptr()
        }


def elements(weight: Weight) -> torch.Tensor:
    assert isinstance(weight, PackedWeight | TiledWeight)
    return weight.unpacked()


MIXTURE = {
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
