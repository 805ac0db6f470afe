"""A GGUF file as a checkpoint: its tensors under Hugging Face's names, with what the converter changed undone."""

from __future__ import annotations

import functools
import hashlib
import json
import mmap
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from services.errors import DataLoss
from services.model.checkpoint_files import read_config, read_headers
from services.model.gguf.architectures import stored_tensors
from services.model.gguf.blocks import DENSE
from services.model.gguf.container import GgufTensor, read_gguf
from services.model.gguf.tensors import Elements, HeadOrder, InterleavedHalves
from shard_worker.device.dtypes import dtype_from_name
from shard_worker.weights.checkpoint import Checkpoint, read_file_ahead
from shard_worker.weights.gguf_blocks import unpack_blocks
from shard_worker.weights.packed import LARGEST_POWER, GroupNumbers, PackedWeight
from shard_worker.weights.unread import StoredRows, UnreadWeight, in_memory
from shard_worker.weights.weight import Weight

_SAMPLES, _SAMPLE_BYTES = 64, 4096


class GgufCheckpoint(Checkpoint):
    """One model in one or several GGUF files; only the tensors that are asked for are mapped."""

    def __init__(self, path: str | Path, field: str = "--model") -> None:
        """Read the header. field: the option that named the file, for errors. Raises as `read_headers`."""
        path = Path(path)
        config = read_config(path, field)
        super().__init__(path, config, read_headers(path, config, field))
        self._stored = stored_tensors(read_gguf(path, field))
        self._mapped: dict[str, torch.Tensor] = {}

    def read_ahead(self, names: Iterable[str]) -> None:
        tensors = [self._stored[name].tensor for name in names]
        for path in {tensor.path for tensor in tensors}:
            here = [tensor for tensor in tensors if tensor.path == path]
            read_file_ahead(path, [(tensor.begin, tensor.begin + tensor.nbytes) for tensor in here])

    def tensor(self, name: str) -> torch.Tensor:
        stored = self._stored[name]
        tensor = _rows(stored.tensor).view(dtype_from_name(DENSE[stored.tensor.type.name]))
        match stored.elements:
            case Elements.PLUS_ONE:
                tensor = tensor - 1
            case Elements.MINUS_EXP:
                if not bool((tensor < 0).all()):
                    raise self._damaged(name, "holds numbers that are not below 0, as -exp(w) is")
                tensor = torch.log(-tensor)
        if stored.rows is not None and not stored.rows.is_same:
            tensor = tensor.reshape(stored.shape)[_row_order(stored.rows)]
        if stored.columns is not None and not stored.columns.is_same:
            tensor = tensor[:, _places(stored.columns)]
        return tensor.reshape(stored.shape)

    def packed(self, name: str, device: torch.device, dtype: torch.dtype) -> Weight:
        return in_memory(self.unread(name, device, dtype))

    def unread(self, name: str, device: torch.device, dtype: torch.dtype) -> Weight:
        stored, (rows, columns) = self._stored[name], self.shape(name)
        data = _rows(stored.tensor, at_once=True)
        order = None if stored.rows is None or stored.rows.is_same else _row_order(stored.rows)

        def read(some: slice | torch.Tensor) -> PackedWeight:
            part = self._unpacked(name, data[some if order is None else order[some]], dtype, device)
            self._check_numbers(name, part)
            return part

        kind = (stored.tensor.type.name, stored.scale is None)
        weight = UnreadWeight([StoredRows(rows, read)], columns, kind, dtype=dtype, device=device)
        if stored.columns is None or stored.columns.is_same:
            return weight
        heads = torch.tensor(stored.columns.heads, device=device)
        return weight.whole().with_columns(heads, stored.columns.size)

    def rows(self, name: str, indices: Sequence[int]) -> torch.Tensor:
        """As `Checkpoint.rows`; nothing but these rows is unpacked."""
        stored = self._stored[name]
        if self.headers[name].packed is None or stored.rows is not None or stored.columns is not None:
            return super().rows(name, indices)
        if name not in self._mapped:
            self._mapped[name] = _rows(stored.tensor)
        return self._unpacked(name, self._mapped[name][list(indices)], torch.float32).unpacked()

    @functools.cached_property
    def fingerprint(self) -> str:
        """As `Checkpoint.fingerprint`; what the metadata says of text does not count."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        in_order = [self._stored[name] for name in sorted(self._stored)]
        tensors = [tensor for stored in in_order for tensor in (stored.tensor, stored.scale) if tensor is not None]
        for tensor in tensors:
            digest.update(f"{tensor.name} {tensor.type.name} {tensor.shape}\n".encode())
        for path in sorted({tensor.path for tensor in tensors}):
            here = [tensor for tensor in tensors if tensor.path == path]
            first, last = min(one.begin for one in here), max(one.begin + one.nbytes for one in here)
            with path.open("rb") as file:
                for sample in range(_SAMPLES):
                    file.seek(first + (last - first) * sample // _SAMPLES)
                    digest.update(file.read(_SAMPLE_BYTES))
        return digest.hexdigest()[:32]

    def _unpacked(
        self, name: str, data: torch.Tensor, dtype: torch.dtype, device: torch.device | None = None
    ) -> PackedWeight:
        """Return some rows of a matrix as `unpack_blocks` does, with the scale of the whole matrix if it has one."""
        stored = self._stored[name]
        weight = unpack_blocks(stored.tensor.type, data, dtype, device)
        if stored.scale is None:
            return weight
        factors = _rows(stored.scale).view(torch.float32).to(weight.device).repeat(weight.rows, 1)
        scales = GroupNumbers(weight.scales.values, weight.scales.group, factors, weight.columns)
        return weight.with_rows(weight.codes, scales, None)

    def _check_numbers(self, name: str, weight: PackedWeight) -> None:
        """Raise DataLoss for scales that are no finite numbers, or too large for kernels."""
        for numbers in (weight.scales, weight.offsets):
            if numbers is not None and not numbers.are_finite:
                raise self._damaged(name, "has scales that are NaN or infinite; they must be finite")
        if weight.packing.powers and (weight.scales.values > LARGEST_POWER).any():
            raise self._damaged(name, "has scales above 2**17; they must be 2**17 or less")

    def _damaged(self, name: str, what: str) -> DataLoss:
        stored = self._stored[name].tensor
        return DataLoss(f"tensor {stored.name} in {stored.path} {what}", reason="TENSOR_CONTENTS", field=name)


def _rows(tensor: GgufTensor, *, at_once: bool = False) -> torch.Tensor:
    """Return the bytes of a tensor over the mapped file, uint8 [rows, bytes of a row], which writes never reach.

    at_once: whether all of them will be read now, so that the file is read ahead.
    """
    start = tensor.begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    try:
        with tensor.path.open("rb") as file:
            size = tensor.begin - start + tensor.nbytes
            mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY, offset=start)
            if at_once:
                mapped.madvise(mmap.MADV_WILLNEED)
    except (OSError, ValueError) as error:
        raise DataLoss(f"tensor {tensor.name} in {tensor.path} cannot be read: {error}", field=tensor.name) from error
    content = torch.frombuffer(mapped, dtype=torch.uint8, count=tensor.nbytes, offset=tensor.begin - start)
    return content.view(-1, tensor.type.row_bytes(tensor.shape[-1]))


def _places(order: HeadOrder | InterleavedHalves) -> torch.Tensor:
    """Return which row (or column) of the file stands at each place of the checkpoint's tensor, behind the first ones
    that stay."""
    heads = torch.tensor(order.heads).unsqueeze(1) * order.size + torch.arange(order.size)
    return order.first + heads.flatten()


def _row_order(order: HeadOrder | InterleavedHalves) -> torch.Tensor:
    """Return which row of the file stands at each place of the checkpoint's tensor."""
    return torch.cat([torch.arange(order.first), _places(order)])
