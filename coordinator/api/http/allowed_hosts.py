"""By which names clients may call the server.

A web site can make its own name mean an address of its visitors' (DNS rebinding); their browsers would then let it
read whatever a server there answers, even one that listens on loopback. Its name still stands in the header `Host`.
Addresses cannot be made to mean anything else, so they are always let in.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence

from coordinator.api.http.errors import HttpError, HttpRefusal

_HOST = re.compile(r"(\[[^\[\]]*\]|[^:]*)(?::[0-9]*)?")


class AllowedHosts:
    """Tells which names are let in: exactly those given, or with `*.` in front all below one; a lone `*` means all."""

    def __init__(self, names: Sequence[str]) -> None:
        names = [name.lower().rstrip(".") for name in names]
        self._all = "*" in names
        self._exact = frozenset(names)
        self._ends = tuple(name.removeprefix("*") for name in names if name.startswith("*."))

    def check(self, headers: Sequence[str]) -> None:
        """Check the values of `Host`; a client without one is no browser. Raises HttpRefusal for a name not let in."""
        for header in headers:
            match = _HOST.fullmatch(header.strip().lower())
            name = match[1].rstrip(".") if match is not None else ""
            if not (self._all or name in self._exact or name.endswith(self._ends) or _is_address(name)):
                raise HttpRefusal(
                    HttpError(
                        403,
                        f"Host is {header[:80]!r}, a name that this server does not go by: call it by its address or "
                        f"start it with --allowed-hosts {name[:80] or 'NAME'}",
                        "permission_error",
                        "permission_error",
                        "host_not_allowed",
                    )
                )


EVERY_HOST = AllowedHosts(["*"])


def own_names(bound: str, certificate_names: Sequence[str]) -> list[str]:
    """Return the names that a server may be called by unless it is told: none of them can be another one's site.

    bound: where it listens. certificate_names: those of its certificate, which may begin with `*.`.
    """
    here = socket.gethostname()
    return ["localhost", "*.localhost", here, f"{here}.local", bound, *certificate_names]


def is_loopback_name(headers: Sequence[str]) -> bool:
    """Tell whether a client calls the server by a name that other servers of its host go by as well."""
    matches = [_HOST.fullmatch(header.strip().lower()) for header in headers]
    names = [match[1].rstrip(".") for match in matches if match is not None]
    return any(name == "localhost" or name.endswith(".localhost") for name in names)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
