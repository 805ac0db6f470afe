"""Tensors to bytes and back."""

from __future__ import annotations

import pytest
import torch

from services.errors import InvalidArgument
from services.messages.tensors import WireTensor
from shard_worker.device.dtypes import (
    adjoining_rows,
    bytes_of,
    dtype_from_name,
    dtype_to_name,
    from_wire,
    rows_from_wire,
    to_wire,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(3, 5), (1,), (2, 3, 4), (0, 7)])
def test_a_tensor_survives_the_wire(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Every type and shape, empty ones too, comes back bit by bit; the announced size is the real one."""
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 100).to(dtype)

    wire = to_wire(tensor)
    back = from_wire(wire, CPU)

    assert wire.size_bytes == memoryview(wire.data).nbytes == tensor.numel() * tensor.element_size()
    assert (back.dtype, back.shape) == (dtype, tensor.shape)
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


def test_bytes_are_row_major_and_little_endian() -> None:
    """The layout on the wire is fixed, whatever the tensor's strides."""
    tensor = torch.tensor([[1, 3], [2, 4]], dtype=torch.int32).T

    assert bytes(to_wire(tensor).data) == b"".join(number.to_bytes(4, "little") for number in (1, 2, 3, 4))


def test_a_slice_is_sent_without_what_surrounds_it() -> None:
    """A view of a larger tensor travels alone."""
    whole = torch.arange(12.0).view(4, 3)

    assert torch.equal(from_wire(to_wire(whole[1:3, :2]), CPU), torch.tensor([[3.0, 4.0], [6.0, 7.0]]))


def test_read_only_bytes_can_be_read() -> None:
    """Bytes as a message holds them need no copy and raise no warning."""
    wire = WireTensor("float32", (2,), bytes(to_wire(torch.tensor([1.5, -2.0])).data))

    assert from_wire(wire, CPU).tolist() == [1.5, -2.0]


def test_rows_that_adjoin_in_one_memory_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours in their order are one tensor over the same memory, which it keeps; all else is copied, and small rows
    are not looked for."""
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
    rows = torch.randn(8, 4096, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    memory = bytes_of(rows.clone())

    def cut(first: int, last: int, memory: memoryview = memory) -> WireTensor:
        return WireTensor("bfloat16", (last - first, 4096), memory[first * 8192 : last * 8192])

    whole = adjoining_rows([cut(2, 4), cut(4, 7), cut(7, 8)])
    assert whole is not None
    assert torch.equal(whole, rows[2:])
    memory[2 * 8192 : 3 * 8192] = memory[0:8192]
    assert torch.equal(whole[0], rows[0])
    other = bytes_of(rows.clone())
    for apart in (
        [cut(0, 2), cut(3, 5)],
        [cut(4, 8), cut(0, 4)],
        [cut(0, 4), cut(4, 8, other)],
        [cut(2, 4, memoryview(bytearray(other))), cut(4, 6, memoryview(bytearray(other)))],
        [cut(row, row + 1) for row in range(8)],
    ):
        assert adjoining_rows(apart) is None
        assert torch.equal(rows_from_wire(apart, CPU), torch.cat([from_wire(one, CPU) for one in apart]))
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: False)
    assert adjoining_rows([cut(2, 8)]) is None


def test_names_of_types() -> None:
    """Weights may be float32, bfloat16 or float16; anything else is refused with these."""
    for name in ("float32", "bfloat16", "float16"):
        assert dtype_to_name(dtype_from_name(name)) == name
    for name in ("int32", "float8", "float8_e4m3fn", ""):
        with pytest.raises(InvalidArgument, match="float32, bfloat16, float16"):
            dtype_from_name(name, "--dtype")
