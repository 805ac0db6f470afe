"""What a draft takes on a device, and what it wants of the target: from its config.json and its tensors' headers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from coordinator.planning.model_size import ModelSize
from services.dtypes import ITEM_BYTES
from services.layers import LayerRange
from services.model.checkpoint_files import read_config
from services.model.draft_target import DraftAndTarget
from services.model.draft_tensors import draft_bytes
from services.model.drafts import DraftConfig, check_draft_kind, draft_dtype, draft_format
from services.model.quantization import OPTIONS, Quantization
from services.model.random_weights import read_headers


@dataclass(frozen=True, slots=True)
class DraftSize:
    """A draft. All in bytes.

    weight_bytes: as packed as it is stored. cpu_bytes: on a CPU, which unpacks some packed matrices, and holds those of
    keys and values twice. packed: whether any matrix is packed. item_bytes: of one of its elements. capture_bytes: the
    columns of `fc` for one captured block, which each stage keeps for the blocks that it captures. chooser_bytes: of
    weight_bytes, those of what chooses tokens, which are where logits are made.
    """

    config: DraftConfig
    weight_bytes: int
    cpu_bytes: int
    packed: bool
    item_bytes: int
    capture_bytes: int
    chooser_bytes: int = 0

    @property
    def hidden_size(self) -> int:
        """Elements of a hidden row."""
        return self.config.hidden_size

    @property
    def block_size(self) -> int:
        """Rows of a block."""
        return self.config.block_size

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """The 0-based target blocks that it reads."""
        return self.config.capture_layers

    def cache_bytes(self, length: int) -> int:
        """Return the caches of one session of up to `length` tokens."""
        return self.config.cached_elements(length) * self.item_bytes

    def captured(self, layers: LayerRange) -> int:
        """Return how many of these layers it captures."""
        return sum(1 for layer in self.capture_layers if layer in layers)


def read_draft_size(
    directory: Path, target: ModelSize, dtype: str | None, quantization: Quantization | None = None
) -> DraftSize:
    """Read a draft's sizes. dtype: what --dtype says, None for the draft's own. quantization: as of `read_model_size`.

    Raises Unimplemented for a checkpoint that is no draft of a known kind, InvalidArgument for one whose tensors are
    not those of its config.json or that was made for another target, and what `read_headers` raises.
    """
    field = "--draft"
    raw = read_config(directory, field)
    headers = read_headers(directory, raw, field)
    if quantization is not None:
        headers = quantization.headers(headers, directory, OPTIONS[field])
    draft = draft_format(check_draft_kind(raw, directory))
    config = draft.read_config(raw)
    both = DraftAndTarget(str(directory), target.name)
    if config.hidden_size != target.hidden_size:
        raise both.refused(f"its hidden_size is {config.hidden_size}, the target's {target.hidden_size}")
    last = max(config.capture_layers)
    if last >= len(target.layers):
        raise both.refused(f"it captures block {last}, the target has {len(target.layers)} blocks")
    names = draft.find_tensors(config, headers, directory)
    chosen = dtype or draft_dtype(raw, names, headers)
    weight_bytes, cpu_bytes = (
        draft_bytes(names, headers, chosen, draft.is_multiplied_apart, on_cpu=on_cpu) for on_cpu in (False, True)
    )
    of_chooser = {name: names[name] for name in config.chooser_shapes}
    return DraftSize(
        config=config,
        weight_bytes=weight_bytes,
        cpu_bytes=cpu_bytes,
        packed=any(headers[stored].packed is not None for stored in names.values()),
        item_bytes=ITEM_BYTES[chosen],
        capture_bytes=config.hidden_size * config.hidden_size * ITEM_BYTES[target.dtype],
        chooser_bytes=draft_bytes(of_chooser, headers, chosen, draft.is_multiplied_apart, on_cpu=False),
    )
