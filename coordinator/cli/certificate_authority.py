"""A small certificate authority for one cluster: P-256 keys, certificates for hosts, PEM files for their user alone.

For development and for clusters of one owner; who has an authority of their own gives flashsplit those files instead.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from services.errors import InvalidArgument

# Clocks of hosts differ a little.
_BACKDATED = datetime.timedelta(minutes=5)
_DNS_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9])?(\.[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9])?)*")
_COMMON_NAME_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def write(self, certificate: Path, key: Path) -> None:
        """Write two new files that only their user may read. Raises FileExistsError."""
        write_private(certificate, self.certificate.public_bytes(Encoding.PEM))
        write_private(key, self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


@dataclass(frozen=True, slots=True)
class Authority(KeyPair):
    """A certificate and key that sign others, each both a server's and a client's: workers call other workers."""

    def issue(self, names: Sequence[str], days: float, *, now: datetime.datetime | None = None) -> KeyPair:
        """Return a certificate and key for one host.

        names: DNS names and addresses by which the host is dialled, the first one for people; days: how long it is
        valid, at most as long as the authority.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        now = now or datetime.datetime.now(datetime.UTC)
        last = min(now + datetime.timedelta(days=days), self.certificate.not_valid_after_utc)
        # The first name is only for people: what counts are the alternative names.
        builder = _builder(names[0], self.certificate.subject, key, now, last)
        usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        identifier = self.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        builder = (
            builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(usages, critical=False)
            .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        )
        return KeyPair(builder.sign(self.key, hashes.SHA256()), key)

    def revocation_list(
        self, revoked: Sequence[x509.Certificate] = (), before: x509.CertificateRevocationList | None = None
    ) -> bytes:
        """Return the PEM of a list of certificates that do not count any more: these, and those of the list before.

        It holds as long as the authority. Raises InvalidArgument for a certificate of another authority, and for a list
        of another one.
        """
        now, number = datetime.datetime.now(datetime.UTC), 1
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.certificate.subject)
            .last_update(now)
            .next_update(self.certificate.not_valid_after_utc)
        )
        entries = {}
        if before is not None:
            if not before.is_signature_valid(self.key.public_key()):
                raise InvalidArgument("the list of revoked certificates is another authority's", field="--out")
            number += before.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
            entries = {entry.serial_number: entry for entry in before}
        for certificate in revoked:
            _check_issuer(certificate, self.certificate)
            entry = x509.RevokedCertificateBuilder().serial_number(certificate.serial_number).revocation_date(now)
            entries.setdefault(certificate.serial_number, entry.build())
        for found in entries.values():
            builder = builder.add_revoked_certificate(found)
        identifier = self.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        signed = (
            builder.add_extension(x509.CRLNumber(number), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        return signed.public_bytes(Encoding.PEM)


def _check_issuer(certificate: x509.Certificate, authority: x509.Certificate) -> None:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise InvalidArgument(
            f"the certificate of {certificate.subject.rfc4514_string()} comes from another authority: only that one "
            "can revoke it",
            field="NAME",
        ) from error


def make_authority(days: float, *, now: datetime.datetime | None = None) -> Authority:
    """Return a new authority, under a name that no other has."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = now or datetime.datetime.now(datetime.UTC)
    name = f"flashsplit development CA {secrets.token_hex(4)}"
    builder = _builder(name, None, key, now, now + datetime.timedelta(days=days))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True).add_extension(
        _key_usage(signs_certificates=True), critical=True
    )
    return Authority(builder.sign(key, hashes.SHA256()), key)


def read_authority(certificate: Path, key: Path) -> Authority:
    """Return an authority from its files. Raises InvalidArgument for damaged files, and for one that has expired."""
    try:
        authority = x509.load_pem_x509_certificate(certificate.read_bytes())
        secret = load_pem_private_key(key.read_bytes(), None)
        authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
    except Exception as error:
        # The library raises more than ValueError for damaged files, a kind for each of its layers.
        raise InvalidArgument(
            f"{certificate} and {key} are no certificate authority: make a new one with --force", field="--out"
        ) from error
    if not isinstance(secret, ec.EllipticCurvePrivateKey) or secret.public_key() != authority.public_key():
        raise InvalidArgument(f"{key} is not the key of {certificate}: make both anew with --force", field="--out")
    if authority.not_valid_after_utc < datetime.datetime.now(datetime.UTC):
        raise InvalidArgument(
            f"{certificate} expired on {authority.not_valid_after_utc:%Y-%m-%d}: make a new authority with --force",
            field="--out",
        )
    return Authority(authority, secret)


def check_name(text: str, field: str) -> str:
    """Return a host's DNS name or IP address in its plain form. Raises InvalidArgument for what is neither."""
    try:
        return str(ipaddress.ip_address(text.removeprefix("[").removesuffix("]")))
    except ValueError:
        name = text.lower()
    if _DNS_NAME.fullmatch(name) is None or re.fullmatch(r"[0-9.]+", name):
        raise InvalidArgument(f"{field} {text!r} is neither a DNS name nor an IP address", field=field)
    return name


def replace_private(path: Path, content: bytes) -> None:
    """Write a file that only its user may read; whoever reads it meanwhile finds all of the old one or of the new."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    write_private(draft, content)
    draft.replace(path)


def write_private(path: Path, content: bytes) -> None:
    """Write a new file that only its user may read, from its first moment on. Raises FileExistsError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def _builder(
    name: str,
    issuer: x509.Name | None,
    key: ec.EllipticCurvePrivateKey,
    now: datetime.datetime,
    last: datetime.datetime,
) -> x509.CertificateBuilder:
    """Return what all certificates have in common. issuer: None for one that is signed by its own key."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:_COMMON_NAME_CHARACTERS])])
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer or subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(last)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    """Return what a key is for: signing certificates, or proving who one is."""
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(name: str) -> x509.GeneralName:
    """Return a host's name as a certificate has it."""
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
