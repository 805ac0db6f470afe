"""Imports run one way: proto -> services -> shard_worker | coordinator."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("services", "shard_worker", "coordinator")

# What only the named packages may import.
OWNERS = {
    "grpc": {"services"},
    "grpc_health": {"services"},
    "grpc_reflection": {"services"},
    "grpc_status": {"services"},
    "google": {"services"},
    "flashsplit": {"services"},
    "torch": {"shard_worker"},
    "safetensors": {"shard_worker"},
    "numpy": {"shard_worker"},
    "aiohttp": {"coordinator"},
    "fastapi": {"coordinator"},
    "h11": {"coordinator"},
    "http": {"coordinator"},
    "httpx2": {"coordinator"},
    "markdown_it": {"coordinator"},
    "prompt_toolkit": {"coordinator"},
    "pydantic": {"coordinator"},
    "requests": {"coordinator"},
    "starlette": {"coordinator"},
    "uvicorn": {"coordinator"},
    "services": {"services", "shard_worker", "coordinator"},
    "shard_worker": {"shard_worker"},
    "coordinator": {"coordinator"},
}
# Belongs to nothing that is shipped.
NOBODY = {"tests", "transformers", "pytest"}


def imported(source: str) -> Iterator[tuple[int, str]]:
    """Line and top-level module of every import, in functions and under conditions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            yield node.lineno, (node.module or "").partition(".")[0]
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute | ast.Name)
            and (node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id)
            in ("import_module", "__import__")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield node.lineno, str(node.args[0].value).partition(".")[0]


def breaches(package: str, source: str) -> list[str]:
    return [
        f"line {line}: {module}"
        for line, module in imported(source)
        if module in NOBODY or package not in OWNERS.get(module, {package})
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_keeps_the_rule(package: str) -> None:
    """No module of the package imports what belongs to another one."""
    files = sorted((ROOT / package).rglob("*.py"))
    assert len(files) > 5
    found = {
        str(path.relative_to(ROOT)): wrong for path in files if (wrong := breaches(package, path.read_text("utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("coordinator", "import grpc"),
        ("coordinator", "import grpc.aio as g"),
        ("coordinator", "from google.protobuf import message"),
        ("coordinator", "from google.rpc import status_pb2"),
        ("coordinator", "from flashsplit.shard.v1 import stage_pb2"),
        ("coordinator", "import torch"),
        ("coordinator", "def f():\n    import safetensors.torch"),
        ("coordinator", "from shard_worker.stage import Stage"),
        ("coordinator", "import importlib\nimportlib.import_module('torch')"),
        ("shard_worker", "if True:\n    from coordinator import placement"),
        ("shard_worker", "import grpc"),
        ("shard_worker", "from httpx2 import get"),
        ("services", "import torch.nn"),
        ("services", "from shard_worker import device"),
        ("services", "import coordinator"),
        ("services", "import uvicorn"),
        ("services", "from tests.services import fakes"),
    ],
)
def test_breaches_are_found(package: str, source: str) -> None:
    """The search finds each kind of import that breaks the rule."""
    assert len(breaches(package, source)) == 1


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("services", "import grpc\nfrom google.rpc import status_pb2\nfrom flashsplit.shard.v1 import stage_pb2"),
        ("shard_worker", "import torch\nfrom safetensors import safe_open\nfrom services.steps import Open"),
        ("coordinator", "import uvicorn\nfrom services.peers import Peers\nfrom coordinator import placement"),
    ],
)
def test_what_is_allowed_is_left_alone(package: str, source: str) -> None:
    """What a package owns, the services and itself may be imported."""
    assert breaches(package, source) == []


def test_services_load_without_their_users() -> None:
    """Importing all of services brings in neither engine, coordinator nor their libraries."""
    modules = sorted(path.stem for path in (ROOT / "services").glob("*.py") if path.stem != "__init__")
    code = "import sys\n" + "".join(f"import services.{name}\n" for name in modules)
    code += "print(sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(ast.literal_eval(done.stdout))
    assert "grpc" in loaded
    assert loaded.isdisjoint({"torch", "safetensors", "numpy", "shard_worker", "coordinator", "transformers"})
