"""Certificates for tests, made by the code behind `flashsplit certs`."""

from __future__ import annotations

import datetime
from pathlib import Path

from coordinator.cli.certificate_authority import make_authority
from services.net.security import Security
from services.net.tls import Credentials, TlsFiles, load_credentials

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

    def security(self, *names: str, token: str | None = None, ca: Path | None = None) -> Security:
        """What a process with such a certificate uses."""
        return Security(load_credentials(self.files(*names, ca=ca)), token)


def unchecked(files: TlsFiles) -> Security:
    """As a process has it whose files have expired since it began."""
    contents = [path.read_bytes() for path in (files.cert, files.key, files.ca)]
    return Security(Credentials(files, None, *contents))
