"""Room in a ring: never given out twice, all of it found again, and no reader believes what is not there."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from services.errors import InvalidArgument
from services.same_host.ring import HEADER, Payload, RingWriter, read_payload
from services.same_host.segment import FIRST_OFFSET

SIZE = 1 << 12


def read(memory: bytearray, payload: Payload) -> bytes:
    """Return a payload, which comes to the same appended and filled in."""
    into = bytearray(b"before")
    read_payload(memoryview(memory), payload, into)
    filled = bytearray(payload.size_bytes)
    read_payload(memoryview(memory), payload, memoryview(filled))
    assert into == b"before" + filled
    return bytes(filled)


@pytest.mark.parametrize("seed", range(20))
def test_payloads_survive_each_other(seed: int) -> None:
    """Random sizes, released in random order: each can be read until it is released."""
    draw, memory = random.Random(seed), bytearray(SIZE)
    ring = RingWriter(memoryview(memory), FIRST_OFFSET, SIZE)
    held: dict[int, tuple[Payload, bytes]] = {}
    refused = 0
    for _ in range(500):
        if held and draw.random() < 0.4:
            sequence = draw.choice([*held]) if draw.random() < 0.5 else min(held)
            held.pop(sequence)
            ring.release(sequence)
            assert not ring.holds(sequence)
        data = draw.randbytes(draw.choice([0, 1, 63, 64, 65, draw.randrange(1500)]))
        payload = ring.put(memoryview(data))
        if payload is None:
            refused += 1
        else:
            assert ring.holds(payload.sequence)
            held[payload.sequence] = payload, data
        for payload, data in held.values():
            assert read(memory, payload) == data
    assert refused
    for sequence in held:
        ring.release(sequence)
    assert ring.put(memoryview(bytes(SIZE - FIRST_OFFSET - 64))) is not None


def test_what_is_too_large_never_fits() -> None:
    """A payload that is larger than the ring has no room in it, not even when the ring is empty."""
    ring = RingWriter(memoryview(bytearray(SIZE)), FIRST_OFFSET, SIZE)
    assert ring.put(memoryview(bytes(SIZE - FIRST_OFFSET - 63))) is None
    ring.release(7)
    assert ring.put(memoryview(bytes(10))) is not None


def test_a_reader_checks_what_it_is_told() -> None:
    """Bounds, size and number; also that nothing else was written there while it copied."""
    memory = bytearray(SIZE)
    ring = RingWriter(memoryview(memory), FIRST_OFFSET, SIZE)
    good = ring.put(memoryview(b"payload"))
    assert good is not None
    assert read(memory, good) == b"payload"
    for wrong in (
        replace(good, sequence=2),
        replace(good, sequence=0),
        replace(good, size_bytes=6),
        replace(good, size_bytes=SIZE),
        replace(good, size_bytes=2**64 - 1),
        replace(good, offset=good.offset + 1),
        replace(good, offset=good.offset + 64),
        replace(good, offset=0),
        replace(good, offset=64),
        replace(good, offset=SIZE),
        replace(good, offset=2**64 - 64),
    ):
        with pytest.raises(InvalidArgument):
            read(memory, wrong)

    class Overwritten(bytearray):
        """As it is when the writer overtakes the reader."""

        def __iadd__(self, data: object) -> Overwritten:
            HEADER.pack_into(memory, good.offset - 64, 5, 7)
            return self

    with pytest.raises(InvalidArgument, match="number 5"):
        read_payload(memoryview(memory), good, Overwritten())
