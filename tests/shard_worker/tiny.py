"""Helpers of tests: tiny checkpoints of every shape that they need, written once a run, and stages loaded from them.

Their results are compared with `tests.reference`, which shares no code with the engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from services.layers import LayerRange
from services.model.quantization import Quantization
from shard_worker.device.devices import Device, parse_devices
from shard_worker.drafting.drafters import drafter_of
from shard_worker.drafting.drafters.dflash import DFlashDraft
from shard_worker.model.features import Features
from shard_worker.stage.loader import CaptureRequest, StageLoader
from shard_worker.stage.stage import Stage, StageState
from shard_worker.weights.opening import open_checkpoint
from tests.reference import checkpoints, storage, target

VOCAB = 256
"""Token ids of all checkpoints but "vocab-5"."""

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
"""RoPE that is scaled for positions that tests reach."""

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""The same as Llama 3.1 has it."""

WRITERS: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "qwen3": (checkpoints.write_qwen3, {}),
    "qwen3-tied": (checkpoints.write_qwen3, {"tied": True, "legacy_rope": True}),
    "qwen3-sliding": (checkpoints.write_qwen3, {"sliding": 6}),
    "qwen3-bias": (checkpoints.write_qwen3, {"layers": 2}),
    "qwen3-yarn": (checkpoints.write_qwen3, {"layers": 2, "rope_scaling": YARN, "legacy_rope": True}),
    "llama": (checkpoints.write_llama, {"rope_scaling": LLAMA3}),
    "llama-tied": (
        checkpoints.write_llama,
        {"tied": True, "head_dim": 32, "rope_scaling": LLAMA3, "legacy_rope": True},
    ),
    "llama-biases": (checkpoints.write_llama, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (checkpoints.write_mistral, {"tied": True}),
    "mistral-sliding": (checkpoints.write_mistral, {"sliding": 6}),
    "gemma3": (checkpoints.write_gemma3, {"stretched": True, "cap": 8.0}),
    "gemma3-untied": (checkpoints.write_gemma3, {"tied": False, "window": 3, "scalar": 16}),
    "gemma3-older": (checkpoints.write_gemma3, {"older": True, "stretched": True}),
    "gemma3-nested": (checkpoints.write_gemma3, {"nested": True, "stretched": True, "cap": 8.0}),
    "gemma4": (checkpoints.write_gemma4, {}),
    "gemma4-untied": (checkpoints.write_gemma4, {"tied": False, "window": 3, "cap": None, "keys_as_values": False}),
    "gemma4-older": (checkpoints.write_gemma4, {"older": True}),
    "gemma4-nested": (checkpoints.write_gemma4, {"nested": True}),
    "gemma4-experts": (checkpoints.write_gemma4, {"experts": 8}),
    "gemma4-inputs": (checkpoints.write_gemma4, {"per_layer": 8, "cap": None}),
    "gemma4-sharing": (checkpoints.write_gemma4, {"layers": 6, "sharing": 2, "wide_mlp": True, "per_layer": 8}),
    "qwen3_moe": (checkpoints.write_qwen3_moe, {"dense": (1,)}),
    "qwen3_moe-tied": (checkpoints.write_qwen3_moe, {"tied": True, "normalised": False, "step": 2}),
    "qwen3_moe-all": (checkpoints.write_qwen3_moe, {"layers": 2, "experts": 4, "chosen": 4, "sliding": 6}),
    "gpt_oss": (checkpoints.write_gpt_oss, {"rope_scaling": YARN | {"truncate": False}, "legacy_rope": True}),
    "gpt_oss-tied": (
        checkpoints.write_gpt_oss,
        {"layers": 3, "tied": True, "biases": False, "experts": 4, "chosen": 4, "limit": 7.0},
    ),
    "gpt_oss-mxfp4": (checkpoints.write_gpt_oss, {"layers": 2, "packed": True}),
    "gpt_oss-mxfp4-odd": (checkpoints.write_gpt_oss, {"layers": 2, "packed": True, "mlp": 96, "limit": 0.5}),
    "glm4_moe": (checkpoints.write_glm4_moe, {"biases": True}),
    "glm4_moe-norms": (
        checkpoints.write_glm4_moe,
        {"layers": 2, "dense": 0, "shared": 2, "norms": True, "normalised": False, "tied": True, "rotated": 1.0},
    ),
    "laguna": (checkpoints.write_laguna, {}),
    "laguna-elements": (
        checkpoints.write_laguna,
        {
            "gating": "per-element",
            "tied": True,
            "biases": True,
            "heads": (4, 4),
            "kinds": ("sliding", "full"),
            "dense": (),
            "cap": 2.0,
            "ropes": {
                "full_attention": {**YARN, "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    "qwen3_5": (checkpoints.write_qwen3_5, {}),
    "qwen3_5-ratio-1": (checkpoints.write_qwen3_5, {"layers": 4, "linear_value_heads": 2, "tied": True}),
    "qwen3_5-ratio-2": (checkpoints.write_qwen3_5, {"layers": 4, "linear_value_heads": 4}),
    "qwen3_5-ratio-3": (checkpoints.write_qwen3_5, {"layers": 4, "linear_value_heads": 6}),
    "qwen3_5-nested": (
        checkpoints.write_qwen3_5,
        {"layers": 4, "nested": True, "extras": True, "max_shard_size": "60KB"},
    ),
    "qwen3_5-bias": (checkpoints.write_qwen3_5, {"layers": 4}),
    "qwen3_5_moe": (checkpoints.write_qwen3_5_moe, {}),
    "qwen3_5_moe-tied": (checkpoints.write_qwen3_5_moe, {"tied": True, "value_heads": 6}),
    "qwen3_next": (checkpoints.write_qwen3_next, {"value_heads": 6, "dense": (1,)}),
    "qwen3_next-tied": (checkpoints.write_qwen3_next, {"tied": True, "value_heads": 2, "normalised": False}),
    "vocab-5": (checkpoints.write_qwen3, {"vocab": 5, "layers": 2, "logit_scale": 1.5}),
}
"""How each checkpoint is written, by its name: the function of `tests.reference.checkpoints`, and its options."""

RUNS = (20, 72)
"""How long greedy runs of transformers are; shorter ones are the beginnings of these."""

QWEN3 = ("qwen3", "qwen3-tied", "qwen3-sliding", "qwen3-bias", "qwen3-yarn")
LLAMA = ("llama", "llama-tied", "llama-biases", "mistral", "mistral-sliding")
GEMMA3 = ("gemma3", "gemma3-untied", "gemma3-older")
GEMMA4 = ("gemma4", "gemma4-untied", "gemma4-older", "gemma4-experts", "gemma4-inputs", "gemma4-sharing")
HYBRID_EXPERTS = ("qwen3_5_moe", "qwen3_5_moe-tied", "qwen3_next", "qwen3_next-tied")
QWEN3_MOE = ("qwen3_moe", "qwen3_moe-tied", "qwen3_moe-all")
GPT_OSS = ("gpt_oss", "gpt_oss-tied", "gpt_oss-mxfp4", "gpt_oss-mxfp4-odd")
GLM4_MOE = ("glm4_moe", "glm4_moe-norms")
LAGUNA = ("laguna", "laguna-elements")
QWEN3_5 = ("qwen3_5-ratio-1", "qwen3_5-ratio-2", "qwen3_5-ratio-3", "qwen3_5-nested", "qwen3_5-bias")


class AsGpu(Device):
    """The CPU, treated as a GPU: steps have fixed shapes and go over whole caches."""

    @property
    def is_gpu(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing is queued."""


BY_KERNELS = (
    "qwen3",
    "qwen3-sliding",
    "qwen3_5-ratio-3",
    "qwen3_moe",
    "qwen3_next",
    "gpt_oss",
    "glm4_moe",
    "laguna",
    "gemma3",
    "gemma4",
    "gemma4-experts",
    "gemma4-sharing",
)
"""Checkpoints of every family whose steps kernels run."""

AS_GPU = AsGpu("cpu", torch.device("cpu"))


class Tiny:
    """Tiny checkpoints by name, their models in transformers and greedy runs of these, each made on first use.

    path(name): the checkpoint's folder. model(name): its model in transformers. clear_prompt(name, length, count): as
    `tests.reference.target.clear_prompt`.
    """

    def __init__(self, root: Path) -> None:
        """root: an empty folder to write to."""
        self._root = root
        self.path = functools.cache(self._path)
        self.model = functools.cache(self._model)
        self.clear_prompt = functools.cache(self._clear_prompt)

    def _path(self, name: str) -> Path:
        write, options = WRITERS[name]
        path = write(self._root / name, **options)
        if name.endswith("-bias"):
            add_attention_bias(path)
        return path

    def _model(self, name: str) -> PreTrainedModel:
        return target.load(self.path(name))

    def _clear_prompt(self, name: str, length: int, count: int) -> tuple[list[int], list[int]]:
        # Runs of transformers take longer than most of what is compared with them: tests share a few.
        most = next((most for most in RUNS if most > count), count)
        if most > count:
            prompt, tokens = self.clear_prompt(name, length, most)
            return prompt, tokens[:count]
        return target.clear_prompt(self.model(name), length, count)

    def draft(self, name: str, label: str = "", **options: Any) -> Path:
        """Write a draft for a checkpoint and return its folder; `label` tells apart those of different options."""
        return checkpoints.write_draft(self._root / f"draft-{name}-{label}", self.path(name), **options)


def add_attention_bias(path: Path) -> None:
    """Give all attention projections of a checkpoint a bias, which the writers leave out."""
    generator = torch.Generator().manual_seed(11)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight") and ".self_attn." in name]:
            bias = torch.randn(len(tensors[name]), generator=generator) * 0.3
            tensors[name.removesuffix("weight") + "bias"] = bias.to(tensors[name].dtype)

    storage.edit_tensors(path, add)
    storage.edit_config(path, lambda config: config.update(attention_bias=True))


def ids(count: int, seed: int = 3, vocab: int = VOCAB) -> list[int]:
    """Return random token ids."""
    return checkpoints.random_prompts(vocab, 1, seed, [count])[0]


def ignore_progress(_loaded: int, _total: int) -> None:
    """An `on_progress` that nobody watches."""


def load_stage(
    path: Path,
    layers: tuple[int, int] | None = None,
    *,
    devices: str | Sequence[Device] = "cpu",
    dtype: str | None = None,
    capture: CaptureRequest | None = None,
    kv_dtype: str | None = None,
    quantization: Quantization | None = None,
    host_experts: float = 0.0,
) -> Stage:
    """Load layers [first, last) of a checkpoint, by default all of them."""
    if isinstance(devices, str):
        devices = parse_devices(devices)
    checkpoint = open_checkpoint(path, quantization=quantization)
    text = checkpoint.config.get("text_config", checkpoint.config)
    chosen = LayerRange(*(layers or (0, text["num_hidden_layers"])))
    loader = StageLoader(checkpoint, chosen, dtype, kv_dtype, host_experts)
    return loader.load(devices, capture, ignore_progress)


def load_split(path: Path, cuts: Sequence[int], **options: Any) -> list[Stage]:
    """Load all layers of a checkpoint as stages that end at the cuts."""
    last = load_stage(path).config.num_layers
    bounds = [0, *cuts, last]
    return [load_stage(path, pair, **options) for pair in zip(bounds, bounds[1:], strict=False)]


def load_draft(path: Path, dtype: str | None = None, device: Device | None = None) -> DFlashDraft:
    """Load a draft, by default in its own element type on the CPU."""
    checkpoint = open_checkpoint(path, "--draft")
    draft = drafter_of(checkpoint).load(checkpoint, device or parse_devices("cpu")[0], dtype, ignore_progress)
    assert isinstance(draft, DFlashDraft)
    return draft


class Run:
    """One session over stages of this process, whose hidden rows are passed on without any `TargetSession`."""

    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        capacity: int = 512,
        block_rows: int = 16,
        batch_invariant_rows: int | None = None,
    ) -> None:
        self.stages, self.batch_invariant_rows = stages, batch_invariant_rows
        self.states: list[StageState] = [stage.allocate(capacity, block_rows, batch_invariant_rows) for stage in stages]

    @property
    def length(self) -> int:
        """Committed tokens, the same on all stages."""
        [length] = {state.length for state in self.states}
        return length

    @torch.no_grad()
    def __call__(
        self, token_ids: Sequence[int], features: Features | None = None, *, uncommitted: bool = False
    ) -> torch.Tensor:
        """Run the next tokens, all of which count unless uncommitted; then `commit` says how many do.

        Captures are added to `features`. Returns the logits [n, vocab] after each of the tokens.
        """
        hidden = self.stages[0].embed(tuple(token_ids))
        for stage, state in zip(self.stages, self.states, strict=True):
            hidden = stage.run(state, hidden, features, uncommitted=uncommitted, token_ids=token_ids)
        head = self.stages[-1].head
        assert head is not None
        return head.logits(hidden, self.batch_invariant_rows)

    def verify(self, token_ids: Sequence[int], features: Features | None = None) -> torch.Tensor:
        """Run the next tokens as a call does, but let none of them count before `commit`."""
        return self(token_ids, features, uncommitted=True)

    @torch.no_grad()
    def commit(self, rows: int) -> None:
        """Let the first rows of the last verify count."""
        for stage, state in zip(self.stages, self.states, strict=True):
            stage.commit(state, state.length + rows)

    def recurrent(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the committed convolution inputs [channels, taps - 1] and the state of a linear layer, by its index in
        the model."""
        for stage, state in zip(self.stages, self.states, strict=True):
            for segment, caches in zip(stage.segments, state.caches, strict=True):
                if layer in segment.layers:
                    cache, slot = caches.recurrent, segment.slots[layer - segment.layers.first]
                    assert cache is not None
                    return cache.conv[slot, : cache.taps - 1].T, cache.state[slot]
        raise AssertionError(f"no stage holds layer {layer}")


def unsplit(path: Path, *, kv_dtype: str | None = None, **options: Any) -> Run:
    """Return a session over the whole model in one stage."""
    return Run([load_stage(path, kv_dtype=kv_dtype)], **options)
