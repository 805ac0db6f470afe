"""A step's message with a gap: made before the missing bytes are there, and told from every other message."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from services.messages.session_frames import request_to_messages
from services.messages.step_template import StepTemplate, tokens_from_bytes, tokens_to_bytes
from services.messages.steps import Forward, StepKind
from services.messages.tensors import WireTensor

STEP = Forward(300, 70_000, (1, 151_000), StepKind.VERIFY, 15, more=40)


def packet(forward: Forward) -> bytes:
    """The step's message as it is sent where nobody expects it."""
    [message] = request_to_messages(forward)
    return message.SerializeToString()


def with_activation(forward: Forward, dtype: str = "bfloat16", shape: tuple[int, ...] = (2, 24)) -> Forward:
    """The step with an activation whose bytes count up."""
    tensor = WireTensor(dtype, shape, b"")
    return replace(forward, activation=replace(tensor, data=bytes(range(1, 1 + tensor.size_bytes))))


def template(forward: Forward = STEP) -> StepTemplate:
    """The template of a step that will have a bfloat16 activation of shape [2, 24]."""
    made = StepTemplate.of(replace(forward, activation=WireTensor("bfloat16", (2, 24), b"")))
    assert made is not None
    return made


def test_the_gap_holds_the_activation() -> None:
    """The missing bytes are found in the step's message, and make the step whole."""
    sent = with_activation(STEP)
    assert sent.activation is not None
    data = template().gap(memoryview(packet(sent)))
    assert data == sent.activation.data
    assert template().filled(data) == sent


def test_a_message_is_made_around_the_activation() -> None:
    """The template's bytes and the activation between them are the message of the step, byte for byte."""
    sent = with_activation(STEP)
    assert sent.activation is not None
    assert b"".join((template().before, sent.activation.data, template().after)) == packet(sent)


@pytest.mark.parametrize("tokens", [(0,), (151_935,), (2**32 - 1,), (7, 300)])
def test_the_gap_holds_the_tokens_where_there_is_no_activation(tokens: tuple[int, ...]) -> None:
    """Both ways, whatever the tokens are; with another number of them it is another step."""
    sent = replace(STEP, token_ids=tokens)
    made = StepTemplate.of(replace(STEP, token_ids=(0,) * len(tokens)))
    assert made is not None
    assert b"".join((made.before, tokens_to_bytes(tokens), made.after)) == packet(sent)
    data = made.gap(memoryview(packet(sent)))
    assert data is not None
    assert tokens_from_bytes(data) == tokens
    assert made.filled(data) == sent
    for other in (replace(sent, token_ids=(*tokens, 1)), replace(sent, step=301), replace(sent, more=0)):
        assert made.gap(memoryview(packet(other))) is None


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
        {"least_accepted": 1},
    ],
)
def test_another_step_is_not_taken_for_it(change: dict[str, Any]) -> None:
    """A message that differs in any field has no gap."""
    assert template().gap(memoryview(packet(with_activation(replace(STEP, **change))))) is None


@pytest.mark.parametrize(
    ("dtype", "shape"), [("float16", (2, 24)), ("bfloat16", (3, 16)), ("bfloat16", (1, 48)), ("bfloat16", (2, 23))]
)
def test_another_tensor_is_not_taken_for_it(dtype: str, shape: tuple[int, ...]) -> None:
    """A message whose activation has another type or shape has no gap, though it be as long."""
    assert template().gap(memoryview(packet(with_activation(STEP, dtype, shape)))) is None


@pytest.mark.parametrize("size", [0, 1, 20, 60, 110])
def test_bytes_that_are_no_step_are_not_taken_for_it(size: int) -> None:
    """Messages cut short, without anything in the gap, and random bytes have no gap."""
    made, message = template(), packet(with_activation(STEP))
    for data in (message[:size], made.before + made.after, made.before[:size], os.urandom(size)):
        assert made.gap(memoryview(data)) is None


def test_there_is_no_template_without_missing_bytes() -> None:
    """An activation of no rows leaves nothing to find in the message."""
    assert StepTemplate.of(replace(STEP, activation=WireTensor("bfloat16", (0, 4), b""))) is None
