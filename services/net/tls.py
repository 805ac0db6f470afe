"""A process's own certificate and the authority that it trusts: read and checked once, then handed to gRPC.

Every connection over TCP uses both: each side shows its certificate, and each side's must come from the authority. Unix
sockets need none, as they are private to their user.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import grpc
import structlog
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from services.errors import InvalidArgument

CERT_FLAG, KEY_FLAG, CA_FLAG, NAME_FLAG = "--tls-cert", "--tls-key", "--tls-ca", "--tls-server-name"
_SOON = datetime.timedelta(days=14)
"""How long before a certificate expires a start warns of it."""

T = TypeVar("T")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where the PEM files are. server_name: the name in every worker's certificate; None for the host called."""

    cert: Path
    key: Path
    ca: Path
    server_name: str | None = None

    def arguments(self) -> list[str]:
        """Return the flags that give another process the same files."""
        flags = {CERT_FLAG: self.cert.absolute(), KEY_FLAG: self.key.absolute(), CA_FLAG: self.ca.absolute()}
        words = [word for flag, path in flags.items() for word in (flag, str(path))]
        return words if self.server_name is None else [*words, NAME_FLAG, self.server_name]


@dataclass(frozen=True, slots=True)
class Credentials:
    """The content of the files, checked. usages: what the certificate may be used for; None for anything."""

    files: TlsFiles
    usages: frozenset[x509.ObjectIdentifier] | None
    cert_pem: bytes = field(repr=False)
    key_pem: bytes = field(repr=False)
    ca_pem: bytes = field(repr=False)

    def for_channel(self) -> grpc.ChannelCredentials:
        """Return credentials for a channel.

        It shows the certificate; the other side's must come from the authority and name the host that is called.
        """
        return grpc.ssl_channel_credentials(self.ca_pem, self.key_pem, self.cert_pem)

    def for_server(self) -> grpc.ServerCredentials:
        """Return credentials for a server, which refuses clients without a certificate of the authority.

        Raises InvalidArgument for a certificate that only clients may use.
        """
        _check_usage(self.usages, ExtendedKeyUsageOID.SERVER_AUTH, "server", self.files.cert)
        return grpc.ssl_server_credentials([(self.key_pem, self.cert_pem)], self.ca_pem, require_client_auth=True)


def tls_files(cert: str | None, key: str | None, ca: str | None, server_name: str | None = None) -> TlsFiles | None:
    """Return the files of the flags, None where none is set. Raises InvalidArgument naming those that are missing."""
    flags = {CERT_FLAG: cert, KEY_FLAG: key, CA_FLAG: ca}
    missing = [flag for flag, path in flags.items() if path is None]
    if cert is None or key is None or ca is None:
        present = [flag for flag in flags if flag not in missing] + [NAME_FLAG] * (server_name is not None)
        if not present:
            return None
        raise InvalidArgument(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing beside {' and '.join(present)}: "
            "TLS takes this process's certificate, its key and the authority that signed everybody's",
            field=missing[0],
        )
    return TlsFiles(Path(cert), Path(key), Path(ca), server_name)


def load_credentials(files: TlsFiles) -> Credentials:
    """Read and check the files. Raises InvalidArgument naming the flag, the file and what is wrong with it."""
    chain, cert_pem, key_pem = read_pair(CERT_FLAG, files.cert, KEY_FLAG, files.key)
    ca_pem = read_authority(CA_FLAG, files.ca)
    last = chain[0].not_valid_after_utc
    if last - datetime.datetime.now(datetime.UTC) < _SOON:
        log.warning("tls.expires_soon", file=str(files.cert), expires=last.isoformat())
    usages = _usages(chain[0])
    _check_usage(usages, ExtendedKeyUsageOID.CLIENT_AUTH, "client", files.cert)
    return Credentials(files, usages, cert_pem, key_pem, ca_pem)


def read_pair(cert_flag: str, cert: Path, key_flag: str, key: Path) -> tuple[list[x509.Certificate], bytes, bytes]:
    """Read a certificate and its key, and check that they belong together and are valid now.

    Returns the certificate with those that lead to its authority behind it, its PEM and that of the key. Raises
    InvalidArgument naming the flag, the file and what is wrong with it.
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


def host_names(certificate: x509.Certificate) -> tuple[str, ...]:
    """Return the host names, not the addresses, that a certificate is for."""
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return ()
    return tuple(extension.value.get_values_for_type(x509.DNSName))


def read_authority(flag: str, path: Path) -> bytes:
    """Read the PEM of the authorities of which one must have signed the other side's certificate.

    Raises InvalidArgument naming the flag, the file and what is wrong with it.
    """
    pem = _read(flag, path)
    authorities = _parse(flag, path, "a PEM certificate", x509.load_pem_x509_certificates, pem)
    _check_dates(flag, path, authorities[0])
    return pem


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
