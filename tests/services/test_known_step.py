"""A step that is known but for its activation is told from every other one, and its message made before that is."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from services import stage_frames
from services.known_step import KnownStep, token_bytes, tokens_of
from services.steps import Forward, StepKind
from services.tensors import WireTensor

STEP = Forward(300, 70_000, (1, 151_000), StepKind.VERIFY, 15, more=40)


def packet(forward: Forward, dtype: str = "bfloat16", shape: tuple[int, ...] = (2, 24)) -> bytes:
    [message] = stage_frames.forward_to_messages(replace(forward, activation=filled(dtype, shape)))
    return message.SerializeToString()


def filled(dtype: str, shape: tuple[int, ...]) -> WireTensor:
    tensor = WireTensor(dtype, shape, b"")
    return replace(tensor, data=bytes(range(1, 1 + tensor.size_bytes)))


def expected(forward: Forward = STEP) -> KnownStep:
    found = KnownStep.of(replace(forward, activation=WireTensor("bfloat16", (2, 24), b"")))
    assert found is not None
    return found


def test_it_is_read_with_its_activation() -> None:
    data = expected().read(memoryview(packet(STEP)))
    assert data == filled("bfloat16", (2, 24)).data
    assert expected().whole(data) == replace(STEP, activation=filled("bfloat16", (2, 24)))


@pytest.mark.parametrize("tokens", [(0,), (151_935,), (2**32 - 1,), (7, 300)])
def test_or_with_its_tokens_where_it_has_no_activation(tokens: tuple[int, ...]) -> None:
    sent = replace(STEP, token_ids=tokens)
    one = KnownStep.of(replace(STEP, token_ids=(-1,) * len(tokens)))
    assert one is not None
    [message] = stage_frames.forward_to_messages(sent)
    text = message.SerializeToString()
    assert b"".join((one.before, token_bytes(tokens), one.behind)) == text
    data = one.read(memoryview(text))
    assert data is not None
    assert tokens_of(data) == tokens
    assert one.whole(data) == sent
    for other in (replace(sent, token_ids=(*tokens, 1)), replace(sent, step=301), replace(sent, more=0)):
        [message] = stage_frames.forward_to_messages(other)
        assert one.read(memoryview(message.SerializeToString())) is None


@pytest.mark.parametrize(
    "change",
    [
        {"step": 301},
        {"base_position": 70_001},
        {"token_ids": (1, 151_001)},
        {"token_ids": (1,)},
        {"kind": StepKind.DECODE},
        {"propose_tokens": 14},
        {"more": 39},
        {"more": 0},
    ],
)
def test_another_step_is_not(change: dict[str, Any]) -> None:
    assert expected().read(memoryview(packet(replace(STEP, **change)))) is None


@pytest.mark.parametrize(
    ("dtype", "shape"), [("float16", (2, 24)), ("bfloat16", (3, 16)), ("bfloat16", (1, 48)), ("bfloat16", (2, 23))]
)
def test_another_tensor_is_not(dtype: str, shape: tuple[int, ...]) -> None:
    assert expected().read(memoryview(packet(STEP, dtype, shape))) is None


@pytest.mark.parametrize("size", [0, 1, 20, 60, 110])
def test_what_is_no_step_is_not(size: int) -> None:
    """Cut short, without anything between, or any bytes."""
    one, whole = expected(), packet(STEP)
    for data in (whole[:size], one.before + one.behind, one.before[:size], os.urandom(size)):
        assert one.read(memoryview(data)) is None


def test_its_message_is_made_around_the_activation() -> None:
    one, activation = expected(), filled("bfloat16", (2, 24))
    assert b"".join((one.before, activation.data, one.behind)) == packet(STEP)


def test_none_is_expected_that_could_not_be_found() -> None:
    assert KnownStep.of(replace(STEP, activation=WireTensor("bfloat16", (0, 4), b""))) is None
