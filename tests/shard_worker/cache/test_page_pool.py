"""Pages that sessions and kept prefixes share: nobody sees what another one writes, and every page comes back."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings, strategies as st

from services.errors import ResourceExhausted
from shard_worker.cache import attention_cache
from shard_worker.cache.attention_cache import AttentionCache, AttentionView
from shard_worker.cache.kept_pages import KeptRows
from shard_worker.cache.page_pool import PagePool
from shard_worker.cache.prefix_state import GroupKind, Part, StateView, TensorGroup, WholeView, copy_in, copy_out
from shard_worker.device.devices import Device, free_bytes
from tests.shard_worker.model.kernels.machine import ON_GPU, device

CAPACITY, PAGE, WINDOW, CUT = 40, 4, 6, 3
CPU = torch.device("cpu")
SHAPES = {"stage": (2, 2, 4), "draft": (1, 1, 2), "sliding": (1, 1, 2)}
"""Of each cache of a session: layers, heads and head size."""


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    """Have memory behind windows given back soon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_cache, "CUT_ROWS", CUT)
        yield


def cache(pool: PagePool, name: str = "stage") -> AttentionCache:
    """Return an empty cache of a session."""
    layers, heads, dim = SHAPES[name]
    window = WINDOW if name == "sliding" else None
    return AttentionCache(layers, heads, CAPACITY, dim, torch.empty(0), PAGE, window, pool=pool)


def group(name: str) -> TensorGroup:
    """Return what a snapshot keeps of the keys, or of the values, of a cache."""
    layers, heads, dim = SHAPES[name]
    names = tuple(f"{name}.{layer}" for layer in range(layers))
    return TensorGroup(GroupKind.ROWS, names, (heads, dim), torch.float32, WINDOW if name == "sliding" else None)


STATE = TensorGroup(GroupKind.STATE, ("state",), (3,), torch.float32)
PAGE_BYTES = {name: max(1024, layers * 2 * heads * PAGE * dim * 4) for name, (layers, heads, dim) in SHAPES.items()}


class Session:
    """A session's caches, and a plain copy of all that it wrote."""

    def __init__(self, pool: PagePool, names: Sequence[str]) -> None:
        self.caches = {name: cache(pool, name) for name in names}
        self.state = torch.zeros(1, 3)
        self.length, self.parent = 0, None
        self.parent: Saved | None
        self.written = {
            name: torch.zeros(layers, 2, heads, CAPACITY, dim) for name, (layers, heads, dim) in SHAPES.items()
        }

    @property
    def groups(self) -> list[TensorGroup]:
        return [*(group(name) for name in self.caches for _ in (0, 1)), *([STATE] if "sliding" in self.caches else [])]

    @property
    def views(self) -> list[StateView]:
        rows = [AttentionView(cache, slice(None), which) for cache in self.caches.values() for which in (0, 1)]
        return [*rows, *([WholeView(self.state)] if "sliding" in self.caches else [])]

    def write(self, first: int, count: int, *, counts: bool = True) -> None:
        """Write random rows. counts: whether they are looked at; otherwise they are of a block that is rejected."""
        for name, cache in self.caches.items():
            layers, _, heads, _, dim = self.written[name].shape
            rows = torch.randn(layers, 2, heads, count, dim)
            for layer in range(layers):
                cache.store(layer, first, *rows[layer].transpose(1, 2))
            if counts:
                self.written[name][:, :, :, first : first + count] = rows
        self.state += counts

    def holds(self) -> bool:
        """Whether every row that may be looked at is what was written there last."""
        whole = True
        for name, cache in self.caches.items():
            first = max(0, self.length - WINDOW) if name == "sliding" else 0
            for which in (0, 1):
                rows = self.written[name][:, which, :, first : self.length]
                whole &= torch.equal(cache.read(slice(None), which, first, self.length), rows)
                if name != "sliding" and self.length:
                    whole &= torch.equal(cache.span(0, 0, self.length)[which], rows[0])
        return whole


class Saved:
    """A kept prefix, and a plain copy of what its session had written."""

    def __init__(self, session: Session, *, upon: Saved | None) -> None:
        self.parent = upon
        first = 0 if upon is None else upon.length
        self.length, self.state = session.length, session.state.clone()
        self.part: Part = first, self.length, copy_out(session.groups, session.views, first, self.length)
        self.written = {name: rows.clone() for name, rows in session.written.items()}

    @property
    def chain(self) -> list[Part]:
        return [*(self.parent.chain if self.parent is not None else []), self.part]

    def holds(self) -> bool:
        """Whether the prefix's own rows are still what was kept."""
        _, last, items = self.part
        return all(
            torch.equal(rows.read(rows.kept.first, last), self.written[name][:, which, :, rows.kept.first : last])
            for (name, which), rows in zip(product(self.written, (0, 1)), items, strict=False)
            if isinstance(rows, KeptRows)
        )

    def move_to_host(self) -> None:
        """Let go of all pages, as for want of them."""
        for rows in self.part[2]:
            if isinstance(rows, KeptRows):
                rows.kept.move_to_host()

    def import_again(self) -> None:
        """Have plain copies, as one that came from another worker has."""
        first, last, items = self.part
        self.part = (
            first,
            last,
            tuple(item.read(item.kept.first, last).clone() if isinstance(item, KeptRows) else item for item in items),
        )


class Schedule:
    """Sessions that begin, grow, have blocks rejected, are kept, go on from what was kept, and end, in any order."""

    def __init__(self, windowed: bool, pages: int, rng: random.Random) -> None:
        self.rng, self.names = rng, ("stage", "draft", "sliding") if windowed else ("stage", "draft")
        self.pool = PagePool()
        self.pool.take(pages * PAGE_BYTES["draft"], CPU)
        self.sessions: list[Session] = []
        self.saved: list[Saved] = []

    def any_session(self) -> Session:
        if not self.sessions:
            self.sessions.append(Session(self.pool, self.names))
        return self.rng.choice(self.sessions)

    def grow(self) -> None:
        session = self.any_session()
        count = min(self.rng.randint(1, 7), CAPACITY - 3 - session.length)
        if count <= 0:
            return
        session.write(session.length, count)
        session.length += count
        for one in session.caches.values():
            one.free_unseen(session.length)
        if rejected := self.rng.randrange(4):
            session.write(session.length, rejected, counts=False)

    def write_again(self) -> None:
        """Write where others may read. No session does that; it would not show there all the same."""
        session = self.any_session()
        if "sliding" not in self.names and session.length:
            session.parent = None
            first = self.rng.randrange(session.length)
            session.write(first, min(self.rng.randint(1, 5), session.length - first))

    def save(self) -> None:
        session = self.any_session()
        parent = session.parent
        if session.length and (parent is None or parent.length < session.length):
            session.parent = Saved(session, upon=parent)
            self.saved.append(session.parent)

    def restore(self) -> None:
        if not self.saved:
            return
        saved, session = self.rng.choice(self.saved), Session(self.pool, self.names)
        shorter = 0 if "sliding" in self.names else self.rng.choice((0, 0, 3))
        length = max(1, saved.length - shorter)
        copy_in(session.groups, session.views, saved.chain, length)
        session.length = length
        for name, rows in saved.written.items():
            session.written[name][:, :, :, :length] = rows[:, :, :, :length]
        if length == saved.length:
            session.parent = saved
            assert "sliding" not in self.names or torch.equal(session.state, saved.state)
        self.sessions.append(session)

    def leave_the_device(self) -> None:
        if self.saved:
            self.rng.choice((Saved.move_to_host, Saved.import_again))(self.rng.choice(self.saved))

    def close(self) -> None:
        self.sessions.remove(self.any_session())

    def free(self) -> None:
        """Drop a kept prefix; others that build on it, and sessions, still have it as theirs."""
        if self.saved:
            self.saved.remove(self.rng.choice(self.saved))

    def run(self, steps: int) -> int:
        """Do so many things, and look at everything behind each. Returns how often pages ended."""
        exhausted = 0
        things = [self.grow] * 3 + [self.save, self.restore] * 2 + [self.write_again, self.close, self.free]
        for _ in range(steps):
            try:
                self.rng.choice([*things, self.leave_the_device])()
            except ResourceExhausted as error:
                exhausted += error.reason == "OUT_OF_MEMORY"
                # Whoever finds no page ends; here all do.
                self.sessions.clear()
            assert all(one.holds() for one in (*self.sessions, *self.saved))
            assert self.pool.size_bytes is not None
            assert self.pool.used_bytes <= self.pool.size_bytes
        return exhausted


@settings(max_examples=20)
@given(seed=st.integers(0, 1 << 32), windowed=st.booleans(), pages=st.integers(20, 90))
def test_nobody_sees_what_another_one_writes_and_every_page_comes_back(seed: int, windowed: bool, pages: int) -> None:
    """Over random schedules everything reads as from plain copies, and at the end all memory is there in one piece."""
    torch.manual_seed(seed)
    schedule = Schedule(windowed, pages, random.Random(seed))
    schedule.run(60)
    pool, size = schedule.pool, schedule.pool.size_bytes
    del schedule
    assert size is not None
    assert pool.used_bytes == 0
    assert pool.page((size // 4,), torch.float32, CPU).size_bytes == size


def grown(pool: PagePool, length: int) -> AttentionCache:
    """Return a session's cache of so many rows."""
    one = cache(pool)
    for layer in range(2):
        one.store(layer, 0, torch.randn(length, 2, 4), torch.randn(length, 2, 4))
    return one


def test_a_prefix_takes_no_memory_of_its_own_and_costs_no_copy() -> None:
    """Keeping takes no page, and going on takes none but a copy of the last one that another session writes in."""
    pool, size = PagePool(), PAGE_BYTES["stage"]
    session = grown(pool, 10)
    view = AttentionView(session, slice(None), 0)
    chain = [(0, 10, copy_out([group("stage")], [view], 0, 10))]
    assert pool.used_bytes == 3 * size

    others = [cache(pool) for _ in range(2)]
    for other in others:
        copy_in([group("stage")], [AttentionView(other, slice(None), 0)], chain, 10)
    assert [other.addresses[:2] for other in others] == [session.addresses[:2]] * 2
    assert len({other.addresses[2] for other in (session, *others)}) == 3
    assert pool.used_bytes == 5 * size

    # Once nobody writes behind the prefix, the next session does so, and takes no page at all.
    last = session.addresses[2]
    del session, view
    other = cache(pool)
    copy_in([group("stage")], [AttentionView(other, slice(None), 0)], chain, 10)
    assert other.addresses[2] == last
    assert pool.used_bytes == 5 * size
    others.clear()
    del chain
    assert pool.used_bytes == 3 * size
    del other
    assert pool.used_bytes == 0


def test_kept_prefixes_go_first_and_then_the_numbers_are_told() -> None:
    """A session that finds no page gets those of kept prefixes, the least used one's first; they stay kept."""
    size = PAGE_BYTES["stage"]
    pool = PagePool()
    pool.take(6 * size, CPU)
    kept = []
    for _ in range(2):
        session = grown(pool, 8)
        rows = session.read(slice(None), 0, 0, 8).clone()
        [stored] = copy_out([group("stage")], [AttentionView(session, slice(None), 0)], 0, 8)
        assert isinstance(stored, KeptRows)
        kept.append((rows, stored))
        del session
    # The first one is used again.
    user = cache(pool)
    copy_in([group("stage")], [AttentionView(user, slice(None), 0)], [(0, 8, (kept[0][1],))], 8)
    del user

    session = grown(pool, 16)

    on_device = [all(not isinstance(page, torch.Tensor) for page in rows.kept.pages) for _, rows in kept]
    assert on_device == [True, False]
    assert all(torch.equal(rows.read(0, 8), told) for told, rows in kept)
    with pytest.raises(
        ResourceExhausted, match=f"{size // 2} bytes are needed, and {6 * size} of {6 * size} are"
    ) as error:
        session.reserve(28)
    assert error.value.reason == "OUT_OF_MEMORY"
    assert all(torch.equal(rows.read(0, 8), told) for told, rows in kept)


def test_what_went_to_the_host_is_shared_again_once_it_is_back() -> None:
    """The first session that takes it up copies its full pages, the next one shares them."""
    pool, view = PagePool(), AttentionView(grown(PagePool(), 10), slice(None), 1)
    told = view.read(0, 10).clone()
    [stored] = copy_out([group("stage")], [view], 0, 10)
    assert isinstance(stored, KeptRows)
    stored.kept.move_to_host()
    del view
    one, other = cache(pool), cache(pool)
    for taking in (one, other):
        copy_in([group("stage")], [AttentionView(taking, slice(None), 1)], [(0, 10, (stored,))], 10)
        assert torch.equal(taking.read(slice(None), 1, 0, 10), told)
    assert one.addresses[:2] == other.addresses[:2]
    assert pool.used_bytes == 4 * PAGE_BYTES["stage"]


def test_a_page_that_went_to_the_host_goes_there_again_with_what_came_since() -> None:
    """A prefix's last page is copied with the rows so far; a longer one's, which is the same page, with all of them."""
    session = grown(PagePool(), 6)
    kept = [session.keep(0, 6)]
    kept[0].move_to_host()
    for layer in range(2):
        session.store(layer, 6, torch.randn(2, 2, 4), torch.randn(2, 2, 4))
    kept.append(session.keep(6, 8))
    kept[1].move_to_host()
    assert torch.equal(kept[1].read(slice(None), 0, 6, 8), session.read(slice(None), 0, 6, 8))


def test_what_a_cpu_writes_is_what_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session may be as long as it likes: rows count as they are written, some hundred at a time."""
    monkeypatch.setattr(attention_cache, "PAGE_ROWS", 256)
    pool = PagePool()
    pool.take(1 << 20, None)
    session = AttentionCache(1, 1, 1 << 20, 64, torch.empty(0), pool=pool)
    assert pool.used_bytes == 0
    session.reserve(10)
    assert pool.used_bytes == 256 * 2 * 64 * 4
    session.reserve(8 * 256)
    assert pool.used_bytes == 1 << 20
    with pytest.raises(ResourceExhausted, match="131072 bytes are needed, and 1048576 of 1048576 are in use"):
        session.reserve(8 * 256 + 1)
    del session
    assert pool.used_bytes == 0


def test_memory_is_given_back_where_no_session_uses_it() -> None:
    """Before something else is loaded kept prefixes move to the host; with a session open the memory stays."""
    pool = PagePool()
    pool.take(8 * PAGE_BYTES["stage"], CPU)
    session = grown(pool, 8)
    rows = session.read(slice(None), 1, 0, 8).clone()
    [kept] = copy_out([group("stage")], [AttentionView(session, slice(None), 1)], 0, 8)
    assert isinstance(kept, KeptRows)
    pool.leave()
    assert (pool.size_bytes, pool.unused_bytes) == (8 * PAGE_BYTES["stage"], 6 * PAGE_BYTES["stage"])
    del session
    pool.leave()
    assert (pool.size_bytes, pool.unused_bytes) == (None, 0)
    assert pool.used_bytes == 0
    assert torch.equal(kept.read(0, 8), rows)


def test_a_cpus_pool_may_use_a_share_of_what_is_free() -> None:
    """It takes nothing before rows are written."""
    cpu, pool = Device("cpu", CPU), PagePool()
    free, total = free_bytes(cpu)
    assert 0 < free <= total
    pool.take_share(0.5, cpu)
    assert pool.size_bytes == pytest.approx(0.5 * free, rel=0.3)
    assert pool.used_bytes == 0


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="it is about a GPU's memory")
def test_memory_that_was_left_is_there_for_weights_and_then_for_pages() -> None:
    """What is loaded between leaving and taking costs the pages no more than its own size.

    The device has a limit, so that memory which other processes take meanwhile does not count.
    """
    pool, gpu, loaded = PagePool(), replace(device(), limit_bytes=4 << 30), 1 << 30
    pool.take_share(0.5, gpu)
    before = pool.size_bytes
    pool.leave()
    weights = torch.empty(loaded, dtype=torch.uint8, device=gpu.torch_device)
    pool.take_share(0.5, gpu)
    assert before is not None
    assert pool.size_bytes is not None
    assert pool.size_bytes >= before - len(weights) - (64 << 20)
