"""Worker addresses: `unix:PATH` or `HOST:PORT`, and how they differ from device names."""

from __future__ import annotations

import re

from services.errors import InvalidArgument

_HOST_PORT = re.compile(r"^(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>\d{1,5})$")
_UNIX_PATH_BYTES = 107


def parse_address(text: str, field: str = "address") -> str:
    """The address as gRPC wants it. Raises InvalidArgument when it is neither form."""
    if text.startswith("unix:"):
        path = text.removeprefix("unix:").removeprefix("//")
        if not path or len(path.encode()) > _UNIX_PATH_BYTES:
            raise InvalidArgument(
                f"{field} {text!r} must name a socket path of 1 to {_UNIX_PATH_BYTES} bytes",
                field=field,
            )
        return f"unix:{path}"
    match = _HOST_PORT.match(text)
    if match is None or int(match["port"]) > 65535:
        raise InvalidArgument(f"{field} {text!r} is not unix:PATH or HOST:PORT", field=field)
    return text


def is_loopback(address: str) -> bool:
    """Whether only processes of this host can reach the address."""
    host = address.rpartition(":")[0]
    return address.startswith("unix:") or host == "localhost" or host.startswith(("127.", "[::1]"))


def socket_path(address: str) -> str | None:
    """The path behind a `unix:` address, None for any other."""
    return address.removeprefix("unix:") if address.startswith("unix:") else None
