"""Taking the port on which a gRPC server listens, at every address that a name stands for.

A name can stand for several addresses, `localhost` for 127.0.0.1 and ::1. gRPC listens on those of them that are free,
and says nothing of the others. A caller of the name then reaches whoever has the same port there, so all of them are
listened on here, or none.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterable

import grpc

from services.addresses import grpc_target, socket_path

_LOOPBACK = ("127.0.0.1", "::1")
_TRIES = 64
"""Of free ports, until one is free at all addresses."""


def listen(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    """Take the port of an address for a server that has not started, and return it; 0 for a Unix socket.

    address: `unix:PATH` or `HOST:PORT`, where port 0 stands for any that is free. credentials: the server's, None to
    listen without TLS. Raises OSError when the address is taken or cannot be bound.
    """
    port = 0
    for target in [grpc_target(address)] if socket_path(address) is not None else _targets(address):
        try:
            if credentials is None:
                port = server.add_insecure_port(target)
            else:
                port = server.add_secure_port(target, credentials)
        except RuntimeError as error:
            raise OSError(errno.EADDRINUSE, f"cannot listen on {target}") from error
    return port


def _targets(address: str) -> list[str]:
    """Return `HOST:PORT` for each address of this host that `address` stands for, all with the same port.

    A host that is an address already is returned as it is, and so is a name without an address here, which gRPC
    refuses. Raises OSError where a port is taken.
    """
    host, _, port = address.rpartition(":")
    hosts = [] if _is_literal(host) else _addresses(host)
    if not hosts:
        return [address]
    tries = 1 if int(port) else _TRIES
    while True:
        tries -= 1
        try:
            found = _held_at_once(hosts, int(port))
        except OSError:
            if not tries:
                raise
        else:
            return [f"[{one}]:{at}" if ":" in one else f"{one}:{at}" for one, at in found] or [address]


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def _addresses(name: str) -> list[str]:
    """Return what a name stands for; callers take localhost for both loopback addresses, whatever the files say."""
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []
    return list(dict.fromkeys([*found, *(_LOOPBACK if name == "localhost" else ())]))


def _held_at_once(hosts: Iterable[str], port: int) -> list[tuple[str, int]]:
    """Return the hosts with the port at which each could be bound, without those that are not of this host.

    Raises OSError where one is taken.
    """
    found: list[tuple[str, int]] = []
    sockets: list[socket.socket] = []
    try:
        for host in hosts:
            try:
                probe = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
                sockets.append(probe)
                # As gRPC does: connections that have just ended keep no port.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
                # Two sockets that reuse addresses may be bound to one, but only one of them listens.
                probe.listen(1)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise
                continue
            port = probe.getsockname()[1]
            found.append((host, port))
    finally:
        for probe in sockets:
            probe.close()
    return found
