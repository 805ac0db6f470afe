"""Says where flashsplit's own kernels can run. Without a GPU or without Triton nothing of them is imported."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable, Sequence

import structlog

from services.errors import FailedPrecondition
from services.model.config import ModelConfig
from shard_worker.device import devices
from shard_worker.device.devices import Device, float8_lack
from shard_worker.model.layer_weights import DecoderWeights, ExpertsBesideWeights, ExpertsWeights
from shard_worker.weights.packed import PackedWeight
from shard_worker.weights.tiled import TiledWeight, tiling_of
from shard_worker.weights.weight import ReorderedWeight, StackedWeight, Weight

log = structlog.get_logger()

_WIDEST = 256
"""Numbers of the widest heads of drafts and of recurrent layers."""


def can_run(device: Device, head_sizes: Sequence[int]) -> bool:
    """Return whether kernels run on a device for heads of these sizes; else plain torch serves, and the log says why.

    They need a GPU that Triton has matrix instructions for, and heads whose size is a power of two.
    """
    return _runs(device, tuple(head_sizes), _WIDEST)


def can_run_model(device: Device, config: ModelConfig) -> bool:
    """Return whether kernels run on a device for all kinds of heads that a target has, as `can_run` does. Its attention
    may have wider ones than recurrent layers, where registers hold these."""
    linear = config.linear
    recurrent = () if linear is None else (linear.key_head_dim, linear.value_head_dim)
    attending = dict.fromkeys(shape.head_dim for shape in config.attention_shapes.values())
    return _runs(device, tuple(attending), 2 * _WIDEST) and _runs(device, recurrent, _WIDEST)


@functools.cache
def _runs(device: Device, head_sizes: tuple[int, ...], widest: int) -> bool:
    """Do as `can_run` says, and log what is missing once."""
    target = devices.kernel_target(device.torch_device)
    if target is None:
        return False
    lack, widest = target.lack, min(widest, target.widest_heads)
    if importlib.util.find_spec("triton") is None:
        lack = "Triton is not installed"
    elif odd := [size for size in head_sizes if not (16 <= size <= widest and size & (size - 1) == 0)]:
        accepted = [str(size) for size in (16, 32, 64, 128, 256, 512) if size <= widest]
        lack = f"heads have {odd[0]} numbers, and {', '.join(accepted[:-1])} or {accepted[-1]} are needed"
    if lack is not None:
        log.warning("kernels.unavailable", device=device.name, architecture=target.architecture, why=lack)
    return lack is None


def can_read(device: Device, matrices: Iterable[Weight]) -> bool:
    """Return whether kernels on a device, which run there, multiply by all these matrices.

    They do by dense ones, and by packed ones of the forms that they know. Otherwise plain torch serves, and the log
    says so once.
    """
    lacks = [lack for matrix in matrices if (lack := _reading_lack(device, matrix)) is not None]
    if lacks:
        _log_unread(device, lacks[0])
    return not lacks


def have_layers(device: Device, layers: Iterable[DecoderWeights]) -> bool:
    """Return whether kernels on a device, which run there, have layers of all these forms.

    Their feed-forward part is SwiGLU or GeGLU without biases, or a mixture of experts whose matrices have one form and
    are on the device, or both beside each other. Otherwise plain torch serves, and the log says so once.
    """
    for weights in layers:
        mlp = weights.mlp.experts if isinstance(weights.mlp, ExpertsBesideWeights) else weights.mlp
        lack = None
        if isinstance(mlp, ExpertsWeights):
            if mlp.in_host:
                lack = "experts in the host's memory"
            elif mlp.together is None:
                lack = "experts that are in memory in unlike forms"
        elif mlp.gate_up_bias is not None:
            lack = "biases in SwiGLU"
        if lack is not None:
            log_missing(device, lack)
            return False
    return True


@functools.cache
def log_missing(device: Device, what: str) -> None:
    """Log once that kernels on a device, which run there, have nothing for this, so that plain torch serves."""
    log.warning("kernels.unavailable", device=device.name, why=f"there are none for {what}; plain torch serves, slower")


def _reading_lack(device: Device, matrix: Weight) -> str | None:
    """Return why kernels do not multiply by a matrix, None where they do."""
    if isinstance(matrix, StackedWeight):
        return next((lack for part in matrix.parts if (lack := _reading_lack(device, part)) is not None), None)
    if isinstance(matrix, ReorderedWeight):
        return _reading_lack(device, matrix.weight)
    try:
        if isinstance(matrix, PackedWeight):
            tiling_of(matrix, lane_columns=0)
        elif isinstance(matrix, TiledWeight):
            # Only where kernels can run is Triton installed.
            from shard_worker.model.kernels.codes import form_of

            form_of(matrix)
    except ValueError as error:
        return f"a matrix is packed in a form that they do not know: {error}"
    return None


@functools.cache
def _log_unread(device: Device, lack: str) -> None:
    log.warning("kernels.unavailable", device=device.name, why=f"{lack}; plain torch unpacks matrices, slower")


def can_prefill(device: Device, config: ModelConfig) -> bool:
    """Return whether kernels take many rows through recurrent layers there, which needs much shared memory."""
    if config.linear is None or not can_run_model(device, config):
        return False
    from shard_worker.model.kernels.delta_prefill import choose

    return choose(devices.kernel_target(device.torch_device)) is not None


def can_prefill_experts(device: Device, layers: Iterable[DecoderWeights]) -> bool:
    """Return whether kernels on a device, which run there, read the matrices of all routed experts that stand together
    in these layers, also beside a dense part. Others are not asked for."""
    mixtures = [own.mlp.experts if isinstance(own.mlp, ExpertsBesideWeights) else own.mlp for own in layers]
    together = [own.together for own in mixtures if isinstance(own, ExpertsWeights)]
    return can_read(device, [matrix for own in together if own is not None for matrix in (own.gate_up, own.down)])


def check_float8(device: Device, *, kernels: bool) -> None:
    """Raises FailedPrecondition where keys and values cannot be kept in 8-bit floats. kernels: as of `can_run`."""
    lack = float8_lack(device, kernels=kernels)
    if lack is not None:
        raise FailedPrecondition(
            f"--kv-dtype fp8: {device.name} cannot keep keys and values as float8_e4m3fn: {lack}; leave it out, or "
            "give these layers to another device",
            reason="KV_DTYPE_UNSUPPORTED",
            field="kv_dtype",
        )
