"""Element types: torch's, the wire's and the checkpoint's names for the same thing, and tensors to bytes and back."""

from __future__ import annotations

import math

import torch

from services.errors import InvalidArgument
from services.tensors import WireTensor

_BY_NAME = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int32": torch.int32,
}
_NAMES = {dtype: name for name, dtype in _BY_NAME.items()}


def dtype_from_name(name: str, field: str = "dtype") -> torch.dtype:
    """Raises InvalidArgument for a type that weights cannot have here."""
    if name not in _BY_NAME or name == "int32":
        raise InvalidArgument(f"{field} {name!r} is not one of float32, bfloat16, float16", field=field)
    return _BY_NAME[name]


def dtype_to_name(dtype: torch.dtype) -> str:
    return _NAMES[dtype]


def to_wire(tensor: torch.Tensor) -> WireTensor:
    """Copy a tensor of any device to bytes."""
    host = tensor.detach().to("cpu").contiguous()
    data = host.view(torch.uint8).numpy().data if host.numel() else b""
    return WireTensor(_NAMES[host.dtype], tuple(host.shape), data)


def from_wire(tensor: WireTensor, device: torch.device) -> torch.Tensor:
    """A tensor over the bytes (no copy of large ones on the CPU), moved to the device."""
    dtype = _BY_NAME[tensor.dtype]
    if not math.prod(tensor.shape):
        return torch.empty(tensor.shape, dtype=dtype, device=device)
    # torch wants a buffer that may be written to. A tensor that came in pieces has one, a small one is copied.
    data = tensor.data if isinstance(tensor.data, bytearray) else bytearray(tensor.data)
    flat = torch.frombuffer(data, dtype=dtype)
    return flat.view(tensor.shape).to(device)
