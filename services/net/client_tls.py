"""TLS for the HTTP and gRPC servers that clients talk to: a certificate that clients trust, not one of the cluster's.

With an authority as well, clients must show a certificate that it signed and has not revoked.
"""

from __future__ import annotations

import contextlib
import ssl
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from services.errors import InvalidArgument
from services.net.revocation import Revocations
from services.net.tls import TlsContent, read_content, server_credentials
from services.reread import Reread

CERT_FLAG, KEY_FLAG, CA_FLAG, CRL_FLAG = "--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certs", "--ssl-crlfile"


@dataclass(frozen=True, slots=True)
class ClientTls:
    """The PEM files of a server for clients by their flags, and what they hold at each moment."""

    paths: dict[str, Path]
    held: Reread[TlsContent]

    @property
    def names(self) -> tuple[str, ...]:
        """The host names that the certificate is for."""
        return self.held.content.names

    @property
    def revocations(self) -> Revocations:
        """The clients' certificates that do not count any more."""
        return self.held.content.revocations

    def for_server(self) -> grpc.ServerCredentials:
        """Return credentials for a gRPC server; with an authority, clients without a certificate of it are refused."""
        return server_credentials(self.held)

    def for_sockets(self) -> ssl.SSLContext:
        """Return a context for a server of Python's own sockets, which does the same."""
        return _RereadContext(self)


class _RereadContext(ssl.SSLContext):
    """Makes each connection with what the files hold then."""

    def __new__(cls, tls: ClientTls) -> _RereadContext:
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, tls: ClientTls) -> None:
        self._tls, self._content, self._current = tls, tls.held.content, _context(tls.paths)

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        """See `ssl.SSLContext`: asyncio's loops ask for this at every connection."""
        if (content := self._tls.held.content) is not self._content:
            # Where the files have been replaced once more by now, the next connection has them checked.
            with contextlib.suppress(OSError):
                self._current = _context(self._tls.paths)
                self._content = content
        return self._current.wrap_bio(*arguments, **options)


def _context(paths: dict[str, Path]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(paths[CERT_FLAG], paths[KEY_FLAG])
    if CA_FLAG in paths:
        context.load_verify_locations(paths[CA_FLAG])
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def load_client_tls(cert: Path | None, key: Path | None, ca: Path | None, crl: Path | None = None) -> ClientTls | None:
    """Read and check the files of the flags; return None where no flag is set.

    Raises InvalidArgument naming the flag that is missing or wrong.
    """
    given = {CERT_FLAG: cert, KEY_FLAG: key, CA_FLAG: ca, CRL_FLAG: crl}
    paths = {flag: path for flag, path in given.items() if path is not None}
    if not paths:
        return None
    for missing in (CERT_FLAG, KEY_FLAG):
        if missing not in paths:
            raise InvalidArgument(
                f"{missing} is missing beside {' and '.join(paths)}: TLS takes a certificate and its key", field=missing
            )
    if crl is not None and ca is None:
        raise InvalidArgument(
            f"{CRL_FLAG} {crl} has no effect: clients show certificates only where {CA_FLAG} says who must have signed "
            "them",
            field=CRL_FLAG,
        )
    return ClientTls(paths, Reread(paths.values(), partial(read_content, paths)))
