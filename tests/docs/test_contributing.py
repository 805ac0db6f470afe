"""An addition takes the files that the contributing page lists: some are made that way, others compared."""

from __future__ import annotations

import re
import subprocess
import textwrap
from pathlib import Path

import pytest
import torch

from coordinator.planning.model_size import read_model_size
from coordinator.prefix import stores
from coordinator.text.parsers import tools
from services.errors import InvalidArgument, Unimplemented
from services.model import families
from tests.reference import checkpoints, storage
from tests.shard_worker.tiny import ids, unsplit

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "CONTRIBUTING.md").read_text(encoding="utf-8")


def listed(heading: str, name: str = "") -> set[str]:
    """The files at the beginnings of a section's bullets, with a name in place of <...>."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return {re.sub(r"<\w+>", name, path) for path in re.findall(r"^- `([^`]+)`", section, re.MULTILINE)}


def mentioning(word: str) -> set[str]:
    """The files of the packages and messages, but for stubs, in which a word stands."""
    command = ["git", "grep", "-lw", word, "--", "services", "shard_worker", "coordinator", "proto/*.proto"]
    return set(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())


def logits_of(path: Path) -> torch.Tensor:
    """What a whole checkpoint computes of a few tokens, [n, vocab]."""
    return unsplit(path)(ids(5))


def test_a_family_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family of known layers under a new name: the planner counts it and a worker loads and computes it."""
    [file] = listed("A model family", "twin") - {"tests/reference/checkpoints.py"}
    assert Path(file).parent == Path(*families.__name__.split("."))
    known = Path(str(families.__file__)).with_name("qwen3.py").read_text(encoding="utf-8")
    (tmp_path / "family").mkdir()
    (tmp_path / "family" / Path(file).name).write_text(known, encoding="utf-8")
    path = checkpoints.write_qwen3(tmp_path / "qwen3", layers=2)
    planned, computed = read_model_size(path, None), logits_of(path)
    storage.edit_config(path, lambda config: config.update(model_type="twin"))
    with pytest.raises(Unimplemented, match="qwen3, qwen3_5"):
        read_model_size(path, None)

    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path / "family")])

    assert read_model_size(path, None) == planned
    assert torch.equal(logits_of(path), computed)


def test_a_store_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store of a scheme of its own is found by it; before, the scheme is refused."""
    assert listed("A store of prefixes", "shelf") == {"coordinator/prefix/stores/shelf.py"}
    text = """
        from pathlib import Path
        from coordinator.prefix.stores.directory import DirectoryStore
        SCHEMES = ("shelf",)
        def open_location(location, scheme, field):
            return DirectoryStore(Path(location.removeprefix("shelf:/")), field)
    """
    (tmp_path / "shelf.py").write_text(textwrap.dedent(text), encoding="utf-8")
    with pytest.raises(InvalidArgument, match="shelf"):
        stores.open_store(f"shelf://{tmp_path}")

    monkeypatch.setattr(stores, "__path__", [*stores.__path__, str(tmp_path)])

    assert stores.open_store(f"shelf:/{tmp_path}/entries") is not None


def test_a_tool_call_format_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A format that stands in a file is known by that file's name."""
    [file] = listed("A tool-call format", "twin")
    assert file == "coordinator/text/parsers/tools/twin.py"
    known = Path(str(tools.__file__)).with_name("hermes.py").read_text(encoding="utf-8")
    (tmp_path / "twin.py").write_text(known, encoding="utf-8")

    monkeypatch.setattr(tools, "__path__", [*tools.__path__, str(tmp_path)])

    assert "twin" in tools.known_formats()
    assert tools.format_of("twin").is_taught_by is not None


def test_a_sampling_parameter_is_four_files() -> None:
    """Where `min_p` stands is what the page lists, and nowhere else."""
    assert mentioning("min_p") == listed("A sampling parameter")


@pytest.mark.parametrize(
    ("heading", "name"),
    [
        ("A model family", "qwen3_5"),
        ("A way of packing matrices", "awq"),
        ("A kind of layer", "linear_attention"),
        ("A draft kind", "dflash"),
        ("A way of choosing draft tokens", "argmax"),
        ("A role of workers", "compress"),
        ("A tool-call format", "hermes"),
    ],
)
def test_existing_ones_lie_where_the_page_says(heading: str, name: str) -> None:
    """The files that the page lists are there for one that exists."""
    files = listed(heading, name)
    assert files
    assert {file for file in files if not (ROOT / file).is_file()} == set()


def test_only_its_own_files_know_a_family() -> None:
    """A hybrid family's name stands in its own file alone."""
    assert mentioning("qwen3_5") == {"services/model/families/qwen3_5.py"}
