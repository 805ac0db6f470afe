"""The gated delta rule in all its forms against its recurrence, one token at a time in float64."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from shard_worker.ops import deltanet

HEADS, KEY_DIM, VALUE_DIM = 3, 8, 12
LENGTHS = (1, 3, 63, 64, 65, 130)
CLOSE = {"rtol": 0.0, "atol": 2e-5}


class Rows(NamedTuple):
    """Inputs of some rows, as `deltanet.step` takes them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor

    def part(self, first: int, last: int) -> Rows:
        return Rows(*(tensor[:, first:last] for tensor in self))


def draw(length: int, seed: int = 0, decay: float = 0.5) -> tuple[torch.Tensor, Rows]:
    """A state that is not zero, and rows with normed keys; log_decay lies between -decay and 0."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    k = torch.nn.functional.normalize(normal(HEADS, length, KEY_DIM), dim=-1)
    q = normal(HEADS, length, KEY_DIM) / KEY_DIM
    rows = Rows(q, k, normal(HEADS, length, VALUE_DIM), -decay * uniform(HEADS, length), uniform(HEADS, length))
    return normal(HEADS, KEY_DIM, VALUE_DIM), rows


def recurrence(state: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Output [heads, n, value_dim] and the state before every row and after the last, from the definition."""
    q, k, v, log_decay, beta = (tensor.double() for tensor in rows)
    state = state.double().clone()
    states, outputs = [state.clone()], torch.zeros(HEADS, q.shape[1], VALUE_DIM, dtype=torch.float64)
    for row in range(q.shape[1]):
        for head in range(HEADS):
            state[head] *= torch.exp(log_decay[head, row])
            correction = beta[head, row] * (v[head, row] - state[head].T @ k[head, row])
            state[head] += torch.outer(k[head, row], correction)
            outputs[head, row] = state[head].T @ q[head, row]
        states.append(state.clone())
    return outputs.float(), [state.float() for state in states]


@pytest.mark.parametrize("length", LENGTHS)
def test_steps_follow_the_recurrence(length: int) -> None:
    """Row after row, `step` gives the recurrence's outputs and leaves its state."""
    state, rows = draw(length)
    outputs, states = recurrence(state, rows)

    by_row = (rows.part(row, row + 1) for row in range(length))
    own = [deltanet.step(state, *row[:3], row.log_decay.exp(), row.beta)[0] for row in by_row]

    torch.testing.assert_close(torch.cat(own, 1), outputs, **CLOSE)
    torch.testing.assert_close(state, states[-1], **CLOSE)


@pytest.mark.parametrize("length", LENGTHS)
def test_prefill_follows_the_recurrence(length: int) -> None:
    """Any number of rows at once gives the recurrence's outputs and leaves its state."""
    state, rows = draw(length)
    outputs, states = recurrence(state, rows)

    own = deltanet.prefill(state, *rows)

    torch.testing.assert_close(own, outputs, **CLOSE)
    torch.testing.assert_close(state, states[-1], **CLOSE)


@pytest.mark.parametrize("cut", [1, 2, 63, 64, 65, 100, 129])
def test_prefill_may_be_cut_anywhere(cut: int) -> None:
    """Two prefills one after the other are one prefill."""
    state, rows = draw(130)
    outputs, states = recurrence(state, rows)

    first = deltanet.prefill(state, *rows.part(0, cut))
    second = deltanet.prefill(state, *rows.part(cut, 130))

    torch.testing.assert_close(torch.cat((first, second), 1), outputs, **CLOSE)
    torch.testing.assert_close(state, states[-1], **CLOSE)


@pytest.mark.parametrize("length", [1, 2, 16, 64])
def test_a_block_leaves_the_state_and_any_part_of_it_can_be_committed(length: int) -> None:
    """`block` reads the state without writing it; `commit` of its first c rows is the recurrence over c rows."""
    state, rows = draw(length)
    outputs, states = recurrence(state, rows)
    before = state.clone()

    own, corrected, running = deltanet.block(state, *rows)

    torch.testing.assert_close(own, outputs, **CLOSE)
    assert torch.equal(state, before)
    for count in range(1, length + 1):
        advanced = before.clone()
        deltanet.commit(advanced, rows.k[:, :count], corrected[:, :count], running[:, :count])
        torch.testing.assert_close(advanced, states[count], **CLOSE)


@pytest.mark.parametrize("decay", [0.0, 60.0, 400.0])
def test_decays_of_any_size_stay_finite(decay: float) -> None:
    """Without any decay, and with one that underflows or overflows exp over a chunk, the recurrence is followed."""
    state, rows = draw(64, decay=decay)
    outputs, states = recurrence(state, rows)

    own = deltanet.prefill(state, *rows)

    torch.testing.assert_close(own, outputs, **CLOSE)
    torch.testing.assert_close(state, states[-1], **CLOSE)


@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolution_is_causal_and_depthwise(rows: int, dtype: torch.dtype) -> None:
    """Each row is the sum of its own and the t - 1 inputs before it, each times its tap, channel by channel."""
    generator = torch.Generator().manual_seed(1)
    window = torch.randn(3 + rows, 5, generator=generator).to(dtype)
    taps = torch.randn(4, 5, generator=generator)

    own = deltanet.causal_conv(window, taps)

    assert own.dtype == torch.float32
    for row in range(rows):
        for channel in range(5):
            expected = sum(float(window[row + tap, channel]) * float(taps[tap, channel]) for tap in range(4))
            assert float(own[row, channel]) == pytest.approx(expected, abs=1e-5)
