"""Element types: torch's, the wire's and the checkpoint's names for the same thing, and tensors to bytes and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.dtypes import FLOAT8, WEIGHT_DTYPES
from services.errors import InvalidArgument
from services.messages.tensors import WireTensor

_BY_NAME = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int32": torch.int32,
    FLOAT8: torch.float8_e4m3fn,
}
_NAMES = {dtype: name for name, dtype in _BY_NAME.items()}


def dtype_from_name(name: str, field: str = "dtype") -> torch.dtype:
    """Raises InvalidArgument for a type that weights cannot have here."""
    if name not in WEIGHT_DTYPES:
        raise InvalidArgument(f"{field} {name!r} is not one of {', '.join(WEIGHT_DTYPES)}", field=field)
    return _BY_NAME[name]


def kv_dtype_from_name(name: str | None) -> torch.dtype | None:
    """What keys and values are kept in; None for the type of the weights.

    Raises InvalidArgument for a type that they cannot have.
    """
    if name not in (None, FLOAT8):
        raise InvalidArgument(f"kv_dtype {name!r} is not {FLOAT8}, nor left to the weights", field="kv_dtype")
    return None if name is None else _BY_NAME[name]


def dtype_to_name(dtype: torch.dtype) -> str:
    return _NAMES[dtype]


PAGE_LOCKED_BYTES = 128 << 10
"""From this size on copies from GPUs go through page-locked memory: at 8 MB that takes a third of the time, at 256 KB
as long as without, but nothing waits for it."""


@dataclass(frozen=True, slots=True)
class OnHost:
    """A tensor that is copied to page-locked memory behind what computes it, and perhaps overwritten by the next step.
    done: when it is there; None where nothing needs to be waited for."""

    tensor: torch.Tensor
    done: torch.cuda.Event | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> OnHost:
        """Queue a copy of a GPU's tensor, in memory of its own."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        return cls(host, torch.cuda.current_stream(tensor.device).record_event())

    @property
    def there(self) -> bool:
        """Whether `wait` would return at once."""
        return self.done is None or bool(self.done.query())  # type: ignore[no-untyped-call]

    def wait(self) -> torch.Tensor:
        if self.done is not None:
            self.done.synchronize()
        return self.tensor


class Leaving:
    """Tensors on their way to the host: copies are queued behind what computes them; nothing waits before `wait`."""

    def __init__(self, tensors: Sequence[torch.Tensor], first: OnHost | None = None) -> None:
        """first: what comes before them, and is there before them."""
        self._first = first
        self._host = [_queued(tensor.detach()) for tensor in tensors]
        # Several devices of one stage have a stream each.
        devices = {tensor.device for tensor in tensors if _goes_page_locked(tensor)}
        streams = [torch.cuda.current_stream(device) for device in devices]
        self._arrived = [stream.record_event() for stream in streams]

    @property
    def lent(self) -> bool:
        """Whether the first one lasts only until the next step."""
        return self._first is not None

    @property
    def there(self) -> bool:
        """Whether nothing needs to be waited for."""
        return self._first is None and all(event.query() for event in self._arrived)

    def views(self) -> list[WireTensor]:
        """At once: where their bytes will be."""
        first = [] if self._first is None else [self._first.tensor]
        return [_bytes_of(tensor) for tensor in (*first, *self._host)]

    def wait_first(self) -> None:
        """From any thread: until the first one is there."""
        if self._first is not None:
            self._first.wait()
        else:
            self.wait()

    def wait(self) -> list[WireTensor]:
        """From any thread: until all are there; their bytes."""
        if self._first is not None:
            self._first.wait()
        for event in self._arrived:
            event.synchronize()
        return self.views()


def to_wire(tensor: torch.Tensor) -> WireTensor:
    """Copy a tensor of any device to bytes."""
    return Leaving([tensor]).wait()[0]


def _goes_page_locked(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu" and tensor.nbytes >= PAGE_LOCKED_BYTES


def _queued(tensor: torch.Tensor) -> torch.Tensor:
    if not _goes_page_locked(tensor):
        return tensor.contiguous().cpu()
    # A copy to memory of another kind would wait for the device here.
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _bytes_of(host: torch.Tensor) -> WireTensor:
    return WireTensor(_NAMES[host.dtype], tuple(host.shape), bytes_of(host))


def bytes_of(host: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, not copied."""
    return host.view(torch.uint8).numpy().data.cast("B") if host.numel() else memoryview(b"")


def from_wire(tensor: WireTensor, device: torch.device) -> torch.Tensor:
    """A tensor of the bytes on the device."""
    return to_device(over_wire(tensor), device)


def rows_from_wire(tensors: Sequence[WireTensor], device: torch.device) -> torch.Tensor:
    """The rows of tensors that are alike, one's behind the other's, on the device."""
    shape = (sum(tensor.shape[0] for tensor in tensors), *tensors[0].shape[1:])
    host = torch.empty(shape, dtype=_BY_NAME[tensors[0].dtype], pin_memory=device.type != "cpu")
    copy_rows(tensors, bytes_of(host))
    return host.to(device, non_blocking=True)


def copy_rows(tensors: Sequence[WireTensor], into: memoryview) -> None:
    """Write the bytes of tensors one behind the other."""
    first = 0
    # One by one: torch would wake all its threads for them.
    for tensor in tensors:
        data = memoryview(tensor.data)
        into[first : first + len(data)] = data
        first += len(data)


def over_wire(tensor: WireTensor) -> torch.Tensor:
    """A tensor on the CPU over the bytes; no copy of large ones."""
    dtype = _BY_NAME[tensor.dtype]
    if not math.prod(tensor.shape):
        return torch.empty(tensor.shape, dtype=dtype)
    # torch wants a buffer that may be written to. A tensor that came in pieces has one, a small one is copied.
    data = memoryview(tensor.data)
    return torch.frombuffer(bytearray(data) if data.readonly else data, dtype=dtype).view(tensor.shape)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same on a device."""
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    # Queued behind the step before, while the host goes on: a copy from memory of another kind would wait for that.
    host = tensor.contiguous()
    locked = torch.empty(host.shape, dtype=host.dtype, pin_memory=True)
    copy_bytes(locked, host)
    return locked.to(device, non_blocking=True)


def joined_on(tensors: Sequence[torch.Tensor], device: torch.device | None) -> torch.Tensor:
    """Return the rows of tensors that are alike, one's behind the other's: where they are, or from the CPU to a GPU."""
    if device is None or device.type == "cpu" or any(tensor.device.type != "cpu" for tensor in tensors):
        return torch.cat([*tensors])
    shape = (sum(map(len, tensors)), *tensors[0].shape[1:])
    locked, first = torch.empty(shape, dtype=tensors[0].dtype, pin_memory=True), 0
    for tensor in tensors:
        copy_bytes(locked[first : first + len(tensor)], tensor.contiguous())
        first += len(tensor)
    return locked.to(device, non_blocking=True)


def copy_bytes(into: torch.Tensor, source: torch.Tensor) -> None:
    """Between contiguous tensors on the CPU, by one thread: torch would wake all it has, for some milliseconds."""
    np.copyto(into.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())
