"""Rows of recurrent layers that are recorded, and that the next step advances by: as if each had counted at once."""

from __future__ import annotations

import functools
import random

import pytest
import torch

from services.model.config import LinearAttentionConfig
from shard_worker.cache.recurrent_cache import RecurrentCache
from tests.shard_worker.model.kernels.machine import ON_GPU, device

pytestmark = pytest.mark.gpu

WHERE = device().torch_device
SHAPE = LinearAttentionConfig(key_heads=1, value_heads=2, key_head_dim=16, value_head_dim=32, conv_taps=4)
LAYERS, SESSIONS, ROWS = 1, 3, 4


@torch.inference_mode()
def test_rows_that_are_advanced_by_later() -> None:
    """Deferred one behind the other, behind one that counted at once or was taken back, and with steps of others in
    between: outputs, states and inputs to the last bit."""
    from shard_worker.model.kernels import deltanet
    from shard_worker.model.kernels.step_parameters import COUNTED, Places, StepParameters

    shape = deltanet.Shape(1, 2, 16, 32, 4, LAYERS)
    random.seed(3)
    torch.manual_seed(3)
    taps = torch.randn(shape.taps, shape.channels, device=WHERE)
    decay_rate, dt_bias = -torch.rand(shape.value_heads, device=WHERE), torch.rand(shape.value_heads, device=WHERE)
    norm = torch.rand(shape.value_dim, device=WHERE)
    like = torch.empty(0, device=WHERE)
    parameters = StepParameters(WHERE, 0, rows=ROWS, sessions=SESSIONS)

    def advance(recorded: torch.Tensor) -> None:
        deltanet.commit(shape, Places(recorded), torch.ones(1, dtype=torch.int64, device=WHERE), like)

    def step(chosen: dict[RecurrentCache, bool], projected: torch.Tensor) -> list[torch.Tensor]:
        """Run all layers on a row of each of these sessions, which is deferred or not."""
        parameters.begin()
        for number, (cache, deferred) in enumerate(chosen.items()):
            before = cache.begin_row(advance if deferred else None)
            parameters.add(number, number, 0, 1, uncommitted=deferred, deferred=before, recurrent=cache)
        parameters.send()
        places = parameters.places(ROWS)
        run = functools.partial(deltanet.run, shape, projected, taps, decay_rate, dt_bias, norm, places)
        outputs = [run(layer, 1e-6, uncommitted=False)[: len(chosen)] for layer in range(LAYERS)]
        deltanet.commit(shape, places, places.lines[:, COUNTED.value], like, states=False)
        parameters.record_launch()
        return outputs

    later, at_once = ([RecurrentCache(LAYERS, SHAPE, 4, like) for _ in range(SESSIONS)] for _ in range(2))
    for turn in range(6 if ON_GPU else 4):
        numbers = random.sample(range(SESSIONS), random.randint(1, SESSIONS))
        deferred = [random.random() < 0.8 for _ in numbers]
        projected = torch.randn(ROWS, shape.width, device=WHERE)
        # One that is taken back: nothing of it is left.
        lost = torch.randn(ROWS, shape.width, device=WHERE)
        if turn % 3 == 2:
            step({later[number]: True for number in numbers}, lost)
            for number in numbers:
                later[number].take_back()
        found = step({later[number]: one for number, one in zip(numbers, deferred, strict=True)}, projected)
        expected = step({at_once[number]: False for number in numbers}, projected)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
        if turn % 4 == 3:
            for cache in later:
                cache.settle()
    for own, other in zip(later, at_once, strict=True):
        own.settle()
        assert other.state.abs().sum() > 0
        assert torch.equal(own.state, other.state)
        assert torch.equal(own.conv[:, : shape.taps - 1], other.conv[:, : shape.taps - 1])
