"""Fixtures shared by the engine's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from shard_worker.cache import attention_cache
from tests.shard_worker.chain import MakeChain
from tests.shard_worker.packed import Packed
from tests.shard_worker.tiny import Tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Gives tiny checkpoints, each written on first use."""
    return Tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def packed(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Packed:
    """Gives packed checkpoints and those that they stand for, each written on first use."""
    return Packed(tiny, tmp_path_factory.mktemp("packed"))


@pytest.fixture(autouse=True, scope="module")
def given_back_soon() -> Iterator[None]:
    """Have sliding layers give back what is behind their windows within the lengths that tests reach."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_cache, "CUT_ROWS", 32)
        patch.setattr(attention_cache, "PAGE_ROWS", 16)
        yield


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Run torch on one thread: tensors this small are slower on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def make_chain(tiny: Tiny) -> Iterator[MakeChain]:
    """Makes chains, which all tests of a file share."""
    make = MakeChain(tiny)
    yield make
    for chain in make.chains.values():
        chain.shutdown()
