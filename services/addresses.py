"""Worker addresses: `unix:PATH` or `HOST:PORT`, and how they differ from device names."""

from __future__ import annotations

import os
import re
from urllib.parse import quote

from services.errors import InvalidArgument

_HOST_PORT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")
_LOOPBACK = re.compile(r"localhost|127\.[0-9.]+|\[::1\]")
_UNIX_PATH_BYTES = 107


def parse_address(text: str, field: str = "address") -> str:
    """Return an address in its plain form. Raises InvalidArgument naming the field for a text of neither form."""
    if text.startswith("unix:"):
        path = text.removeprefix("unix:").removeprefix("//")
        if not path or "\0" in path or len(os.fsencode(path)) > _UNIX_PATH_BYTES:
            raise InvalidArgument(
                f"{field} {text!r} must name a socket path of 1 to {_UNIX_PATH_BYTES} bytes, none of them 0",
                field=field,
            )
        return f"unix:{path}"
    match = _HOST_PORT.fullmatch(text)
    if match is None or int(match["port"]) > 65535:
        raise InvalidArgument(f"{field} {text!r} is not unix:PATH or HOST:PORT", field=field)
    return text


def is_loopback(address: str) -> bool:
    """Tell whether only processes of this host can reach the address."""
    host = address.rpartition(":")[0]
    return address.startswith("unix:") or _LOOPBACK.fullmatch(host) is not None


def socket_path(address: str) -> str | None:
    """Return the path of a `unix:` address, None for any other."""
    return address.removeprefix("unix:") if address.startswith("unix:") else None


def grpc_target(address: str) -> str:
    """Return the address as gRPC reads it, where a path is part of a URI."""
    path = socket_path(address)
    return address if path is None else f"unix:{quote(os.fsencode(path))}"
