"""A Dockerfile's stages, and building one without a container engine: its commands, run in a folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

FILE = Path(__file__).parents[2] / "deploy" / "docker" / "Dockerfile"

Step = tuple[str, str]


@dataclass
class Stage:
    """base: an image, or another stage. steps: instruction and what stands behind it."""

    base: str
    steps: list[Step] = field(default_factory=list)


def stages(file: Path = FILE) -> dict[str, Stage]:
    """By name, in order."""
    text = re.sub(r"^\s*#.*\n", "", file.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, Stage] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            base, _, name = rest.split()
            found[name] = current = Stage(base)
        elif found:
            current.steps.append((instruction, rest.strip()))
    return found


def steps(found: Mapping[str, Stage], name: str) -> Iterator[Step]:
    """A stage's, behind those of the stages that it begins from."""
    if name in found:
        yield from steps(found, found[name].base)
        yield from found[name].steps


class Build:
    """A folder in place of an image's file system; only /src and /opt/flashsplit are of interest."""

    def __init__(self, folder: Path, context: Path) -> None:
        self._folder, self._context = folder, context
        self._environment = dict(os.environ)
        # Nothing of this checkout's own packages.
        self._environment.pop("PYTHONPATH", None)

    @property
    def prefix(self) -> Path:
        """The virtual environment."""
        return self._folder / "opt" / "flashsplit"

    def run(self, wanted: Iterator[Step] | list[Step]) -> None:
        """Raises CalledProcessError, with what it said, for a command that fails."""
        for instruction, rest in wanted:
            if instruction in ("ENV", "ARG"):
                for pair in rest.split():
                    name, _, value = pair.partition("=")
                    self._environment[name] = self._here(value)
            elif instruction == "WORKDIR":
                Path(self._here(rest)).mkdir(parents=True, exist_ok=True)
            elif instruction == "COPY":
                *sources, target = rest.split()
                for source in sources:
                    self._copy(source, target)
            else:
                assert instruction == "RUN", f"{instruction} {rest}"
                subprocess.run(
                    ["sh", "-ec", self._here(rest)],
                    cwd=self._folder / "src" if (self._folder / "src").exists() else self._folder,
                    env=self._environment,
                    check=True,
                    capture_output=True,
                    text=True,
                )

    def _copy(self, source: str, target: str) -> None:
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", source],
            cwd=self._context, capture_output=True, text=True, check=True,
        ).stdout.split()  # fmt: skip
        assert listed, f"COPY {source}: no such file"
        for name in listed:
            inside = Path(name).relative_to(source) if Path(name) != Path(source) else Path(Path(name).name)
            to = self._folder / "src" / target / inside
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self._context / name, to)

    def _here(self, text: str) -> str:
        return re.sub(r"(?<![\w.])/(src|opt/flashsplit)\b", rf"{self._folder}/\1", text)
