"""What a checkpoint says without its weights: its configuration, and the headers of its tensors.

`read_config` and `read_headers` take the path that a user names; a kind of checkpoint other than a Hugging Face
directory is told apart in these two alone, and gives the same: a configuration in Hugging Face's words, and headers by
Hugging Face's names. It reads and never writes. It must not know model families.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from services.errors import DataLoss, InvalidArgument, NotFound, Unimplemented
from services.model.gguf import architectures
from services.model.gguf.blocks import SERVED
from services.model.gguf.container import SUFFIX, gguf_stem, is_gguf, read_gguf
from services.model.gguf.tensors import StoredTensor
from services.model.packed_parts import CONFIG_KEY
from services.model.packings import logical_headers
from services.model.safetensors_header import SafetensorsHeader, read_header
from services.model.tensor_headers import PackedMatrix, TensorHeader

CONFIG = "config.json"
MODELOPT = "hf_quant_config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def read_json_object(path: Path, field: str | None = None) -> dict[str, Any]:
    """Return the JSON object in a file. field: the option that named the file or its directory.

    Raises NotFound when there is no such file, InvalidArgument when it cannot be read or holds no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotFound(
            f"{field or 'checkpoint'} {str(path.parent)!r} has no {path.name}: name a Hugging Face checkpoint "
            "directory",
            field=field,
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} is not JSON: {error}", field=field) from error
    if not isinstance(value, dict):
        raise InvalidArgument(f"{path} must hold a JSON object", field=field)
    return value


def read_config(directory: str | Path, field: str = "--model") -> dict[str, Any]:
    """Return a checkpoint's config.json, with what ModelOpt says in a file of its own as its quantization_config; of a
    GGUF file what its metadata says of all that.

    Raises NotFound when the directory or the file is missing, InvalidArgument when the file holds no JSON object, and
    for GGUF what `read_gguf` and its architectures raise.
    """
    if is_gguf(Path(directory)):
        return architectures.read_config(read_gguf(Path(directory), field))
    # Unlike `Path.is_dir`, it takes a name that is too long for one that does not exist.
    if not os.path.isdir(directory):
        raise NotFound(f"{field} {str(directory)!r} is not a directory on this host", field=field)
    _check_not_of_gguf(Path(directory), field)
    config = read_json_object(Path(directory) / CONFIG, field)
    separate = Path(directory) / MODELOPT
    if CONFIG_KEY not in config and separate.exists():
        settings = read_json_object(separate, field).get("quantization")
        config[CONFIG_KEY] = {"quant_method": "modelopt", **(settings if isinstance(settings, Mapping) else {})}
    return config


def _check_not_of_gguf(directory: Path, field: str) -> None:
    """Raise InvalidArgument for a directory whose model is a GGUF file, naming the file."""
    files = [] if (directory / CONFIG).exists() else sorted(directory.glob(f"*{SUFFIX}"))
    if files:
        raise InvalidArgument(
            f"{field} {str(directory)!r} has no {CONFIG} but GGUF files: name one, like {files[0]}", field=field
        )


def model_name(path: Path) -> str:
    """Return what a checkpoint is called by its path: the directory, or the GGUF file without what all such files end
    with."""
    return gguf_stem(path) if is_gguf(path) else path.name


def weight_files(directory: Path, field: str) -> list[Path]:
    """Return the safetensors files of a checkpoint: those that its index names, else the single one.

    Raises InvalidArgument for an index without a weight_map or with names that lead out of the directory.
    """
    index = directory / INDEX
    if not index.exists():
        return [directory / SINGLE]
    weight_map = read_json_object(index, field).get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise InvalidArgument(f"{index} has no weight_map", field=field)
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise InvalidArgument(f"{index} names {name!r}, which is not a file of that directory", field=field)
    return [directory / name for name in names]


def read_headers(directory: Path, config: Mapping[str, Any], field: str) -> dict[str, TensorHeader]:
    """Return the headers of all tensors of a checkpoint by name, packed matrices by the names that they stand for.

    config: its config.json. field: the option that named the directory.

    Raises NotFound for a missing file, DataLoss for one that is not safetensors, and what `weight_files` and
    `logical_headers` raise; for a GGUF file as `read_config`, and Unimplemented for types that are not served.
    """
    if is_gguf(directory):
        stored = architectures.stored_tensors(read_gguf(directory, field))
        return {name: _gguf_header(tensor, directory) for name, tensor in stored.items()}
    holders: dict[str, Path] = {}
    headers: dict[str, TensorHeader] = {}
    for path in weight_files(directory, field):
        try:
            header = read_file_header(path)
        except FileNotFoundError:
            raise missing_file(path, field) from None
        except (DataLoss, OSError) as error:
            raise unreadable_file(path, field, error) from error
        for name, entry in header.tensors.items():
            if name in headers:
                raise tensor_twice(name, holders[name], path, field)
            headers[name], holders[name] = TensorHeader(entry.code, entry.shape), path
    return logical_headers(config, headers, directory)


def read_file_header(path: Path) -> SafetensorsHeader:
    """Return the header of a safetensors file. Raises DataLoss for one that is not readable, and OSError."""
    with path.open("rb") as file:
        return read_header(functools.partial(_read, file), path.stat().st_size)


def _gguf_header(stored: StoredTensor, path: Path) -> TensorHeader:
    kind = stored.tensor.type
    if kind.name not in SERVED:
        raise Unimplemented(
            f"tensor {stored.tensor.name} in {path} is of type {kind.name}, which is not served, only "
            f"{', '.join(SERVED)} are: take a file of another type, such as Q4_K_M, or convert the model to one",
            field=stored.tensor.name,
        )
    if kind.held is None:
        return TensorHeader(kind.name, stored.shape)
    packed = PackedMatrix(
        kind.name,
        bits=kind.held_bits(stored.shape[-1]),
        group=kind.held.group,
        stored_bytes=stored.tensor.nbytes,
        loaded_bytes=stored.loaded_bytes,
        cpu_bits=kind.cpu_bits(stored.shape[-1]),
    )
    return TensorHeader(kind.name, stored.shape, packed)


def tensor_twice(name: str, first: Path, second: Path, field: str) -> InvalidArgument:
    """Return the error for a tensor that two files of a checkpoint hold."""
    return InvalidArgument(
        f"tensor {name} is in {first} and in {second}: a checkpoint must have it once",
        reason="TENSOR_TWICE",
        field=field,
    )


def missing_file(path: Path, field: str) -> NotFound:
    """Return the error for a weight file that is not there."""
    return NotFound(f"weight file {path} is missing", field=field)


def unreadable_file(path: Path, field: str, error: Exception) -> DataLoss:
    """Return the error for a weight file that cannot be read."""
    return DataLoss(f"weight file {path} cannot be read ({error}): it is truncated or not safetensors", field=field)


def _read(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    return file.read(size)
