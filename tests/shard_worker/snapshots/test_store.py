"""The store of prefixes: its budget, who leaves first, and that what is built on never leaves before what builds on it.

Random sequences are compared with a model that keeps no order and no counts, only the rules.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from services.errors import ResourceExhausted
from services.messages.snapshots import SnapshotOwner
from shard_worker.snapshots.store import Snapshot, SnapshotStore, default_budget_bytes

STAGE, DRAFT = SnapshotOwner.STAGE, SnapshotOwner.DRAFT


def snapshot(
    store: SnapshotStore,
    name: str,
    size: int,
    parent: Snapshot | None = None,
    owner: SnapshotOwner = STAGE,
) -> Snapshot:
    """Return a snapshot that is one token longer than its parent and takes `size` bytes."""
    first = 0 if parent is None else parent.length
    return Snapshot(name, owner, store.generation(owner), parent, first, first + 1, (), size)


def keep(
    store: SnapshotStore, name: str, size: int, parent: Snapshot | None = None, owner: SnapshotOwner = STAGE
) -> tuple[Snapshot, tuple[str, ...]]:
    """Reserve room and put a snapshot into it. Returns it, and the names of those that were dropped for it."""
    new = snapshot(store, name, size, parent, owner)
    evicted = store.reserve(size, parent)
    assert store.put(new)
    return new, evicted


def names(store: SnapshotStore) -> set[str]:
    """Return the names in the store; that does not count as a use."""
    return {kept.snapshot_id for kept in store}


# --- the rules, one by one


def test_the_least_recently_used_leaves_first() -> None:
    """Room is made by dropping what was used the longest time ago, and no more than needed."""
    store = SnapshotStore(100)
    for name in "abcd":
        keep(store, name, 25)
    assert store.find(STAGE, "a") is not None

    _, evicted = keep(store, "e", 30)

    assert evicted == ("b", "c")
    assert names(store) == {"a", "d", "e"}
    assert store.held_bytes == 80


def test_what_is_built_on_stays_until_nothing_builds_on_it() -> None:
    """Of a chain the longest leaves first, however long ago its beginning was saved; finding one uses all of it."""
    store = SnapshotStore(100)
    a, _ = keep(store, "a", 20)
    b, _ = keep(store, "b", 20, a)
    keep(store, "c", 20, b)
    keep(store, "x", 40)

    assert keep(store, "y", 10)[1] == ("c",)
    assert store.find(STAGE, "b") is b
    assert keep(store, "z", 30)[1] == ("x",)
    assert keep(store, "w", 71)[1] == ("y", "b", "a", "z")


def test_a_full_store_is_never_frozen() -> None:
    """Whatever is kept, something new that fits the budget by itself finds room."""
    store = SnapshotStore(100)
    parent = None
    for index in range(10):
        parent, _ = keep(store, f"chain {index}", 10, parent)

    _, evicted = keep(store, "new", 100)

    assert evicted == tuple(f"chain {index}" for index in reversed(range(10)))
    assert (names(store), store.held_bytes, len(store)) == ({"new"}, 100, 1)


def test_what_cannot_fit_pushes_nobody_out() -> None:
    """One above the budget, or one whose own parents fill it, is refused, and all others stay."""
    store = SnapshotStore(100)
    parent, _ = keep(store, "parent", 70)
    keep(store, "other", 20)

    with pytest.raises(ResourceExhausted, match="takes 101 bytes, more than the 100 of --prefix-cache-bytes") as caught:
        store.reserve(101, None)
    assert caught.value.reason == "SNAPSHOT_BUDGET"
    with pytest.raises(ResourceExhausted, match="no room for a prefix of 31 bytes") as caught:
        store.reserve(31, parent)
    assert caught.value.reason == "SNAPSHOT_BUDGET"

    assert (names(store), store.held_bytes) == ({"parent", "other"}, 90)
    # The refused one does not hold its parent.
    assert store.reserve(100, None) == ("parent", "other")


def test_what_is_on_its_way_takes_room_and_holds_its_parent() -> None:
    """Between reserving and putting the room is taken and the parent can't leave; releasing gives both back."""
    store = SnapshotStore(100)
    parent, _ = keep(store, "parent", 50)
    store.reserve(50, parent)
    assert store.held_bytes == 100
    with pytest.raises(ResourceExhausted):
        store.reserve(1, None)
    assert store.free("parent") == 0

    store.release(50, parent)

    assert store.held_bytes == 50
    assert store.reserve(60, None) == ("parent",)


def test_a_name_is_kept_once() -> None:
    """A second one of a name gives its room back and the first one stays."""
    store = SnapshotStore(100)
    parent, _ = keep(store, "parent", 10)
    first, second = snapshot(store, "a", 30, parent), snapshot(store, "a", 40, parent)
    store.reserve(30, parent)
    store.reserve(40, parent)

    assert store.put(first)
    assert store.put(second)

    assert store.find(STAGE, "a") is first
    assert store.held_bytes == 40
    assert store.free("a") == 30
    assert store.free("parent") == 10


def test_owners_do_not_see_each_other() -> None:
    """A stage's and a draft's snapshots of one name are two; freeing forgets both, clearing one owner's only."""
    store = SnapshotStore(100)
    stage, _ = keep(store, "a", 10)
    draft, _ = keep(store, "a", 20, owner=DRAFT)
    keep(store, "b", 5, draft, DRAFT)
    assert (store.find(STAGE, "a"), store.find(DRAFT, "a"), store.find(STAGE, "b")) == (stage, draft, None)

    assert store.free("a") == 10
    assert store.find(DRAFT, "a") is draft
    keep(store, "a", 10)
    store.clear(DRAFT)

    assert store.find(DRAFT, "a") is None
    assert (names(store), store.held_bytes) == ({"a"}, 10)
    assert store.free("unknown") == 0


def test_what_was_on_its_way_when_its_model_left_is_not_kept() -> None:
    """After clearing, neither a snapshot of the old model nor one that builds on it is put; the room comes back."""
    store = SnapshotStore(100)
    parent, _ = keep(store, "parent", 10)
    late, child = snapshot(store, "late", 20), snapshot(store, "child", 30, parent)
    store.reserve(20, None)
    store.reserve(30, parent)

    store.clear(STAGE)
    assert store.held_bytes == 50
    # The new model's, of the same names.
    keep(store, "parent", 5)

    assert not store.put(late)
    assert not store.put(child)
    assert (names(store), store.held_bytes) == ({"parent"}, 5)
    assert store.free("parent") == 5


def test_a_chain_is_told_from_its_beginning() -> None:
    """All that a snapshot builds on, in order of the tokens, with itself at the end."""
    store = SnapshotStore(100)
    a, _ = keep(store, "a", 1)
    b, _ = keep(store, "b", 1, a)
    keep(store, "other", 1, a)
    c, _ = keep(store, "c", 1, b)

    assert [(first, last) for first, last, _ in c.chain()] == [(0, 1), (1, 2), (2, 3)]
    assert a.chain() == [(0, 1, ())]


def test_the_default_budget_is_a_part_of_the_memory() -> None:
    """Some bytes, and never more than 4 GiB."""
    assert 0 < default_budget_bytes() <= 4 << 30


def test_no_budget_keeps_nothing() -> None:
    """With a budget of 0 everything but nothing is refused."""
    store = SnapshotStore(0)
    with pytest.raises(ResourceExhausted):
        store.reserve(1, None)
    assert (store.held_bytes, len(store)) == (0, 0)


# --- random sequences against the rules


Key = tuple[SnapshotOwner, str]


@dataclass
class Entry:
    parent: Key | None
    size: int
    used: int


class Model:
    """What the store must do, written as rules over plain dictionaries."""

    def __init__(self, budget: int) -> None:
        self.budget, self.clock = budget, 0
        self.kept: dict[Key, Entry] = {}
        self.coming: list[Snapshot] = []

    @property
    def held(self) -> int:
        return sum(entry.size for entry in self.kept.values()) + sum(one.size_bytes for one in self.coming)

    def use(self, key: Key | None) -> None:
        """One and all that it builds on, the beginning last."""
        while key is not None:
            self.clock += 1
            self.kept[key].used = self.clock
            key = self.kept[key].parent

    def leaves(self, coming: list[Key]) -> list[Key]:
        """Nothing builds on them, and nothing on its way will."""
        built_on = {entry.parent for entry in self.kept.values()} | set(coming)
        return [key for key in self.kept if key not in built_on]

    def reserve(self, size: int, parent: Key | None) -> list[Key] | None:
        """Who has to leave; None when it cannot be done, and then nobody does."""
        before, gone = dict(self.kept), []
        coming = [(one.parent.owner, one.parent.snapshot_id) for one in self.coming if one.parent is not None]
        if parent is not None:
            coming.append(parent)
        while self.held + size > self.budget:
            leaves = self.leaves(coming)
            if not leaves or size > self.budget:
                self.kept = before
                return None
            gone.append(min(leaves, key=lambda key: self.kept[key].used))
            del self.kept[gone[-1]]
        return gone


@pytest.mark.parametrize("seed", range(12))
def test_random_sequences_follow_the_rules(seed: int) -> None:
    """Saves, aborted saves, uses, frees and clears in any order: the same ones leave, and every byte is counted."""
    rng = random.Random(seed)
    budget = rng.choice([60, 200, 1000])
    store, model = SnapshotStore(budget), Model(budget)
    done: Counter[str] = Counter()
    for number in range(1500):
        owner = rng.choice([STAGE, STAGE, DRAFT])
        action = rng.choices(
            ["reserve", "put", "release", "find", "free", "clear"], [6, 5, 1, 3, 0.6, 0.2 if seed % 3 else 0]
        )[0]
        some = rng.choice([*model.kept, (owner, "unknown")])
        if action == "reserve":
            parents = [key for key in model.kept if key[0] is owner]
            parent_key = rng.choice(parents) if parents and rng.random() < 0.7 else None
            parent = None if parent_key is None else store.find(*parent_key)
            model.use(parent_key)
            size = rng.choice([0, 1, 5, 20, 40, budget // 2, budget, budget + 1])
            name = f"s{number}" if rng.random() < 0.8 else some[1]
            gone = model.reserve(size, parent_key)
            if gone is None:
                with pytest.raises(ResourceExhausted):
                    store.reserve(size, parent)
                done["refused"] += 1
            else:
                assert store.reserve(size, parent) == tuple(key[1] for key in gone)
                done["evicted"] += len(gone)
                model.coming.append(snapshot(store, name, size, parent, owner))
        elif action == "put" and model.coming:
            coming = model.coming.pop(rng.randrange(len(model.coming)))
            key = (coming.owner, coming.snapshot_id)
            parent_key = None if coming.parent is None else (coming.parent.owner, coming.parent.snapshot_id)
            stale = coming.generation != store.generation(coming.owner)
            assert store.put(coming) is not stale
            if key not in model.kept and not stale:
                model.kept[key] = Entry(parent_key, coming.size_bytes, 0)
                model.use(key)
                done["put"] += 1
            done["stale"] += stale
        elif action == "release" and model.coming:
            coming = model.coming.pop(rng.randrange(len(model.coming)))
            store.release(coming.size_bytes, coming.parent)
        elif action == "find":
            found = store.find(*some)
            assert (found is not None) == (some in model.kept)
            if found is not None:
                assert (found.owner, found.snapshot_id, found.size_bytes) == (*some, model.kept[some].size)
                model.use(some)
        elif action == "free":
            coming = [(one.parent.owner, one.parent.snapshot_id) for one in model.coming if one.parent is not None]
            gone = [key for key in model.leaves(coming) if key[1] == some[1]]
            assert store.free(some[1]) == sum(model.kept.pop(key).size for key in gone)
        elif action == "clear":
            store.clear(owner)
            model.kept = {key: entry for key, entry in model.kept.items() if key[0] is not owner}
        assert {(kept.owner, kept.snapshot_id) for kept in store} == set(model.kept)
        assert len(store) == len(model.kept)
        assert store.held_bytes == model.held <= budget
        assert all(entry.parent is None or entry.parent in model.kept for entry in model.kept.values())
    for coming in model.coming:
        store.release(coming.size_bytes, coming.parent)
    for owner in SnapshotOwner:
        store.clear(owner)
    assert (store.held_bytes, len(store)) == (0, 0)
    # Nothing counts as built on any more: all the room can be had again.
    assert store.reserve(budget, None) == ()
    assert min(done["put"], done["evicted"], done["refused"]) > 30, done
    assert bool(done["stale"]) == bool(seed % 3)
