"""Stages: any split of a model over them is the unsplit model."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from shard_worker.model.features import Features
from shard_worker.stage.loader import CaptureRequest
from tests.reference import target
from tests.shard_worker.tiny import Run, Tiny, ids, load_split, load_stage, unsplit

CUTS = [
    *(("qwen3-sliding", cuts) for cuts in [(1,), (2,), (3,), (1, 3), (1, 2, 3)]),
    *((name, cuts) for name in ("gemma3", "gemma4") for cuts in [(1,), (2,), (3,), (1, 2, 3)]),
    *(("gemma4-sharing", cuts) for cuts in [(1,), (2,), (1, 2)]),
    *(("qwen3-tied", cuts) for cuts in [(1,), (3,)]),
    *(("qwen3_5", (cut,)) for cut in range(1, 8)),
    *(("qwen3_5", cuts) for cuts in [(3, 4), (1, 7), (2, 4, 6), (1, 2, 3)]),
]
CAPTURED = {"qwen3-sliding": (2, 0, 3), "qwen3_5": (6, 0, 3, 7)}
"""Blocks of each kind, the last one too, in an order of their own."""
EXACT = {"rtol": 0.0, "atol": 1e-5}


@pytest.mark.parametrize(("name", "cuts"), CUTS)
def test_every_split_is_the_unsplit_model(tiny: Tiny, name: str, cuts: tuple[int, ...]) -> None:
    """Prefill, steps, and verifies with partial commits have the unsplit logits at every cut."""
    tokens = ids(40)
    runs = [unsplit(tiny.path(name)), Run(load_split(tiny.path(name), cuts))]
    answers = []
    for run in runs:
        rows = [run(tokens[:20]), run(tokens[20:21]), run.verify(tokens[21:28])]
        run.commit(3)
        rows.append(run.verify(tokens[30:36]))
        run.commit(6)
        rows.append(run(tokens[36:37]))
        answers.append(torch.cat(rows))

    torch.testing.assert_close(answers[1], answers[0], **EXACT)
    assert runs[0].length == runs[1].length == 31


@pytest.mark.parametrize(
    ("name", "cuts"), [("qwen3-sliding", (2,)), ("qwen3_5", (4,)), ("qwen3_5", (1, 3, 6)), ("qwen3_5", (3, 5))]
)
def test_greedy_tokens_of_a_split_are_those_of_transformers(tiny: Tiny, name: str, cuts: tuple[int, ...]) -> None:
    """Forty greedy tokens over a chain of stages are the unsplit model's in transformers."""
    prompt, expected = tiny.clear_prompt(name, 12, 40)
    run = Run(load_split(tiny.path(name), cuts))

    rows = run(prompt)
    produced: list[int] = []
    while len(produced) < 40:
        produced.append(int(rows[-1].argmax()))
        rows = run(produced[-1:])

    assert produced == expected


def all_cuts(name: str) -> list[tuple[int, ...]]:
    layers = 8 if name == "qwen3_5" else 4
    return [(), *((cut,) for cut in range(1, layers)), tuple(range(1, layers))]


@pytest.mark.parametrize(("name", "cuts"), [(name, cuts) for name in CAPTURED for cuts in all_cuts(name)])
def test_captured_slices_are_the_named_blocks_outputs(tiny: Tiny, name: str, cuts: tuple[int, ...]) -> None:
    """Each capture comes once, at its place in the draft's list, taken after the block and before the final norm."""
    tokens, wanted = ids(25), CAPTURED[name]
    expected = target.block_outputs(tiny.model(name), tokens, wanted)
    run = Run(load_split(tiny.path(name), cuts, capture=CaptureRequest(wanted, None)))
    features, verified = Features(), Features()

    run(tokens[:20], features)
    run.verify(tokens[20:], verified)

    assert sorted(features.slices) == sorted(verified.slices) == list(range(len(wanted)))
    assert features.total is verified.total is None
    for index, block in enumerate(expected):
        own = torch.cat((features.slices[index], verified.slices[index]))
        torch.testing.assert_close(own, block, rtol=0, atol=2e-4)


@pytest.mark.parametrize(("name", "cuts"), [(name, cuts) for name in CAPTURED for cuts in all_cuts(name)])
def test_the_sum_over_stages_is_fc_over_the_concatenated_captures(tiny: Tiny, name: str, cuts: tuple[int, ...]) -> None:
    """Adding up slice by slice, stage by stage, gives `fc` of all captures joined in the draft's order."""
    tokens, wanted = ids(25), CAPTURED[name]
    fc = torch.randn(64, 64 * len(wanted), generator=torch.Generator().manual_seed(7)) / 16
    joined = torch.cat(target.block_outputs(tiny.model(name), tokens, wanted), -1)
    run = Run(load_split(tiny.path(name), cuts, capture=CaptureRequest(wanted, fc)))
    features = Features()

    run(tokens, features)

    assert features.total is not None
    assert not features.slices
    assert features.total.dtype == torch.float32
    torch.testing.assert_close(features.total, F.linear(joined, fc), rtol=0, atol=2e-4)


def test_permuted_or_shifted_captures_are_other_features(tiny: Tiny) -> None:
    """The order of the captured blocks and each block's number matter, so a mistake in either would show."""
    tokens = ids(10)
    fc = torch.randn(64, 128, generator=torch.Generator().manual_seed(7)) / 16
    totals = []
    for wanted in [(1, 6), (6, 1), (0, 6), (1, 5)]:
        features = Features()
        unsplit_with = Run([load_stage(tiny.path("qwen3_5"), capture=CaptureRequest(wanted, fc))])
        unsplit_with(tokens, features)
        assert features.total is not None
        totals.append(features.total)

    for one, other in itertools.combinations(totals, 2):
        assert (one - other).abs().max() > 0.1


def test_nothing_is_captured_where_no_features_are_wanted(tiny: Tiny) -> None:
    """A stage that could capture runs a session without a draft to the same logits."""
    tokens = ids(10)
    plain = unsplit(tiny.path("qwen3_5"))
    capturing = Run([load_stage(tiny.path("qwen3_5"), capture=CaptureRequest((1, 6), None))])

    assert torch.equal(capturing(tokens), plain(tokens))


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
@pytest.mark.parametrize("devices", ["cpu+cpu", "cpu+cpu+cpu"])
def test_a_stage_over_several_devices_is_a_stage_on_one(tiny: Tiny, name: str, devices: str) -> None:
    """Spreading a stage over local devices changes neither logits nor captures."""
    tokens, wanted = ids(30), (3, 1)
    fc = torch.randn(64, 128, generator=torch.Generator().manual_seed(7)) / 16
    answers = []
    for spread in ("cpu", devices):
        stage = load_stage(tiny.path(name), devices=spread, capture=CaptureRequest(wanted, fc))
        run, features = Run([stage]), Features()
        rows = [run(tokens[:20], features), run.verify(tokens[20:26])]
        run.commit(2)
        rows.append(run(tokens[26:27]))
        assert features.total is not None
        answers.append(torch.cat((*rows, F.pad(features.total, (0, 192)))))
        assert len(stage.segments) == len(spread.split("+"))

    torch.testing.assert_close(answers[1], answers[0], **EXACT)
