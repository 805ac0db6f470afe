"""A process's own certificate, the authority that it trusts and what that has revoked: read, checked, handed to gRPC.

Every connection over TCP uses them: each side shows its certificate, and each side's must come from the authority. Unix
sockets need none, as they are private to their user. Connections that are made after a file was replaced use the new
one; those that stand go on.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import grpc
import structlog
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from services.errors import InvalidArgument
from services.net.revocation import Revocations, read_revocations
from services.reread import Reread

CERT_FLAG, KEY_FLAG, CA_FLAG, NAME_FLAG = "--tls-cert", "--tls-key", "--tls-ca", "--tls-server-name"
CRL_FLAG = "--tls-crl"
_SOON = datetime.timedelta(days=14)
"""How long before a certificate expires a start warns of it."""

T = TypeVar("T")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where the PEM files are. server_name: the name in every worker's certificate; None for the host called. crl: the
    authority's list of certificates that it has revoked, if there is one."""

    cert: Path
    key: Path
    ca: Path
    server_name: str | None = None
    crl: Path | None = None

    def paths(self) -> dict[str, Path]:
        """Return the files by their flags."""
        paths = {CERT_FLAG: self.cert, KEY_FLAG: self.key, CA_FLAG: self.ca}
        return paths if self.crl is None else {**paths, CRL_FLAG: self.crl}

    def arguments(self) -> list[str]:
        """Return the flags that give another process the same files."""
        words = [word for flag, path in self.paths().items() for word in (flag, str(path.absolute()))]
        return words if self.server_name is None else [*words, NAME_FLAG, self.server_name]


@dataclass(frozen=True, slots=True)
class TlsContent:
    """What the files hold, checked. usages: what the certificate may be used for; None for anything."""

    usages: frozenset[x509.ObjectIdentifier] | None
    cert_pem: bytes = field(repr=False)
    key_pem: bytes = field(repr=False)
    ca_pem: bytes | None = field(repr=False)
    revocations: Revocations = field(default=Revocations(), repr=False)
    names: tuple[str, ...] = ()
    """The host names that the certificate is for; one may stand for all names of a level, as `*.example`."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """The files and what they hold at each moment."""

    files: TlsFiles
    held: Reread[TlsContent]

    @property
    def revocations(self) -> Revocations:
        """The certificates of the authority that do not count any more."""
        return self.held.content.revocations

    def for_channel(self) -> grpc.ChannelCredentials:
        """Return credentials for a channel.

        It shows the certificate; the other side's must come from the authority and name the host that is called.
        """
        content = self.held.content
        return grpc.ssl_channel_credentials(content.ca_pem, content.key_pem, content.cert_pem)

    def for_server(self) -> grpc.ServerCredentials:
        """Return credentials for a server, which refuses clients without a certificate of the authority.

        Raises InvalidArgument for a certificate that only clients may use.
        """
        _check_usage(self.held.content.usages, ExtendedKeyUsageOID.SERVER_AUTH, "server", self.files.cert)
        return server_credentials(self.held)


def server_credentials(held: Reread[TlsContent]) -> grpc.ServerCredentials:
    """Return credentials for a server that uses for each new connection what the files hold then; with an authority,
    clients must show a certificate of it."""
    first = held.content

    def configuration() -> grpc.ServerCertificateConfiguration:
        content = held.content
        pair = [(content.key_pem, content.cert_pem)]
        return grpc.ssl_server_certificate_configuration(pair, content.ca_pem)

    return grpc.dynamic_ssl_server_credentials(
        configuration(), configuration, require_client_authentication=first.ca_pem is not None
    )


def tls_files(
    cert: str | None, key: str | None, ca: str | None, server_name: str | None = None, crl: str | None = None
) -> TlsFiles | None:
    """Return the files of the flags, None where none is set. Raises InvalidArgument naming those that are missing."""
    flags = {CERT_FLAG: cert, KEY_FLAG: key, CA_FLAG: ca}
    missing = [flag for flag, path in flags.items() if path is None]
    if cert is None or key is None or ca is None:
        present = [flag for flag in flags if flag not in missing]
        present += [NAME_FLAG] * (server_name is not None) + [CRL_FLAG] * (crl is not None)
        if not present:
            return None
        raise InvalidArgument(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing beside {' and '.join(present)}: "
            "TLS takes this process's certificate, its key and the authority that signed everybody's",
            field=missing[0],
        )
    return TlsFiles(Path(cert), Path(key), Path(ca), server_name, None if crl is None else Path(crl))


def load_credentials(files: TlsFiles) -> Credentials:
    """Read and check the files. Raises InvalidArgument naming the flag, the file and what is wrong with it."""
    return Credentials(files, Reread(files.paths().values(), partial(_read_files, files)))


def _read_files(files: TlsFiles) -> TlsContent:
    content = read_content(files.paths())
    _check_usage(content.usages, ExtendedKeyUsageOID.CLIENT_AUTH, "client", files.cert)
    return content


def read_content(paths: Mapping[str, Path]) -> TlsContent:
    """Read and check a certificate and its key, and where they are given an authority and its list of revocations.

    paths: the files in this order, each by its flag. Raises InvalidArgument naming the flag, the file and what is wrong
    with it.
    """
    (cert_flag, cert), (key_flag, key), *others = paths.items()
    chain, cert_pem, key_pem = _read_pair(cert_flag, cert, key_flag, key)
    ca_pem, revocations = None, Revocations()
    if others:
        ca_pem, authorities = _read_authorities(*others[0])
        for flag, path in others[1:]:
            revocations = read_revocations(flag, path, _read(flag, path), authorities)
    last = chain[0].not_valid_after_utc
    if last - datetime.datetime.now(datetime.UTC) < _SOON:
        log.warning("tls.expires_soon", file=str(cert), expires=last.isoformat())
    return TlsContent(_usages(chain[0]), cert_pem, key_pem, ca_pem, revocations, _host_names(chain[0]))


def _read_pair(cert_flag: str, cert: Path, key_flag: str, key: Path) -> tuple[list[x509.Certificate], bytes, bytes]:
    """Read a certificate and its key, and check that they belong together and are valid now.

    Returns the certificate with those that lead to its authority behind it, its PEM and that of the key.
    """
    cert_pem, key_pem = _read(cert_flag, cert), _read(key_flag, key)
    chain = _parse(cert_flag, cert, "a PEM certificate", x509.load_pem_x509_certificates, cert_pem)
    private = _parse(key_flag, key, "a PEM private key", lambda pem: load_pem_private_key(pem, None), key_pem)
    if chain[0].public_key() != private.public_key():
        raise InvalidArgument(
            f"{key_flag} {key} is not the key of {cert_flag} {cert}: name the two that were made together",
            field=key_flag,
        )
    _check_dates(cert_flag, cert, chain[0])
    return chain, cert_pem, key_pem


def _host_names(certificate: x509.Certificate) -> tuple[str, ...]:
    """Return the host names, not the addresses, that a certificate is for."""
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return ()
    return tuple(extension.value.get_values_for_type(x509.DNSName))


def _read_authorities(flag: str, path: Path) -> tuple[bytes, list[x509.Certificate]]:
    """Read the authorities of which one must have signed the other side's certificate; return their PEM and them."""
    pem = _read(flag, path)
    authorities = _parse(flag, path, "a PEM certificate", x509.load_pem_x509_certificates, pem)
    _check_dates(flag, path, authorities[0])
    return pem, authorities


def _read(flag: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{flag} {path} cannot be read: {error.strerror}", field=flag) from error


def _parse(flag: str, path: Path, content: str, parse: Callable[[bytes], T], pem: bytes) -> T:
    try:
        return parse(pem)
    except TypeError:
        # The library raises this for keys only.
        raise InvalidArgument(
            f"{flag} {path} is encrypted: give a key without a passphrase, in a file for its user alone", field=flag
        ) from None
    except Exception as error:
        # The library raises other kinds than ValueError too for damaged files.
        raise InvalidArgument(f"{flag} {path} does not hold {content}", field=flag) from error


def _check_dates(flag: str, path: Path, certificate: x509.Certificate) -> None:
    now = datetime.datetime.now(datetime.UTC)
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > last:
        raise InvalidArgument(f"{flag} {path} expired on {last:%Y-%m-%d %H:%M} UTC: make a new one", field=flag)
    if now < first:
        raise InvalidArgument(
            f"{flag} {path} is valid from {first:%Y-%m-%d %H:%M} UTC only, it is {now:%Y-%m-%d %H:%M}: correct this "
            "host's clock, or make a new one",
            field=flag,
        )


def _usages(certificate: x509.Certificate) -> frozenset[x509.ObjectIdentifier] | None:
    """Return the extended key usages, None where the certificate doesn't limit them."""
    try:
        return frozenset(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    except x509.ExtensionNotFound:
        return None


def _check_usage(
    usages: frozenset[x509.ObjectIdentifier] | None, needed: x509.ObjectIdentifier, name: str, path: Path
) -> None:
    if usages is not None and not usages & {needed, ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE}:
        raise InvalidArgument(
            f"{CERT_FLAG} {path} is not for {name}s: make one with the extended key usages serverAuth and clientAuth",
            field=CERT_FLAG,
        )
