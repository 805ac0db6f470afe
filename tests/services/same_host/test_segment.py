"""Memory that another process maps: only what was offered, whole, sealed, and gone with its owner."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from services.errors import FailedPrecondition, InvalidArgument
from services.same_host.segment import FIRST_OFFSET, MAX_BYTES, NONCE_BYTES, OwnSegment, PeerSegment

ROOT = Path(__file__).parents[3]
SIZE = 1 << 16

OWNER = """
import sys, time
from services.same_host.segment import OwnSegment
own = OwnSegment(1 << 16)
own.view[100:105] = b"hello"
print(own.offer.process_id, own.offer.descriptor, own.offer.nonce.hex(), flush=True)
time.sleep(60)
"""


@pytest.fixture
def own() -> Iterator[OwnSegment]:
    made = OwnSegment(SIZE)
    yield made
    made.close()


def test_what_one_writes_the_other_reads(own: OwnSegment) -> None:
    """Also what is written after it was mapped; closing either side, even twice, leaves the other whole."""
    peer = PeerSegment(own.offer)
    own.view[FIRST_OFFSET : FIRST_OFFSET + 5] = b"after"
    assert bytes(peer.view[FIRST_OFFSET : FIRST_OFFSET + 5]) == b"after"
    with pytest.raises(TypeError):
        peer.view[0] = 1
    own.close()
    own.close()
    assert bytes(peer.view[FIRST_OFFSET : FIRST_OFFSET + 5]) == b"after"
    peer.close()
    peer.close()


def test_what_a_thread_copies_stays_until_it_has(own: OwnSegment) -> None:
    """Whoever closes the segment at that moment neither fails nor takes the memory from under the copy."""

    def mappings() -> int:
        """Return how often this process has the segment mapped: it maps its own ones to read and write."""
        inode = os.fstat(own.offer.descriptor).st_ino
        lines = Path("/proc/self/maps").read_text().splitlines()
        return sum(int(line.split()[4]) == inode and "r--s" in line for line in lines)

    peer = PeerSegment(own.offer)
    own.view[FIRST_OFFSET : FIRST_OFFSET + 5] = b"there"
    copied = peer.view[FIRST_OFFSET : FIRST_OFFSET + 5]
    peer.close()
    assert bytes(copied) == b"there"
    assert mappings() == 1
    with pytest.raises(ValueError, match="released"):
        bytes(peer.view[FIRST_OFFSET:])
    copied.release()
    assert mappings() == 0


def test_its_size_is_sealed(own: OwnSegment) -> None:
    """Nobody can cut it, which would end the reader with SIGBUS."""
    for size in (0, SIZE // 2, SIZE * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(own.offer.descriptor, size)


def test_a_killed_owner_leaves_no_trace() -> None:
    """The reader keeps what it has mapped; nobody can map it any more."""
    names = set(os.listdir("/dev/shm"))
    owner = subprocess.Popen([sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        pid, descriptor, nonce = owner.stdout.readline().split()
        offer = replace(OwnSegment(SIZE).offer, process_id=int(pid), descriptor=int(descriptor))
        offer = replace(offer, nonce=bytes.fromhex(nonce))
        peer = PeerSegment(offer)
        owner.kill()
        owner.wait()
        assert bytes(peer.view[100:105]) == b"hello"
        with pytest.raises(FailedPrecondition):
            PeerSegment(offer)
        peer.close()
    finally:
        owner.kill()
        owner.wait()
        assert owner.stdout is not None
        owner.stdout.close()
    assert set(os.listdir("/dev/shm")) <= names


@pytest.mark.parametrize(
    "change",
    [
        {"process_id": 0},
        {"size_bytes": 0},
        {"size_bytes": FIRST_OFFSET},
        {"size_bytes": MAX_BYTES + 1},
        {"size_bytes": 2**63},
        {"nonce": b""},
        {"nonce": bytes(NONCE_BYTES + 1)},
    ],
)
def test_senseless_offers(own: OwnSegment, change: dict[str, object]) -> None:
    """An offer whose numbers cannot be a segment's is refused before anything is opened."""
    with pytest.raises(InvalidArgument):
        PeerSegment(replace(own.offer, **change))  # type: ignore[arg-type]


def test_offers_of_something_else(own: OwnSegment, tmp_path: Path) -> None:
    """Another size, another nonce, another file, a pipe that would block, a process that is not there: all refused
    with what to do instead."""
    other = (tmp_path / "file").open("w+b")
    other.truncate(SIZE)
    reader, writer = os.pipe()
    plain = os.memfd_create("flashsplit-payloads")
    os.ftruncate(plain, SIZE)
    offers = [
        replace(own.offer, size_bytes=SIZE // 2),
        replace(own.offer, size_bytes=SIZE * 2),
        replace(own.offer, nonce=bytes(NONCE_BYTES)),
        replace(own.offer, descriptor=other.fileno()),
        replace(own.offer, descriptor=reader),
        replace(own.offer, descriptor=plain),
        replace(own.offer, descriptor=9999),
        replace(own.offer, process_id=2**22 + 1),
        replace(own.offer, process_id=1),
    ]
    for offer in offers:
        with pytest.raises(FailedPrecondition, match="--payload-transport") as caught:
            PeerSegment(offer)
        assert caught.value.reason == "NOT_SHARED"
    other.close()
    for descriptor in (reader, writer, plain):
        os.close(descriptor)
