"""Compiles the kernels that a model launches, for GPUs that are not here.

The project's own loader, step runner, draft runner and prefill run on the CPU over weights of a real model's shapes
that nobody writes. A driver names the GPU that is pretended, and where Triton would compile and launch, a hook notes
the kernel with its signature and constants. Each kernel is then compiled for that GPU; nothing is ever launched.

This changes torch and Triton for the whole process, so it runs in one of its own:
`python -m tests.shard_worker.model.kernels.compiling --targets gfx942 sm_86 --cases 27b demo` prints a line of JSON for
each kernel.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from services.layers import LayerRange
from services.model.choosers.domino import CorrectionConfig
from services.model.choosers.dspark import MarkovConfig, MarkovHeadType
from services.model.config import ClampedSwiGlu
from shard_worker.device import devices
from shard_worker.device.devices import KernelTarget, cuda_target, hip_target
from shard_worker.drafting.choosers import load_chooser
from shard_worker.drafting.draft_head import DraftHead
from shard_worker.model.layer_weights import ExpertsTogether, ExpertsWeights, LayerTensors, MlpWeights
from shard_worker.weights.packed import GroupNumbers, PackedWeight
from shard_worker.weights.random_packed import KINDS, random_packed
from shard_worker.weights.scaled_rows import ScaledRows
from shard_worker.weights.tiled import TILE_ROWS, TiledNumbers, TiledWeight, tiling_of
from shard_worker.weights.weight import DenseWeight, Weight
from tests.shard_worker.tiny import AS_GPU, ignore_progress

EXPERTS, WALKS = "experts", "walks"
"""What the mixtures of experts, and the choosers, that are compiled by themselves are called, as a case is."""

WARP_SIZES = {"gfx908": 64, "gfx90a": 64, "gfx942": 64, "gfx950": 64}
"""32 for all others."""


def _cuda(major: int, minor: int, shared_kib: int) -> KernelTarget:
    return cuda_target(
        SimpleNamespace(
            major=major, minor=minor, multi_processor_count=132, shared_memory_per_block_optin=shared_kib << 10
        )
    )


def _hip(architecture: str, shared_kib: int = 64) -> KernelTarget:
    return hip_target(
        SimpleNamespace(gcnArchName=architecture, multi_processor_count=104, shared_memory_per_block=shared_kib << 10)
    )


TARGETS = {
    target.architecture: target
    for target in (
        _cuda(8, 0, 163),
        _cuda(8, 6, 99),
        _cuda(8, 9, 99),
        _cuda(9, 0, 227),
        _cuda(10, 0, 227),
        _cuda(12, 0, 99),
        _hip("gfx908"),
        _hip("gfx90a"),
        _hip("gfx942"),
        _hip("gfx950", 160),
        _hip("gfx1100"),
        _hip("gfx1151"),
        _hip("gfx1201"),
    )
}
"""GPUs by architecture, with the shared memory that a program may take there."""

QWEN3_5_27B: dict[str, Any] = {
    "model_type": "qwen3_5",
    "vocab_size": 248320,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e7,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
}
QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 1024,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
QWEN3_30B_A3B: dict[str, Any] = {
    **QWEN3_8B,
    "model_type": "qwen3_moe",
    "layer_types": ["full_attention"] * 2,
    "use_sliding_window": False,
    "attention_bias": False,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
LAGUNA: dict[str, Any] = {
    **{key: value for key, value in QWEN3_30B_A3B.items() if key not in ("use_sliding_window", "norm_topk_prob")},
    "model_type": "laguna",
    "layer_types": ["full_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "sliding_window": 512,
    "num_attention_heads": 48,
    "num_attention_heads_per_layer": [48, 64],
    "num_key_value_heads": 8,
    "gating": True,
    "num_experts": 16,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "moe_routed_scaling_factor": 2.5,
    "moe_router_logit_softcapping": 30.0,
}

GEMMA3_27B: dict[str, Any] = {
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 1024,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "query_pre_attn_scalar": 168,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
}

GEMMA4_31B: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": 262144,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 1024,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
}
GEMMA4_26B_A4B: dict[str, Any] = {
    **GEMMA4_31B,
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "enable_moe_block": True,
    "num_experts": 16,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
}
GEMMA4_E2B: dict[str, Any] = {
    **GEMMA4_31B,
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "sliding_window": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "max_position_embeddings": 131072,
}


def _draft(target: dict[str, Any], layer_types: Sequence[str], **more: Any) -> dict[str, Any]:
    """A DFlash draft for a target, as those that are published are shaped."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 16,
        "dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": 3},
        "num_target_layers": 2,
        "num_hidden_layers": len(layer_types),
        "layer_types": list(layer_types),
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "use_sliding_window": True,
        "sliding_window": 2048,
        "is_causal": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        **{key: target[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")},
        **more,
    }


def _demo(part: str) -> dict[str, Any]:
    """The demo pair's own configuration, cut to the layers that differ."""
    path = Path(__file__).parents[4] / "deploy" / "demo" / part / "config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    config["layer_types"] = sorted(set(config["layer_types"]), reverse=True)
    config["num_hidden_layers"] = len(config["layer_types"])
    if part == "draft":
        config["dflash_config"]["target_layer_ids"] = [0, 1]
        config["num_target_layers"] = 2
    return config


@dataclass(frozen=True, slots=True)
class Case:
    """A target with its draft, the weights' element type and that of keys and values, and the numbers of rows.

    rows: of a step of one session. batches: of a step of several ones. packings: how the target's matrices are packed,
    of `random_packed.KINDS`, by a pattern that their names match first; the others are dense.
    """

    target: dict[str, Any]
    draft: dict[str, Any]
    dtype: str
    kv_dtype: str | None = None
    rows: tuple[int, ...] = (1, 16, 32, 64)
    batches: tuple[int, ...] = (16, 128)
    packings: tuple[tuple[str, str], ...] = ()


_LLAMA = {
    **{key: QWEN3_8B[key] for key in QWEN3_8B if key not in ("layer_types", "use_sliding_window", "sliding_window")},
    "model_type": "llama",
    "attention_bias": False,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
}
_27B = (QWEN3_5_27B, _draft(QWEN3_5_27B, ["sliding_attention", "full_attention"]))
_27B_DFLASH2 = _draft(
    QWEN3_5_27B,
    ["sliding_attention", "full_attention"],
    architectures=["DFlash2DraftModel"],
    block_size=8,
    conv_kernel_size=2,
    conv_group_size=16,
    selector_rank=256,
    selector_top_k=16,
)
_8B = (QWEN3_8B, _draft(QWEN3_8B, ["full_attention"], is_causal=True, attention_bias=True))
_30B_A3B = (QWEN3_30B_A3B, _draft(QWEN3_30B_A3B, ["full_attention"]))
_26B_A4B = (GEMMA4_26B_A4B, _draft(GEMMA4_26B_A4B, ["full_attention"]))
_E2B = (GEMMA4_E2B, _draft(GEMMA4_E2B, ["full_attention"]))
_DEMO = (_demo("target"), _demo("draft"))
CASES = {
    "27b": Case(QWEN3_5_27B, _27B_DFLASH2, "bfloat16"),
    "27b-float8": Case(*_27B, "bfloat16", "float8_e4m3fn"),
    "27b-float16": Case(*_27B, "float16", rows=(16,)),
    "27b-float32": Case(*_27B, "float32"),
    "8b": Case(*_8B, "bfloat16"),
    "8b-float8": Case(*_8B, "bfloat16", "float8_e4m3fn"),
    "8b-float16": Case(*_8B, "float16", rows=(16,)),
    "8b-float32": Case(*_8B, "float32"),
    "27b-q4_k_m": Case(
        *_27B,
        "bfloat16",
        packings=(
            (r"in_proj_[ab]\.", ""),
            (r"lm_head|v_proj|layers\.1\.mlp\.down_proj", "q6_k"),
            (r"layers\.\d+\.", "q4_k"),
        ),
    ),
    "8b-int4": Case(*_8B, "bfloat16", rows=(1, 16), packings=((r"layers\.\d+\.", "int4"),)),
    "8b-q8_0": Case(*_8B, "bfloat16", rows=(1, 16), packings=(("", "q8_0"),)),
    "8b-fp8": Case(*_8B, "float16", rows=(1, 16), packings=((r"layers\.\d+\.", "fp8"),)),
    "30b-a3b": Case(*_30B_A3B, "bfloat16", batches=(16, 512)),
    "laguna": Case(LAGUNA, _draft(LAGUNA, ["full_attention"]), "bfloat16", rows=(1, 16), batches=(16,)),
    "llama": Case(_LLAMA, _draft(_LLAMA, ["full_attention"]), "bfloat16", rows=(16,), batches=(16,)),
    "gemma3": Case(GEMMA3_27B, _draft(GEMMA3_27B, ["full_attention"]), "bfloat16", rows=(1, 16), batches=(16, 128)),
    "gemma4": Case(GEMMA4_31B, _draft(GEMMA4_31B, ["full_attention"]), "bfloat16", rows=(1, 16), batches=(16, 128)),
    "26b-a4b": Case(*_26B_A4B, "bfloat16", rows=(1, 16), batches=(16, 512)),
    "26b-a4b-int4": Case(*_26B_A4B, "bfloat16", rows=(1, 16), batches=(16, 512), packings=((r"\.experts\.", "int4"),)),
    "e2b": Case(*_E2B, "bfloat16", rows=(1, 16), batches=(16, 128)),
    "demo": Case(*_DEMO, "bfloat16"),
    "demo-float32": Case(*_DEMO, "float32"),
}


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel as it is launched first. `constants` has its compile-time arguments by their paths."""

    target: str
    case: str
    function: Any
    signature: dict[str, str]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, int]
    preparing: bool

    @property
    def key(self) -> str:
        """Equal for two launches that the same compiled kernel serves."""
        constants = sorted((path, repr(value)) for path, value in self.constants.items())
        return repr((self.target, self.name, self.signature, constants, sorted(self.attributes.items()), self.options))

    @property
    def name(self) -> str:
        return f"{self.function.__module__.rpartition('.')[2]}.{self.function.__name__}"

    @property
    def named_constants(self) -> dict[str, Any]:
        """Compile-time arguments by name: numbers and strings."""
        named = {self.function.arg_names[path[0]]: value for path, value in self.constants.items()}
        return {name: getattr(value, "value", value) for name, value in named.items()}


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a kernel takes of a GPU.

    constants: its compile-time arguments by name. prepared: whether a worker launches it at its start. shared: bytes of
    shared memory of a program. spills: registers that a thread keeps in memory. layouts: how products are spread over
    instructions and warps. error: why it does not compile, else empty.
    """

    target: str
    case: str
    kernel: str
    constants: dict[str, Any]
    prepared: bool
    shared: int = 0
    spills: int = 0
    layouts: tuple[str, ...] = ()
    error: str = ""


class PretendedDriver:
    """What Triton asks of the driver of a GPU when a kernel is called."""

    def __init__(self) -> None:
        self.target = next(iter(TARGETS))

    def get_current_target(self) -> Any:
        return gpu_target(self.target)

    def get_current_device(self) -> int:
        return list(TARGETS).index(self.target)

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def gpu_target(architecture: str) -> Any:
    """Return a target of `TARGETS` as Triton's compilers name it."""
    from triton.backends.compiler import GPUTarget

    if architecture.startswith("sm_"):
        return GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    return GPUTarget("hip", architecture, WARP_SIZES.get(architecture, 32))


class Recorder:
    """Pretends GPUs, and notes what is launched on them: use it once, in a process of its own."""

    def __init__(self) -> None:
        import triton

        self._driver = PretendedDriver()
        self._case, self._preparing = "", False
        self._launches: list[Launch] = []
        # With a true answer nothing is compiled, and the call returns.
        triton.knobs.runtime.jit_cache_hook = self._note
        triton.runtime.driver.set_active(self._driver)
        # The CPU stands for the GPU.
        devices.kernel_target = lambda device: TARGETS[self._driver.target]  # type: ignore[assignment]
        torch.version.hip = torch.version.cuda = None
        # oneDNN would copy matrices into blocks of its own.
        torch.backends.mkldnn.is_available = lambda: False  # type: ignore[method-assign]
        PackedWeight.prepared = _tiled_for(self._driver)  # type: ignore[method-assign]
        torch.cat, torch.nn.functional.linear = _shaped_cat, _shaped_linear
        torch.argmax = torch.Tensor.argmax = _shaped_argmax  # type: ignore[method-assign,assignment]
        torch.Tensor.topk = _shaped_topk  # type: ignore[method-assign,assignment]

    def _note(self, *, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        constants, [attributes] = compile["constants"], compile["configs"]
        options = {name: compile[name] for name in ("num_warps", "num_stages")}
        function = fn.jit_function
        self._launches.append(
            Launch(
                self._driver.target,
                self._case,
                function,
                compile["signature"],
                constants,
                attributes,
                options,
                self._preparing,
            )  # fmt: skip
        )
        return True

    def record(self, name: str, architectures: Sequence[str]) -> list[Launch]:
        """Return the launches of a case on each of these targets, each once."""
        from shard_worker.drafting.drafters import dflash
        from shard_worker.stage.loader import CaptureRequest, StageLoader

        case, self._case, self._launches = CASES[name], name, []
        for architecture in architectures:
            self._driver.target = architecture
            vendor = "cuda" if architecture.startswith("sm_") else "hip"
            torch.version.cuda, torch.version.hip = ("13.0", None) if vendor == "cuda" else (None, "7.1")
            with tempfile.TemporaryDirectory() as directory:
                target, draft = (
                    _unwritten(Path(directory) / part, {**config, "torch_dtype": case.dtype}, packings)
                    for part, config, packings in (("target", case.target, case.packings), ("draft", case.draft, ()))
                )
                draft_config, fc = dflash.read_fc(draft)
                loader = StageLoader(target, LayerRange(0, case.target["num_hidden_layers"]), case.dtype, case.kv_dtype)
                capture = CaptureRequest(draft_config.capture_layers, fc)
                stage = loader.load([AS_GPU], capture, ignore_progress, graphs=False)
                self._run(case, stage, dflash.load(draft, AS_GPU, case.dtype, ignore_progress))
        return self._launches

    def record_products(self, kinds: Sequence[str], architectures: Sequence[str], rows: Sequence[int]) -> list[Launch]:
        """Return the launches of products with pairs of packed matrices, which take most of a GPU."""
        from shard_worker.model.kernels.matmul import linear

        self._launches = []
        for architecture in architectures:
            self._driver.target = architecture
            for kind in kinds:
                self._case = kind
                weight = unwritten_packed(kind, 4096, 2048, torch.bfloat16).prepared()
                for count in rows:
                    linear(torch.zeros(count, 2048, dtype=torch.bfloat16), weight, paired=True)
        return [launch for launch in self._launches if launch.name == "matmul._product"]

    def record_experts(
        self, architectures: Sequence[str], rows: Sequence[int], packed: Sequence[str] = ()
    ) -> list[Launch]:
        """Return the launches of a mixture of experts of the shape of 35B-A3B, which has a shared expert too; on the
        first GPU also of one with biases and clamped gates, and of one of the shape of 26B-A4B. packed: of routed
        experts, instead of these three."""
        from shard_worker.model.kernels import experts
        from shard_worker.model.kernels.matmul import begin
        from shard_worker.model.kernels.step_parameters import FIRST_PAGE, Places

        self._case, self._launches = EXPERTS, []
        clamped = ClampedSwiGlu(7.0, 1.702)
        made = [(one, functools.partial(unwritten_experts, 256, 8, 512)) for one in architectures]
        made.append((architectures[0], functools.partial(unwritten_experts, 32, 4, 512, clamped)))
        made.append((architectures[0], functools.partial(unwritten_experts, 128, 8, 704, hidden=2816, beside=True)))
        if packed:
            made = [
                (
                    one,
                    functools.partial(
                        unwritten_experts, 256, 8, 512, clamped if kind == "mxfp4" else None, (kind, kind)
                    ),
                )
                for kind in packed
                for one in architectures
            ]
        for architecture, make in made:
            self._driver.target = architecture
            # Tiles are made as the GPU reads them.
            weights = make()
            norm = torch.ones(weights.router.columns)
            for count in rows:
                x = torch.zeros(count, len(norm), dtype=torch.bfloat16)
                residual, routed = (x, None) if weights.scales is None else (None, x)
                rows_of_step = torch.zeros(count, dtype=torch.int64)
                places = Places(torch.zeros(count, FIRST_PAGE.value, dtype=torch.int64), rows_of_step, rows_of_step)
                normed = begin(x, norm, 1e-6)
                experts.run(weights, normed, residual, norm, 1e-6, None, routed=routed, places=places)
        return [launch for launch in self._launches if launch.name.startswith("experts.")]

    def record_walks(self, architectures: Sequence[str]) -> list[Launch]:
        """Return the launches of choosers that walk through blocks, of one session and of several, but for their
        products, which are those of all matrices."""
        from shard_worker.drafting.chooser_kernels import LaunchedRows, choose
        from shard_worker.model.kernels.matmul import begin
        from shard_worker.model.kernels.step_parameters import StepParameters

        self._case, self._launches = WALKS, []
        hidden, vocab, norm = 256, 9000, torch.ones(256)
        configs = (
            MarkovConfig(64, MarkovHeadType.GATED, confidence=True, confidence_with_token=False),
            MarkovConfig(64, MarkovHeadType.RNN, confidence=True, confidence_with_token=True),
            CorrectionConfig(state=64, inner=64, uncorrected=1, from_anchor=False),
        )
        for architecture, config, sessions in itertools.product(architectures, configs, (None, 32)):
            self._driver.target = architecture
            shapes = config.tensor_shapes(hidden, vocab, vocab)
            tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
            matrices = {name: DenseWeight(one) for name, one in tensors.items() if one.dim() == 2}
            chooser = load_chooser(config, LayerTensors(matrices, tensors))
            head = DraftHead(DenseWeight(torch.zeros(vocab, hidden)), torch.arange(vocab), chooser)
            rows = LaunchedRows(
                normed=begin(torch.zeros(16, hidden, dtype=torch.bfloat16), norm, 1e-6),
                logits=torch.zeros(16, vocab, dtype=torch.bfloat16),
                known=torch.zeros(sessions or 1, dtype=torch.int64),
                places=StepParameters(torch.device("cpu"), 3, rows=16, sessions=sessions).places(16),
                from_anchor=config.from_anchor,
                most=2,
                embedding=torch.zeros(vocab, hidden, dtype=torch.bfloat16),
            )
            choose(head, rows, torch.zeros(17, dtype=torch.int64))
        return [launch for launch in self._launches if launch.name.startswith("walk_blocks.")]

    def _run(self, case: Case, stage: Any, draft: Any) -> None:
        """Launch what a worker launches at its start, and then all that a stage with a draft beside it does."""
        from shard_worker.stage.batch_runner import MAX_SESSIONS

        head, embedding = stage.head, _dense(stage.embedding)
        self._preparing = True
        stage.prepare()
        chosen = DraftHead(head.weight, chooser=draft.chooser)
        drafting = draft.make_runner(chosen, graphs=False)
        drafting_together = draft.make_runner(chosen, graphs=False, sessions=MAX_SESSIONS)
        for runner in (drafting, drafting_together):
            runner.prepare(embedding[0], embedding)
        self._preparing = False
        _serve(case, stage, draft, drafting, drafting_together)


def _serve(case: Case, stage: Any, draft: Any, drafting: Any, drafting_together: Any) -> None:
    """Launch what sessions need: steps of all numbers of rows, commits, blocks, and a prefill."""
    from shard_worker.drafting.ahead import Ahead, BlocksAhead, Following
    from shard_worker.model.features import Features
    from shard_worker.stage.batch_runner import BatchRunner, SessionTokens

    [runner], embedding = stage.runners, _dense(stage.embedding)
    state = stage.allocate(512, 64)
    for rows in case.rows:
        uncommitted = rows > 1
        for features in (None, Features()):
            state.pending = 0
            stage.step(state, range(rows), features, uncommitted=uncommitted)
        if uncommitted:
            stage.commit(state, state.length + 1)
    ahead = Ahead(runner, BlocksAhead(drafting, embedding), draft.allocate(256), frozenset({7}))
    for rows in case.rows:
        if rows <= drafting.session_rows:
            argmax = torch.zeros(rows, dtype=torch.int64)
            total = torch.zeros(rows, case.target["hidden_size"])
            ahead.issue(state.caches[0], argmax, total, 3, uncommitted=rows > 1)
    [segment] = stage.segments
    several = BatchRunner(segment, stage.embedding, stage.head, graphs=False)
    sessions = [segment.allocate(512, 64) for _ in range(2)]
    blocks, contexts = BlocksAhead(drafting_together, embedding), [draft.allocate(256) for _ in range(8)]
    for rows in case.batches:
        parts = [SessionTokens(0, (5,) * (rows // 2), caches, None, True) for caches in sessions]
        several.run(parts, (), Features())
        several.commit(sessions, [1, 1])
        following = [Following(min(rows // 8, drafting.session_rows), context, 15) for context in contexts]
        chosen, total = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, case.target["hidden_size"])
        blocks.issue(several.parameters, following, chosen, total, several.commit_last)
        blocks.complete(several.parameters)
    for rows in (17, 130, 256):
        hidden = torch.zeros(rows, case.target["hidden_size"], dtype=stage.dtype)
        stage.run(stage.allocate(512, 1), hidden, None, uncommitted=False, token_ids=range(rows))


def _dense(embedding: Any) -> torch.Tensor:
    """The matrix of an embedding whose rows may be scaled."""
    matrix: torch.Tensor = (embedding.rows if isinstance(embedding, ScaledRows) else embedding).tensor
    return matrix


def _tiled_for(driver: PretendedDriver) -> Any:
    """What prepares a packed matrix for the GPU that is pretended: in memory that nobody writes either."""

    def prepared(weight: PackedWeight, *, unpacked: bool = True) -> TiledWeight:
        one = weight.select_rows(slice(0, 1))
        tiled = TiledWeight(one, tiling_of(one, lane_columns=TARGETS[driver.target].lane_columns))
        tiled.rows = weight.rows
        blocks = -(-weight.rows // TILE_ROWS)
        tiled.codes = torch.empty((blocks, TILE_ROWS * weight.codes.shape[1]), dtype=torch.uint8)
        tiled.scales = _unwritten_numbers(tiled.scales, weight.rows)
        if tiled.offsets is not None:
            tiled.offsets = _unwritten_numbers(tiled.offsets, weight.rows)
        return tiled

    return prepared


def _unwritten_numbers(numbers: TiledNumbers, rows: int) -> TiledNumbers:
    words = torch.empty((len(numbers.words), rows), dtype=numbers.words.dtype)
    factors = numbers.factors
    if factors is not None:
        factors = torch.empty((len(factors), rows), dtype=factors.dtype)
    return dataclasses.replace(numbers, words=words, factors=factors)


def unwritten_packed(kind: str, rows: int, columns: int, dtype: torch.dtype) -> PackedWeight:
    """A packed matrix, of `random_packed.KINDS`, in memory that nobody has written."""
    row = random_packed(kind, 1, columns, dtype, torch.device("cpu"))

    def numbers(of_row: GroupNumbers | None) -> GroupNumbers | None:
        return None if of_row is None else of_row.select_rows(torch.empty(rows, dtype=torch.int64).fill_(0))

    scales = numbers(row.scales)
    assert scales is not None
    codes = torch.empty((rows, row.codes.shape[1]), dtype=row.codes.dtype)
    return PackedWeight(row.packing, codes, scales, numbers(row.offsets), dtype=dtype)


def unwritten_experts(
    count: int,
    chosen: int,
    size: int,
    clamped: ClampedSwiGlu | None = None,
    packed: tuple[str, str] | None = None,
    *,
    hidden: int = 2048,
    beside: bool = False,
) -> ExpertsWeights:
    """The weights of a mixture, in memory that nobody has written.

    clamped: how experts gate, which have biases then, as the router does. packed: what gates and ups, and downs of
    routed experts are packed in, of `random_packed.KINDS`. beside: they stand beside a dense part, and no expert is
    shared.
    """

    def swiglu(experts: int, packed: tuple[str, str] | None = None) -> MlpWeights:
        gate_up, down = (experts * 2 * size, hidden), (experts * hidden, size)
        if packed is None:
            return MlpWeights(*(DenseWeight(torch.empty(extents, dtype=torch.bfloat16)) for extents in (gate_up, down)))
        forms = zip(packed, (gate_up, down), strict=True)
        return MlpWeights(*(unwritten_packed(kind, *extents, torch.bfloat16).prepared() for kind, extents in forms))

    scores, together = torch.empty(count if beside else count + 1, hidden), swiglu(count, packed)
    biases = [
        None if clamped is None else torch.empty(rows, dtype=torch.bfloat16)
        for rows in (count * 2 * size, count * hidden)
    ]
    return ExpertsWeights(
        router=DenseWeight(scores[:count]),
        experts=(),
        chosen=chosen,
        normalised=True,
        shared=None if beside else swiglu(1),
        shared_gate=None if beside else DenseWeight(scores[count:]),
        together=ExpertsTogether(scores, together.gate_up, together.down, *biases, clamped, gelu=beside),
        scales=torch.empty(count) if beside else None,
        router_bias=None if clamped is None else torch.empty(count),
    )


def _unwritten(directory: Path, config: dict[str, Any], packings: Sequence[tuple[str, str]]) -> Any:
    """A checkpoint of this configuration whose tensors are memory that nobody has written."""
    from shard_worker.weights.random_checkpoint import RandomCheckpoint

    class UnwrittenCheckpoint(RandomCheckpoint):
        def place(self, name: str, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(self.shape(name), dtype=dtype, device=device)

        def weight(self, name: str, device: torch.device, dtype: torch.dtype) -> Weight:
            kind = next((kind for pattern, kind in packings if re.search(pattern, name)), "")
            return unwritten_packed(kind, *self.shape(name), dtype) if kind else super().weight(name, device, dtype)

    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return UnwrittenCheckpoint(directory)


_cat, _linear, _argmax, _topk = torch.cat, torch.nn.functional.linear, torch.argmax, torch.Tensor.topk


def _shaped_cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """As torch.cat, but of large tensors the result is not written."""
    if sum(tensor.numel() for tensor in tensors) < 1 << 20:
        return _cat(list(tensors), dim)
    shape = list(tensors[0].shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return torch.empty(shape, dtype=tensors[0].dtype)


def _shaped_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As F.linear, but of large matrices the result is not written."""
    if weight.numel() < 1 << 20:
        return _linear(x, weight, bias)
    return x.new_empty((*x.shape[:-1], len(weight)))


def _shaped_argmax(tensor: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
    """As torch.argmax over the last dimension, but of large tensors it is the first place."""
    return _argmax(tensor if tensor.numel() < 1 << 20 else tensor[..., :1], *arguments, **named)


def _shaped_topk(tensor: torch.Tensor, k: int, *arguments: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """As Tensor.topk over the last dimension, but of large tensors it is of the first places."""
    return _topk(tensor if tensor.numel() < 1 << 20 else tensor[..., :k].contiguous(), k, *arguments, **named)


def compile_launch(launch: Launch) -> Compiled:
    """Compile a kernel for its target."""
    import triton
    from triton.compiler import ASTSource

    compiled = Compiled(launch.target, launch.case, launch.name, launch.named_constants, launch.preparing)
    try:
        source = ASTSource(launch.function, launch.signature, launch.constants, launch.attributes)
        kernel = triton.compile(source, target=gpu_target(launch.target), options=launch.options)
    except Exception as error:
        return dataclasses.replace(compiled, error=f"{type(error).__name__}: {error}"[-2000:])
    layouts = tuple(_layouts_of(kernel.asm["ttgir"]))
    return dataclasses.replace(compiled, shared=kernel.metadata.shared, spills=_spills_of(kernel), layouts=layouts)


def _layouts_of(ir: str) -> Iterator[str]:
    """What decides in which order a product's sums are taken: the instruction, and how warps lie over a tile."""
    for kind, parameters in re.findall(r"#\w+ = #ttg\.(\w*mf?ma)<\{(.*)\}>", ir):
        yield f"{kind} {parameters}"


def _spills_of(kernel: Any) -> int:
    """Return how many registers of 32 bits a thread keeps in memory."""
    if "amdgcn" in kernel.asm:
        return max(map(int, re.findall(r"\.vgpr_spill_count:\s*(\d+)", kernel.asm["amdgcn"])))
    import triton

    # ptxas knows them, and writes them into the binary.
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        output = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    [(stack, local)] = re.findall(r"STACK:(\d+) .*LOCAL:(\d+)", output)
    return (int(stack) + int(local)) // 4


_ALIKE = {"STEP_ROWS", "TILES", "CHUNKS", "MOST", "NORMED", "NORM_BLOCK", "SLOT", "COPIES", "ALONE"}
"""Constants that say how often or how far, or how long caches keep what was read, and not what is done."""


def distinct(launches: Sequence[Launch]) -> list[Launch]:
    """Return one of all launches that compile alike, which differ in counts and alignments alone."""
    kinds: dict[str, Launch] = {}
    for launch in launches:
        constants = {name: value for name, value in launch.named_constants.items() if name not in _ALIKE}
        kinds[repr((launch.target, launch.name, constants, launch.options))] = launch
    return list(kinds.values())


def main() -> None:
    """Compile what the command line asks for, and print a line of JSON for each kernel."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, required=True)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=[])
    parser.add_argument("--packed", nargs="*", choices=KINDS, default=[], help="products with matrices packed so")
    parser.add_argument("--experts", action="store_true", help="mixtures of experts")
    parser.add_argument(
        "--packed-experts", nargs="*", choices=KINDS, default=[], help="mixtures packed so, for the last target"
    )
    parser.add_argument("--walks", action="store_true", help="choosers that walk through blocks, for the last target")
    parser.add_argument("--rows", nargs="+", type=int, default=[1], help="of these products and mixtures")
    arguments = parser.parse_args()
    recorder = Recorder()
    for launch in distinct(recorder.record_products(arguments.packed, arguments.targets, arguments.rows)):
        print(json.dumps(dataclasses.asdict(compile_launch(launch))), flush=True)
    mixtures = recorder.record_experts(arguments.targets, arguments.rows) if arguments.experts else []
    if arguments.packed_experts:
        mixtures += recorder.record_experts(arguments.targets[-1:], arguments.rows, arguments.packed_experts)
    for launch in distinct(mixtures):
        print(json.dumps(dataclasses.asdict(compile_launch(launch))), flush=True)
    for launch in distinct(recorder.record_walks(arguments.targets[-1:]) if arguments.walks else []):
        print(json.dumps(dataclasses.asdict(compile_launch(launch))), flush=True)
    for case in arguments.cases:
        targets = [name for name in arguments.targets if TARGETS[name].lack is None]
        widest = CASES[case].target.get("global_head_dim", 0)
        targets = [name for name in targets if widest <= TARGETS[name].widest_heads]
        if CASES[case].kv_dtype is not None:
            targets = [name for name in targets if TARGETS[name].float8_lack is None]
        launches = recorder.record(case, targets)
        prepared = {launch.key for launch in launches if launch.preparing}
        for launch in distinct(launches):
            compiled = dataclasses.replace(compile_launch(launch), prepared=launch.key in prepared)
            print(json.dumps(dataclasses.asdict(compiled)), flush=True)


def compiled_kernels(
    targets: Sequence[str],
    cases: Sequence[str],
    packed: Sequence[str] = (),
    rows: Sequence[int] = (1,),
    *,
    experts: bool = False,
    packed_experts: Sequence[str] = (),
    walks: bool = False,
) -> list[Compiled]:
    """Compile kernels in a process of its own, as `main` does. Raises CalledProcessError when that ends early.

    packed, rows: kinds of packed matrices that products are compiled with, for so many rows. experts: whether mixtures
    of experts are, for as many; packed_experts: those that are packed in these kinds, for
    the last target alone. walks: whether what choosers
    launch that walk through blocks is, for that target too.
    """
    command = [sys.executable, "-W", "ignore", "-m", __name__, "--targets", *targets, "--cases", *cases]
    command += ["--packed", *packed, "--rows", *map(str, rows)]
    command += [*(["--experts"] if experts else []), "--packed-experts", *packed_experts]
    command += ["--walks"] if walks else []
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[4]
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (root, root / "proto")))
    lines = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    parsed = map(json.loads, lines.splitlines())
    return [Compiled(**{**fields, "layouts": tuple(fields["layouts"])}) for fields in parsed]


if __name__ == "__main__":
    main()
