"""Certificates that their authority has taken back: its list of them, and refusing callers who show one.

gRPC for Python knows nothing of such lists, so a server looks at the caller's certificate with every call, also on
connections that stood before the list changed.
"""

from __future__ import annotations

import datetime
import functools
import inspect
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import structlog
from cryptography import x509

from services.errors import InvalidArgument, Unauthenticated, answering

_LIST = re.compile(rb"-----BEGIN X509 CRL-----.*?-----END X509 CRL-----", re.DOTALL)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Revocations:
    """The certificates that do not count any more, each by the name of its authority (DER) and its serial number."""

    certificates: frozenset[tuple[bytes, int]] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.certificates)

    def __contains__(self, certificate: x509.Certificate) -> bool:
        return (certificate.issuer.public_bytes(), certificate.serial_number) in self.certificates


def read_revocations(flag: str, path: Path, pem: bytes, authorities: Sequence[x509.Certificate]) -> Revocations:
    """Return what the revocation lists of a PEM file say.

    authorities: each list must be signed by one of them. Raises InvalidArgument naming the flag, the file and what is
    wrong with it. A list past its date still counts, and is told in the log.
    """
    try:
        lists = [x509.load_pem_x509_crl(block) for block in _LIST.findall(pem)]
    except ValueError:
        lists = []
    if not lists:
        raise InvalidArgument(f"{flag} {path} does not hold a PEM certificate revocation list", field=flag)
    revoked = set()
    for found in lists:
        if not any(_has_signed(authority, found) for authority in authorities):
            raise InvalidArgument(
                f"{flag} {path} has a list that no authority of this process has signed: name the one of its own "
                "authority, as flashsplit certs writes it",
                field=flag,
            )
        if found.next_update_utc is not None and found.next_update_utc < datetime.datetime.now(datetime.UTC):
            log.warning("revocations.past_their_date", file=str(path), next=found.next_update_utc.isoformat())
        revoked |= {(found.issuer.public_bytes(), entry.serial_number) for entry in found}
    return Revocations(frozenset(revoked))


def _has_signed(authority: x509.Certificate, found: x509.CertificateRevocationList) -> bool:
    try:
        return found.issuer == authority.subject and found.is_signature_valid(authority.public_key())  # type: ignore[arg-type]
    except TypeError:
        # A key of a kind that signs nothing.
        return False


class RefuseRevoked(grpc.aio.ServerInterceptor):
    """Ends every call of a caller whose certificate is revoked.

    revocations: returns those that count now. name: returns where this server listens, for the error's sentence.
    """

    def __init__(self, revocations: Callable[[], Revocations], name: Callable[[], str]) -> None:
        self._revocations, self._name = revocations, name

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(details)
        if handler is None or not self._revocations():
            return handler
        for shape in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            if (behaviour := getattr(handler, shape)) is not None:
                make = getattr(grpc, f"{shape}_rpc_method_handler")
                return make(self._checking(behaviour), handler.request_deserializer, handler.response_serializer)
        return handler

    def _checking(self, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        """Return a handler that looks at the caller's certificate before it does what another one does."""

        async def answer(request: Any, context: grpc.aio.ServicerContext) -> Any:
            await self._check(context)
            return await behaviour(request, context)

        async def answers(request: Any, context: grpc.aio.ServicerContext) -> Any:
            await self._check(context)
            async for response in behaviour(request, context):
                yield response

        return answers if inspect.isasyncgenfunction(behaviour) else answer

    async def _check(self, context: grpc.aio.ServicerContext) -> None:
        revocations = self._revocations()
        for pem in context.auth_context().get("x509_pem_cert", ()):
            if (certificate := _parsed(pem)) in revocations:
                log.warning("call.refused", peer=context.peer(), why="revoked certificate")
                async with answering(context):
                    raise Unauthenticated(
                        f"the caller's certificate, number {certificate.serial_number:x}, is revoked: the server at "
                        f"{self._name()} takes it no more; make a new one",
                        reason="CERTIFICATE_REVOKED",
                    )


@functools.lru_cache(256)
def _parsed(pem: bytes) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pem)
