"""A draft kind that proposes the known token again and again: the least that a kind must offer to be served.

Both packages that look for draft kinds find this one file: what it says of a checkpoint, and its math.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from services.model.tensor_headers import TensorHeader
from shard_worker.cache.page_pool import PagePool
from shard_worker.cache.prefix_state import GroupKind, StateView, TensorGroup, WholeView
from shard_worker.device.devices import Device
from shard_worker.drafting.choosers import Chooser
from shard_worker.drafting.choosers.argmax import Argmax
from shard_worker.drafting.drafters import DraftRunner
from shard_worker.model.features import Features
from shard_worker.weights.checkpoint import Checkpoint

LAYOUTS = ()


@dataclass(frozen=True)
class EchoConfig:
    """As `services.model.drafts.DraftConfig` describes it."""

    hidden_size: int
    vocab_size: int
    max_position: int
    block_size: int
    mask_token_id: int
    capture_layers: tuple[int, ...]
    num_target_layers: int
    draft_vocab_size: None = None
    layout: str = "Echo"

    @property
    def chooser_shapes(self) -> dict[str, tuple[int, ...]]:
        return {}

    def cached_elements(self, max_length: int) -> int:
        return self.hidden_size


def read_config(raw: Mapping[str, Any]) -> EchoConfig:
    own = raw["echo_config"]
    return EchoConfig(**{**own, "capture_layers": tuple(own["capture_layers"])})


def tensor_shapes(config: EchoConfig) -> dict[str, tuple[int, ...]]:
    return {"fc.weight": (config.hidden_size, len(config.capture_layers) * config.hidden_size)}


def find_tensors(config: EchoConfig, headers: Mapping[str, TensorHeader], directory: Path) -> dict[str, str]:
    return {name: name for name in tensor_shapes(config)}


def is_multiplied_apart(name: str) -> bool:
    return False


@dataclass
class EchoState:
    """The last row that the features' sum had."""

    last: torch.Tensor
    length: int = 0
    batch_invariant_rows: int | None = None

    @property
    def size_bytes(self) -> int:
        return self.last.nbytes

    def views(self) -> list[StateView]:
        return [WholeView(self.last[None])]


@dataclass(frozen=True)
class EchoDraft:
    """As `shard_worker.drafting.drafters.Draft` describes it."""

    config: EchoConfig
    device: Device
    dtype: torch.dtype
    fingerprint: str
    weight_bytes: int
    fc: torch.Tensor
    has_kernels: bool = False
    own_head: None = None
    chooser: Chooser = Argmax()

    def allocate(self, max_length: int, batch_invariant_rows: int | None = None) -> EchoState:
        return EchoState(torch.zeros(self.config.hidden_size, dtype=self.dtype))

    def state_groups(self) -> tuple[TensorGroup, ...]:
        return (TensorGroup(GroupKind.STATE, ("draft.last",), (self.config.hidden_size,), self.dtype),)

    def mix(self, features: Features) -> torch.Tensor:
        if features.total is not None:
            return features.total.to(self.dtype)
        return torch.cat([features.slices[index] for index in sorted(features.slices)], -1) @ self.fc.T

    def append(self, states: Sequence[EchoState], counts: Sequence[int], features: Features) -> None:
        for state, rows in zip(states, self.mix(features).split(list(counts)), strict=True):
            state.last.copy_(rows[-1])
            state.length += len(rows)

    def propose(self, states: Sequence[EchoState], embedded: torch.Tensor, draft_tokens: Sequence[int]) -> torch.Tensor:
        return torch.cat([known.expand(count, -1) for known, count in zip(embedded[:-1], draft_tokens, strict=True)])

    def make_runner(self, head: Any, *, graphs: bool, sessions: int | None = None) -> DraftRunner:
        raise AssertionError("there are no kernels")


def load(
    checkpoint: Checkpoint,
    device: Device,
    dtype: str | None,
    on_progress: Callable[[int, int], None],
    pool: PagePool | None = None,
    *,
    projected: bool = False,
) -> EchoDraft:
    config, fc = read_fc(checkpoint)
    on_progress(fc.nbytes, fc.nbytes)
    return EchoDraft(config, device, fc.dtype, checkpoint.fingerprint, fc.nbytes, fc)


def load_chooser(checkpoint: Checkpoint, device: Device, dtype: str) -> Chooser:
    return Argmax()


def read_fc(checkpoint: Checkpoint) -> tuple[EchoConfig, torch.Tensor]:
    return read_config(checkpoint.config), checkpoint.tensor("fc.weight")
