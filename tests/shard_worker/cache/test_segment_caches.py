"""Rolling back: after a verify, any number of its rows can count, and the rest leaves no trace."""

from __future__ import annotations

import pytest
import torch

from shard_worker.cache.segment_caches import SegmentCaches, slots_of
from tests.reference import target
from tests.shard_worker.model.layers.family_runner import TOLERANCE
from tests.shard_worker.tiny import Run, Tiny, ids, load_stage, unsplit

NAMES = ("qwen3_5-ratio-2", "qwen3_5-ratio-3")
BLOCK = ids(6, seed=2)
AFTER = ids(5, seed=4)


def assert_states(tiny: Tiny, name: str, run: Run, tokens: list[int]) -> None:
    """The session's recurrent layers are where a fresh transformers run over the tokens is."""
    states = target.recurrent_states(tiny.model(name), tokens)
    assert len(states) == 3
    for layer, (conv, state) in states.items():
        own_conv, own_state = run.recurrent(layer)
        torch.testing.assert_close(own_conv, conv, rtol=0, atol=5e-5)
        torch.testing.assert_close(own_state, state, rtol=0, atol=5e-5)


def assert_goes_on(tiny: Tiny, name: str, run: Run, tokens: list[int]) -> None:
    """Five more tokens, one at a time, have the logits that transformers gives them."""
    rows = torch.cat([run([token]) for token in AFTER])

    expected = target.logits(tiny.model(name), [*tokens, *AFTER])[len(tokens) :]
    torch.testing.assert_close(rows, expected, **TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prompt_length", [1, 2, 3, 12])
@pytest.mark.parametrize("count", range(1, 7))
def test_a_partial_commit_is_a_fresh_run_over_the_kept_tokens(
    tiny: Tiny, name: str, prompt_length: int, count: int
) -> None:
    """Right after a prefill of any length, state, convolution inputs and next logits know only the kept rows."""
    prompt = ids(prompt_length, seed=1)
    run = unsplit(tiny.path(name))
    run(prompt)
    run.verify(BLOCK)

    run.commit(count)

    kept = [*prompt, *BLOCK[:count]]
    assert_states(tiny, name, run, kept)
    assert_goes_on(tiny, name, run, kept)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("first", "second"), [(1, 1), (2, 5), (6, 1), (3, 3), (5, 6)])
def test_two_partial_commits_in_a_row(tiny: Tiny, name: str, first: int, second: int) -> None:
    """A second verify starts from what the first one kept, whatever either keeps."""
    prompt = ids(9, seed=1)
    run = unsplit(tiny.path(name))
    run(prompt)
    run.verify(BLOCK)
    run.commit(first)
    run.verify(BLOCK[::-1])

    run.commit(second)

    kept = [*prompt, *BLOCK[:first], *BLOCK[::-1][:second]]
    assert_states(tiny, name, run, kept)
    assert_goes_on(tiny, name, run, kept)


def test_a_verify_may_come_first(tiny: Tiny) -> None:
    """A session whose first step is a verify starts from empty states."""
    name = NAMES[0]
    run = unsplit(tiny.path(name))
    run.verify(BLOCK)

    run.commit(2)

    assert_states(tiny, name, run, BLOCK[:2])
    assert_goes_on(tiny, name, run, BLOCK[:2])


def test_a_shorter_verify_after_a_longer_one(tiny: Tiny) -> None:
    """Rows that a longer block left behind do not reach into a shorter one's commit."""
    name, prompt = NAMES[1], ids(9, seed=1)
    run = unsplit(tiny.path(name))
    run(prompt)
    run.verify(ids(16, seed=8))
    run.commit(1)
    run.verify(BLOCK[:3])

    run.commit(3)

    kept = [*prompt, ids(16, seed=8)[0], *BLOCK[:3]]
    assert_states(tiny, name, run, kept)
    assert_goes_on(tiny, name, run, kept)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-sliding"])
def test_rejected_rows_leave_attention_caches_by_length(tiny: Tiny, name: str) -> None:
    """Where a model has attention alone, a rejected block is overwritten, also past a sliding window."""
    prompt = ids(20, seed=1)
    run = unsplit(tiny.path(name))
    run(prompt)
    for count in (1, 4, 6):
        run.verify(BLOCK)
        run.commit(count)
        prompt = [*prompt, *BLOCK[:count]]

    assert run.length == len(prompt)
    assert_goes_on(tiny, name, run, prompt)


def test_caches_take_what_the_layers_need(tiny: Tiny) -> None:
    """Keys and values for attention layers alone, float32 states for linear ones alone, each layer in its place."""
    stage = load_stage(tiny.path("qwen3_5"), dtype="bfloat16")
    [caches] = stage.allocate(100, 8).caches

    assert slots_of(stage.config, stage.layers) == (0, 1, 2, 0, 3, 4, 5, 1)
    assert caches.attention is not None
    [page] = caches.attention.pages
    assert page.shape == (2, 2, 2, 100, 32)
    assert page.dtype == torch.bfloat16
    assert caches.recurrent is not None
    assert caches.recurrent.state.shape == (6, 4, 16, 16)
    assert caches.recurrent.state.dtype == torch.float32
    assert caches.recurrent.conv.shape == (6, 3 + 8, 128)


def test_a_segment_of_one_kind_has_no_cache_of_the_other(tiny: Tiny) -> None:
    """A segment without attention holds no keys, one without linear layers no states, whatever the cut."""
    linear = load_stage(tiny.path("qwen3_5"), (0, 3)).allocate(10, 2).caches
    full = load_stage(tiny.path("qwen3_5"), (3, 4)).allocate(10, 2).caches

    assert [isinstance(caches, SegmentCaches) and caches.attention for caches in linear] == [None]
    assert [isinstance(caches, SegmentCaches) and caches.recurrent for caches in full] == [None]
