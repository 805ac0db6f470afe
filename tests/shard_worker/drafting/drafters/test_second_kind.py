"""A second draft kind, which is nothing but a file: found by name, and served wherever a draft is."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from services.errors import Unimplemented
from services.messages.description import FeatureTransport, HeadPlace
from services.model import drafts
from shard_worker.drafting import drafters
from shard_worker.drafting.drafters import drafter_of
from shard_worker.weights.opening import open_checkpoint
from tests.reference import storage
from tests.shard_worker.chain import Chain
from tests.shard_worker.drafting.drafters.second_kind.echo import EchoConfig
from tests.shard_worker.tiny import Tiny

HIDDEN, COUNT = 64, 24
CONFIG = EchoConfig(HIDDEN, 256, 4096, 8, 254, (1, 2), 4)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The file lies where both packages look for draft kinds."""
    folder = str(Path(__file__).with_name("second_kind"))
    for package in (drafts, drafters):
        monkeypatch.setattr(package, "__path__", [*package.__path__, folder])
    yield
    for package in (drafts, drafters):
        sys.modules.pop(f"{package.__name__}.echo", None)


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    """A checkpoint of that kind."""
    path = tmp_path / "echo"
    path.mkdir()
    write(path)
    storage.save_tensors(path, {"fc.weight": torch.eye(HIDDEN).repeat(1, 2)})
    return path


def write(path: Path, **more: object) -> None:
    (path / "config.json").write_text(json.dumps({"echo_config": asdict(CONFIG), **more}))


def test_a_kind_is_found_by_its_name(draft: Path, tmp_path: Path) -> None:
    """A checkpoint with the kind's configuration is of that kind, and the refusal of another one lists it."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"architectures": ["Unheard"]}))

    assert drafter_of(open_checkpoint(draft, "--draft")).__name__.endswith(".echo")
    with pytest.raises(Unimplemented, match="Unheard.*known kinds: dflash, echo"):
        drafts.check_draft_kind(json.loads((other / "config.json").read_text()), other)


def test_random_weights_have_the_kinds_shapes(tmp_path: Path) -> None:
    """A checkpoint without files, for measuring, has the tensors that the kind says."""
    write(tmp_path, random_weights=True, torch_dtype="float32")

    assert open_checkpoint(tmp_path, "--draft").tensor("fc.weight").shape == (HIDDEN, 2 * HIDDEN)


@pytest.mark.parametrize("transport", FeatureTransport)
@pytest.mark.parametrize("place", HeadPlace)
async def test_a_session_speculates_with_it(
    tiny: Tiny, draft: Path, place: HeadPlace, transport: FeatureTransport
) -> None:
    """Beside the last stage or in a worker of its own, from either form of features, the tokens are the target's."""
    chain = Chain(tiny.path("qwen3"), (2,), draft=draft, place=place, transport=transport)
    prompt, truth = tiny.clear_prompt("qwen3", 12, COUNT + 4)
    async with chain.session() as client:
        answer = await client.speculate(prompt, COUNT)
        saved = await client.save("a")
        kept, length = [*prompt, *answer.tokens], client.length
    async with chain.session() as client:
        await client.restore("a", kept[:length])
        again = await client.speculate(kept[length:], 4)
    chain.shutdown()

    assert answer.tokens == truth[:COUNT]
    assert all(len(proposal) == 7 for proposal in answer.proposals)
    assert [part.refusal for part in saved.parts] == [""] * 3
    assert again.tokens == truth[COUNT:]
