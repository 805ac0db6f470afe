"""What the pages name is there: files, links, anchors."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TOP = ("proto", "services", "shard_worker", "coordinator", "tests", "deploy", "docs")

_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")
_PATH = re.compile(rf"`((?:{'|'.join(TOP)})/[\w./-]*)`")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the site and code hosts make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.replace("`", "")).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link names a file that is there, and an anchor that it has."""
    for target, anchor in _LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(path), f"{page.name} links to {target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_pages_name_are_there(page: Path) -> None:
    """A path in backticks that begins with a folder of the project exists; one with <...> is a form, not a path."""
    for path in _PATH.findall(page.read_text(encoding="utf-8")):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_the_readme_is_short_and_its_folders_are_all() -> None:
    """The README has at most 150 lines, and its tree names every room of the three packages."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    tree = text.partition("## The folders")[2].partition("\n## ")[0]
    for package in ("services", "shard_worker", "coordinator"):
        rooms = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
        part = tree.partition(f"\n{package}/")[2].partition("\n\n")[0]
        assert {room for room in rooms if f"{room}/" not in part} == set()


COMMIT = r"\b(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{7}\b"
"""The first seven hexadecimal digits of a commit, of which at least one is a letter and one is not."""


def test_figures_name_commits_of_the_project() -> None:
    """Every commit that the pages name is in the history, where there is one."""
    named = {commit for page in PAGES for commit in re.findall(COMMIT, page.read_text("utf-8"))}
    assert named
    git = ["git", "-C", str(ROOT)]
    shallow = subprocess.run(
        [*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True, check=False
    )
    if shallow.stdout.strip() != "false":
        pytest.skip("no whole history here")
    for commit in named:
        # A commit that a rebase replaced is still found among the objects here, and in no clone from elsewhere.
        found = subprocess.run(
            [*git, "merge-base", "--is-ancestor", commit, "HEAD"], capture_output=True, text=True, check=False
        )
        assert found.returncode == 0, (commit, found.stderr)
