"""Roles are found by their names: what lies in the package is what a worker can be asked for."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.messages.description import ROLE_SUMMARIES, Role
from shard_worker import roles
from shard_worker.device.devices import parse_devices
from shard_worker.worker import Worker, WorkerConfig

STUB = """
from shard_worker.roles import WorkerRole


class StubRole(WorkerRole):
    description_field, part, open_sessions, session_bytes = "drafter", None, 3, 7

    def registrations(self):
        return []

    def describe(self):
        return "what the module says"

    def load(self, part, on_progress):
        raise AssertionError("nothing asks for it")

    def unload(self):
        raise AssertionError("nothing asks for it")


make_role = StubRole
"""


def test_every_role_is_a_module_and_is_summed_up_for_help() -> None:
    """A role without a module could not be served, and a module without a role could not be asked for."""
    modules = {module.name for module in pkgutil.iter_modules(roles.__path__)}

    assert modules == set(Role) == set(ROLE_SUMMARIES)


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module of the package's own names, which takes the place of the real one."""
    (tmp_path / "compress.py").write_text(STUB)
    name = f"{roles.__name__}.compress"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(roles, "__path__", [str(tmp_path), *roles.__path__])
    yield
    sys.modules.pop(name, None)


async def test_a_worker_takes_a_role_as_its_module_makes_it(stub: None) -> None:
    """What a worker describes and counts of a role comes from the role alone."""
    worker = Worker(WorkerConfig(parse_devices("cpu"), (Role.COMPRESS,), threads=1))

    described = await worker.describe()

    assert described.drafter == "what the module says"
    assert (described.open_sessions, described.session_bytes) == (3, 7)
    await worker.close()
