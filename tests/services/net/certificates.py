"""Certificates for tests, made by the code behind `flashsplit certs`."""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography import x509

from coordinator.cli.certificate_authority import make_authority, replace_private
from services.net.cluster_token import ClusterToken
from services.net.security import Security
from services.net.tls import Credentials, TlsContent, TlsFiles, load_credentials
from services.reread import constant

LOCAL = ("localhost", "127.0.0.1", "::1")
LONG_AGO = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=400)


class Certificates:
    """One authority and what it signs, in a directory."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self.directory = directory
        self.authority = make_authority(3650, now=LONG_AGO)
        self.ca = directory / "ca.pem"
        self.authority.write(self.ca, directory / "ca-key.pem")
        self.crl = directory / "crl.pem"

    def files(
        self,
        *names: str,
        days: float = 365,
        now: datetime.datetime | None = None,
        ca: Path | None = None,
        server_name: str | None = None,
    ) -> TlsFiles:
        """A certificate for the names, this host's by default. ca: trust another authority than the one that signs."""
        pair = self.authority.issue(names or LOCAL, days, now=now)
        stem = f"{len(list(self.directory.iterdir()))}"
        pair.write(self.directory / f"{stem}.pem", self.directory / f"{stem}-key.pem")
        ca = ca or self.ca
        return TlsFiles(self.directory / f"{stem}.pem", self.directory / f"{stem}-key.pem", ca, server_name)

    def revoke(self, *files: TlsFiles) -> None:
        """Write the authority's list anew: with these certificates, and no others."""
        revoked = [x509.load_pem_x509_certificate(each.cert.read_bytes()) for each in files]
        replace_private(self.crl, self.authority.revocation_list(revoked))

    def security(self, *names: str, token: str | None = None, ca: Path | None = None) -> Security:
        """What a process with such a certificate uses."""
        return Security(load_credentials(self.files(*names, ca=ca)), None if token is None else known(token))


def unchecked(files: TlsFiles) -> Security:
    """As a process has it whose files have expired since it began."""
    contents = [path.read_bytes() for path in (files.cert, files.key, files.ca)]
    return Security(Credentials(files, constant(TlsContent(None, *contents))))


def known(*tokens: str) -> ClusterToken:
    """Tokens that came from no file."""
    return ClusterToken(constant(tokens))
