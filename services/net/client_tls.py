"""TLS for the HTTP and gRPC servers that clients talk to: a certificate that clients trust, not one of the cluster's.

With an authority as well, clients must show a certificate that it signed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import grpc

from services.errors import InvalidArgument
from services.net.tls import host_names, read_authority, read_pair

CERT_FLAG, KEY_FLAG, CA_FLAG = "--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certs"


@dataclass(frozen=True, slots=True)
class ClientTls:
    """The PEM files of a server for clients, checked, and their content for gRPC."""

    cert: Path
    key: Path
    ca: Path | None
    cert_pem: bytes = field(repr=False)
    key_pem: bytes = field(repr=False)
    ca_pem: bytes | None = field(repr=False)
    names: tuple[str, ...] = ()
    """The host names that the certificate is for; one may stand for all names of a level, as `*.example`."""

    def for_server(self) -> grpc.ServerCredentials:
        """Return credentials for a gRPC server; with an authority, clients without a certificate of it are refused."""
        pair = [(self.key_pem, self.cert_pem)]
        return grpc.ssl_server_credentials(pair, self.ca_pem, require_client_auth=self.ca_pem is not None)


def load_client_tls(cert: Path | None, key: Path | None, ca: Path | None) -> ClientTls | None:
    """Read and check the files of the flags; return None where no flag is set.

    Raises InvalidArgument naming the flag that is missing or wrong.
    """
    if cert is None or key is None:
        present = [flag for flag, path in ((CERT_FLAG, cert), (KEY_FLAG, key), (CA_FLAG, ca)) if path is not None]
        if not present:
            return None
        missing = CERT_FLAG if cert is None else KEY_FLAG
        raise InvalidArgument(
            f"{missing} is missing beside {' and '.join(present)}: TLS takes a certificate and its key", field=missing
        )
    chain, cert_pem, key_pem = read_pair(CERT_FLAG, cert, KEY_FLAG, key)
    ca_pem = None if ca is None else read_authority(CA_FLAG, ca)
    return ClientTls(cert, key, ca, cert_pem, key_pem, ca_pem, host_names(chain[0]))
