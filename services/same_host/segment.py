"""A segment: memory that one process makes and another one of the same host maps to read it.

An anonymous file (Linux `memfd_create`) without a name anywhere: the other process opens it through /proc, and the
kernel frees it with the last of the two, however they ended. Its size is sealed, so that nobody can make the other
read past its end.
"""

from __future__ import annotations

import fcntl
import hmac
import mmap
import os
import secrets
from dataclasses import dataclass

from services.errors import FailedPrecondition, InvalidArgument

NONCE_BYTES = 16
FIRST_OFFSET = 64
"""Where payloads begin: the nonce stands before."""

MAX_BYTES = 1 << 30
_NAME = "flashsplit-payloads"


@dataclass(frozen=True, slots=True)
class SegmentOffer:
    """What another process needs to map a segment.

    descriptor: the file descriptor's number in process `process_id`. nonce: the segment's first bytes, by which the
    other process knows that it has mapped this one.
    """

    process_id: int
    descriptor: int
    size_bytes: int
    nonce: bytes


class OwnSegment:
    """A segment that this process makes, and alone writes. Pages that were never written take no memory."""

    def __init__(self, size_bytes: int) -> None:
        """Make a segment. Raises OSError where the system has no such memory, or no more of it."""
        self._descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._descriptor, size_bytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, seals)
            self._map = mmap.mmap(self._descriptor, size_bytes)
        except BaseException:
            os.close(self._descriptor)
            raise
        nonce = secrets.token_bytes(NONCE_BYTES)
        self.view = memoryview(self._map)
        self.view[:NONCE_BYTES] = nonce
        self.offer = SegmentOffer(os.getpid(), self._descriptor, size_bytes, nonce)

    def close(self) -> None:
        """Unmap it. Safe to call twice."""
        if not self._map.closed:
            self.view.release()
            self._map.close()
            os.close(self._descriptor)


class PeerSegment:
    """Another process's segment, mapped to read it: through `view`."""

    def __init__(self, offer: SegmentOffer) -> None:
        """Map a segment.

        Raises InvalidArgument for an offer that makes no sense, FailedPrecondition where it can't be opened here.
        """
        if not (offer.process_id and FIRST_OFFSET < offer.size_bytes <= MAX_BYTES and len(offer.nonce) == NONCE_BYTES):
            raise InvalidArgument(
                f"segment offers {offer.size_bytes} bytes of process {offer.process_id} with a nonce of "
                f"{len(offer.nonce)}; sizes go to {MAX_BYTES}, nonces have {NONCE_BYTES}",
                field="segment",
            )
        path = f"/proc/{offer.process_id}/fd/{offer.descriptor}"
        try:
            # In another container the number may mean another file, and opening that could block or have effects.
            if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
                raise FileNotFoundError(path)
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _not_shared(offer) from error
        try:
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if not sealed or os.fstat(descriptor).st_size != offer.size_bytes:
                raise _not_shared(offer)
            self.view = memoryview(mmap.mmap(descriptor, offer.size_bytes, prot=mmap.PROT_READ))
        except OSError as error:
            raise _not_shared(offer) from error
        finally:
            os.close(descriptor)
        if not hmac.compare_digest(bytes(self.view[:NONCE_BYTES]), offer.nonce):
            self.close()
            raise _not_shared(offer)

    def close(self) -> None:
        """End the view; what another thread is just copying out of stays mapped until it has. Safe to call twice."""
        self.view.release()


def available() -> bool:
    """Return whether this system has such memory."""
    return hasattr(os, "memfd_create")


def _not_shared(offer: SegmentOffer) -> FailedPrecondition:
    return FailedPrecondition(
        f"the memory of process {offer.process_id} cannot be mapped here: it runs on another host, for another user or "
        "in another container; use --payload-transport auto or stream",
        reason="NOT_SHARED",
    )
