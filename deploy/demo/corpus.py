"""Text of the Python standard library, read from the running interpreter.

Files are divided by a hash of their path, so that a split never changes between runs:
``train`` teaches the target, ``prompts`` only supplies beginnings for the target to continue
(the draft learns from those continuations), and ``heldout`` is used for nothing but measuring.
Functions that carry a docstring are also turned into requests: signature and docstring in, the
whole function out.
"""

import ast
import hashlib
import random
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "encodings",
    "ensurepip",
    "data",
}
FUNCTION_REQUESTS = (
    "Write the Python function that has this signature and docstring.",
    "Implement this Python function.",
    "Complete this Python function.",
    "Write the body of this function.",
)


@dataclass(frozen=True)
class SourceFile:
    name: str
    text: str
    split: str


@dataclass(frozen=True)
class Function:
    """A documented function; ``source`` is all of it, signature and docstring included."""

    signature: str
    docstring: str
    source: str
    split: str


def fraction(text: str) -> float:
    """A stable number in [0, 1) for ``text``: what every split is decided with."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48


def split_of(name: str) -> str:
    position = fraction(name)
    return "heldout" if position < 0.05 else "prompts" if position < 0.15 else "train"


def read_sources(folder: Path | None = None, limit: int | None = None) -> list[SourceFile]:
    """Python files of the standard library, tests included, sorted by path."""
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    files, seen = [], set()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(relative.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        digest = hashlib.sha256(text.encode()).digest()
        if digest in seen or not 400 <= len(text) <= 400_000 or _is_table(text):
            continue
        seen.add(digest)
        name = relative.as_posix()
        files.append(SourceFile(name, text, split_of(name)))
    random.Random(0).shuffle(files)
    return files[:limit]


def _is_table(text: str) -> bool:
    """Data in the shape of source (character maps, test vectors) teaches nothing."""
    return sum(text.count(mark) for mark in "0123456789\\") > 0.2 * len(text)


def read_functions(files: list[SourceFile]) -> list[Function]:
    """Every documented function once; one that training files repeat never counts as held out."""
    functions, seen = [], set()
    for file in sorted(files, key=lambda file: file.split != "train"):
        try:
            with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
                tree = ast.parse(file.text)
        except (SyntaxError, ValueError):
            continue
        for function in _documented(tree, file):
            if function.source not in seen:
                seen.add(function.source)
                functions.append(function)
    return functions


def _documented(tree: ast.Module, file: SourceFile) -> Iterator[Function]:
    lines = file.text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or not ast.get_docstring(node):
            continue
        if len(node.body) < 2 or node.end_lineno is None:
            continue
        source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        first, last = (line - node.lineno for line in _span(node.body[0]))
        parts = source.splitlines()
        signature, docstring = "\n".join(parts[:first]), "\n".join(parts[first : last + 1])
        short = len(signature) + len(docstring) <= 700 and len(source) <= 1500
        if short and source.startswith("def ") and first > 0:
            yield Function(signature, docstring, source, file.split)


def _span(node: ast.stmt) -> tuple[int, int]:
    return node.lineno, node.end_lineno or node.lineno


def function_request(signature: str, docstring: str, rng: random.Random) -> str:
    return f"{rng.choice(FUNCTION_REQUESTS)}\n```python\n{signature}\n{docstring}\n```"


def function_chat(function: Function, rng: random.Random) -> tuple[str, str]:
    """One request and its answer; the answer repeats the signature, as people expect."""
    request = function_request(function.signature, function.docstring, rng)
    return request, f"```python\n{function.source}\n```"


def prefix(text: str, rng: random.Random, shortest: int, longest: int, anywhere: bool) -> str:
    """The beginning of a file, or a piece from its middle, cut at line ends."""
    size = rng.randint(shortest, longest)
    start = 0
    if anywhere and len(text) > 2 * size:
        start = text.find("\n", rng.randrange(len(text) - 2 * size)) + 1
    end = text.find("\n", start + size)
    return text[start : end + 1] if end >= 0 else text[start : start + size]
