"""Handshakes with Python's own TLS, for what gRPC does not tell: why one failed although somebody answers, and which
certificate a worker shows. Never for data.
"""

from __future__ import annotations

import asyncio
import datetime
import ssl
from socket import create_connection

from cryptography import x509
from cryptography.x509.oid import NameOID

from services.errors import Unavailable
from services.net.tls import CA_FLAG, CERT_FLAG, CRL_FLAG, KEY_FLAG, NAME_FLAG, Credentials, TlsFiles

_ANSWER_S = 1.5
_FLAGS = f"{CERT_FLAG}, {KEY_FLAG} and {CA_FLAG}"
_HOST_MISMATCH, _IP_MISMATCH = 62, 64  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH


async def why_refused(address: str, tls: Credentials | None) -> str | None:
    """Return a sentence for what waiting does not mend; None when nobody answers or the handshake seems right.

    address: HOST:PORT. tls: the credentials that the failed channel used; None for one without TLS.
    """
    files = None if tls is None else tls.files
    return await asyncio.to_thread(_ask, address, files)


async def is_trusted(address: str, tls: Credentials) -> bool:
    """Whether the worker at an address shows a certificate of the authority, for that address, that is not revoked;
    False where it does not answer yet.

    Raises Unavailable where it shows another one.
    """
    certificate = await asyncio.to_thread(_trusted_certificate, address, tls.files)
    if certificate is None:
        if (why := await why_refused(address, tls)) is not None:
            raise Unavailable(why, reason="HANDSHAKE_FAILED", address=address)
        return False
    if certificate in tls.revocations:
        raise Unavailable(
            f"the worker at {address} shows a certificate that {CRL_FLAG} {tls.files.crl} has revoked, number "
            f"{certificate.serial_number:x}: give it a new one",
            reason="HANDSHAKE_FAILED",
            address=address,
        )
    return True


def _trusted_certificate(address: str, files: TlsFiles) -> x509.Certificate | None:
    try:
        with (
            create_connection((_host(address), _port(address)), _ANSWER_S) as raw,
            _context(files).wrap_socket(raw, server_hostname=files.server_name or _host(address)) as tls,
        ):
            return x509.load_der_x509_certificate(tls.getpeercert(binary_form=True) or b"")
    except (OSError, ValueError):
        return None


def _ask(address: str, files: TlsFiles | None) -> str | None:
    try:
        return _plainly(address) if files is None else _with_certificates(address, files)
    except (OSError, ValueError):
        # Nobody there, gone meanwhile, a name that no certificate can have, files replaced: time may mend it.
        return None


def _plainly(address: str) -> str | None:
    """Return a sentence when TLS is expected where none was offered."""
    try:
        _peer_certificate(address)
    except ssl.SSLError as error:
        if "ALERT" not in (error.reason or ""):
            return None
    return (
        f"the worker at {address} expects TLS: give {_FLAGS} with a certificate of its authority (flashsplit certs "
        "makes them)"
    )


def _with_certificates(address: str, files: TlsFiles) -> str | None:
    name = files.server_name or _host(address)
    context = _context(files)
    try:
        # A server that accepts the client's certificate sends first. One that is just ending hangs up too, but once.
        first_byte = _shake_hands(address, context, name) or _shake_hands(address, context, name)
    except ssl.SSLCertVerificationError as error:
        return _untrusted_worker(address, name, files, error)
    except ssl.SSLError as error:
        if "ALERT" in (error.reason or ""):
            return _refused_client(address, files)
        if error.reason in (None, "UNEXPECTED_EOF_WHILE_READING"):
            return None
        return f"the worker at {address} answers without TLS: start it with {_FLAGS}, or leave these flags out here too"
    return None if first_byte else _refused_client(address, files)


def _untrusted_worker(address: str, name: str, files: TlsFiles, error: ssl.SSLCertVerificationError) -> str:
    """Return a sentence for what is wrong with the worker's certificate."""
    certificate = _peer_certificate(address)
    last = certificate.not_valid_after_utc
    if error.verify_code in (_HOST_MISMATCH, _IP_MISMATCH):
        names = ", ".join(_names(certificate)) or "no host"
        return (
            f"the worker at {address} shows a certificate for {names}, not for {name}: dial it by a name that its "
            f"certificate has, make one for {name}, or say which name to expect with {NAME_FLAG}"
        )
    if last < datetime.datetime.now(datetime.UTC):
        return (
            f"the worker at {address} shows a certificate that expired on {last:%Y-%m-%d %H:%M} UTC: give it a new one"
        )
    issuer = _common_name(certificate.issuer)
    return (
        f"the worker at {address} shows a certificate of {issuer!r} that {CA_FLAG} {files.ca} does not vouch for "
        f"({error.verify_message}): give both sides certificates of one authority"
    )


def _refused_client(address: str, files: TlsFiles) -> str:
    """Return a sentence for a worker that hung up behind the handshake, which is how it refuses a certificate."""
    own = x509.load_pem_x509_certificate(files.cert.read_bytes())
    refusal, last = f"the worker at {address} refuses {CERT_FLAG} {files.cert}", own.not_valid_after_utc
    if last < datetime.datetime.now(datetime.UTC):
        return f"{refusal}: it expired on {last:%Y-%m-%d %H:%M} UTC, make a new one and start this process again"
    return f"{refusal}, a certificate of {_common_name(own.issuer)!r}: give both sides certificates of one authority"


def _peer_certificate(address: str) -> x509.Certificate:
    """Return the certificate that a worker shows to anybody. Raises OSError, and ssl.SSLError where it has no TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with create_connection((_host(address), _port(address)), _ANSWER_S) as raw, context.wrap_socket(raw) as tls:
        return x509.load_der_x509_certificate(tls.getpeercert(binary_form=True) or b"")


def _context(files: TlsFiles) -> ssl.SSLContext:
    """Return what a channel's handshake is made with, for Python's own TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(files.ca)
    context.hostname_checks_common_name = False
    context.load_cert_chain(files.cert, files.key)
    context.set_alpn_protocols(["h2"])
    return context


def _shake_hands(address: str, context: ssl.SSLContext, name: str) -> bytes:
    """Return the first byte that the server sends behind a handshake; none where it hangs up."""
    with (
        create_connection((_host(address), _port(address)), _ANSWER_S) as raw,
        context.wrap_socket(raw, server_hostname=name) as tls,
    ):
        try:
            return tls.recv(1)
        except ConnectionResetError:
            # It hung up before it had read everything, so that its reason was lost on the way.
            return b""


def _host(address: str) -> str:
    return address.rpartition(":")[0].removeprefix("[").removesuffix("]")


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def _names(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names if isinstance(name, x509.DNSName | x509.IPAddress)]


def _common_name(name: x509.Name) -> str:
    attributes = name.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(attributes[0].value) if attributes else name.rfc4514_string()
