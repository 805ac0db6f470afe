"""The index against a search through all entries, with hashes that work and hashes that all but always collide."""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from coordinator.prefix.index import BLOCK_TOKENS, Entry, Link, Match, PrefixIndex, deepest_ancestor
from coordinator.prefix.lineage import Lineage

LINEAGE = Lineage(model="m", dtype="float32", text="t", draft=None, draft_dtype=None)


def entry(token_ids: Sequence[int], *, trimmable: bool, parent: Entry | None = None) -> Entry:
    return Entry(LINEAGE.snapshot_id(token_ids), tuple(token_ids), parent, trimmable)


def index_of(*entries: Entry) -> PrefixIndex:
    index = PrefixIndex()
    for stored in entries:
        index.add(stored)
    return index


@dataclass
class Reference:
    """The same by definition: token by token through all entries."""

    entries: dict[str, Entry] = field(default_factory=dict)

    def offers(self, token_ids: Sequence[int]) -> list[Match]:
        offers = []
        for stored in self.entries.values():
            common = 0
            for mine, theirs in zip(stored.token_ids, token_ids, strict=False):
                if mine != theirs:
                    break
                common += 1
            if common == len(stored.token_ids):
                offers.append(Match(stored, common))
            elif stored.trimmable:
                offers.append(Match(stored, min(common, len(token_ids) - 1)))
        return [match for match in offers if match.length > 0]

    def remove(self, snapshot_id: str) -> set[str]:
        gone = {snapshot_id} & self.entries.keys()
        while more := {
            stored.snapshot_id
            for stored in self.entries.values()
            if stored.snapshot_id not in gone and stored.parent is not None and stored.parent.snapshot_id in gone
        }:
            gone |= more
        for name in gone:
            del self.entries[name]
        return gone


def weak_link(digest: bytes, block: memoryview) -> bytes:
    """Depth and little else, so unlike prefixes of one length nearly always meet."""
    return digest + bytes([block[0] & 1])


def some_tokens(rng: random.Random, known: list[Entry], alphabet: int) -> tuple[int, ...]:
    """A start of something known, and a tail: lengths at and around the ends of blocks come often."""
    start: tuple[int, ...] = ()
    if known and rng.random() < 0.8:
        start = rng.choice(known).token_ids
        start = start[: rng.choice([len(start), len(start), rng.randint(0, len(start))])]
    extra = rng.choice([0, 1, 2, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, rng.randint(0, 100)])
    if rng.random() < 0.3:
        extra = -len(start) % BLOCK_TOKENS
    return start + tuple(rng.randrange(alphabet) for _ in range(extra))


@pytest.mark.parametrize("link", [None, weak_link], ids=["sha256", "collisions"])
@pytest.mark.parametrize("kinds", [(True,), (False,), (True, False)], ids=["trimmable", "exact", "mixed"])
@pytest.mark.parametrize("alphabet", [1, 2, 50_000])
def test_index_is_a_search_through_all_entries(
    link: Link | None,
    kinds: tuple[bool, ...],
    alphabet: int,
) -> None:
    """Through random additions and removals, what is found, forgotten and left is what the definition says."""
    rng = random.Random(f"{'_link' if link is None else 'weak_link'} {kinds} {alphabet}")
    hits = misses = cuts = family_removals = 0
    for _ in range(12):
        tested, reference = PrefixIndex(link), Reference()
        for _ in range(120):
            known = list(reference.entries.values())
            tokens = some_tokens(rng, known, alphabet)
            if known and rng.random() < 0.12:
                doomed = rng.choice(known).snapshot_id
                removed = tested.remove(doomed)
                names = [stored.snapshot_id for stored in removed]
                assert set(names) == reference.remove(doomed)
                assert len(names) == len(set(names))
                assert names[0] == doomed
                for position, stored in enumerate(removed[1:], 1):
                    assert stored.parent is not None
                    assert stored.parent.snapshot_id in names[:position]
                family_removals += len(names) > 1
            elif tokens and rng.random() < 0.6:
                above = [stored for stored in known if len(stored.token_ids) < len(tokens)]
                above = [stored for stored in above if tokens[: len(stored.token_ids)] == stored.token_ids]
                parent = rng.choice([None, *above])
                new = entry(tokens, trimmable=rng.choice(kinds), parent=parent)
                tested.add(new)
                reference.entries.setdefault(new.snapshot_id, new)

            prompt = some_tokens(rng, known, alphabet)
            match, offers = tested.find(prompt), reference.offers(prompt)
            if not offers:
                assert match is None
                misses += 1
            else:
                assert match in offers
                best = max(offer.length for offer in offers)
                shortest = min(len(offer.entry.token_ids) for offer in offers if offer.length == best)
                assert match is not None
                assert (match.length, len(match.entry.token_ids)) == (best, shortest)
                hits += 1
                cuts += match.length < len(match.entry.token_ids)
            assert len(tested) == len(reference.entries)
            assert all(tested.get(name) is stored for name, stored in reference.entries.items())
    assert hits > 50
    assert family_removals > 10
    assert (cuts > 50) == (True in kinds)
    assert misses > 10


@pytest.mark.parametrize("trimmable", [True, False])
def test_nothing_is_left_behind(trimmable: bool) -> None:
    """After all entries went, one by one or at once, the index holds no memory of them."""
    rng = random.Random(7)
    tested = PrefixIndex()
    entries: list[Entry] = []
    for _ in range(60):
        tokens = some_tokens(rng, entries, 3) + (1,)
        above = [stored for stored in entries if tokens[: len(stored.token_ids)] == stored.token_ids != tokens]
        entries.append(entry(tokens, trimmable=trimmable, parent=rng.choice([None, *above])))
        tested.add(entries[-1])
    for stored in rng.sample(entries, len(entries)):
        tested.remove(stored.snapshot_id)
    assert len(tested) == 0
    assert all(tested.find(stored.token_ids) is None for stored in entries)

    def used_bytes(cycles: int) -> int:
        """Memory in use after entries have come and gone so often."""
        for _ in range(cycles):
            for stored in entries:
                tested.add(stored)
            for stored in entries[::2]:
                tested.remove(stored.snapshot_id)
            tested.clear()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        once = used_bytes(1)
        assert used_bytes(30) < once + 10_000
    finally:
        tracemalloc.stop()
    assert len(tested) == 0


@pytest.mark.parametrize(
    ("prompt", "exact", "cut"),
    [
        (40, 40, 40),
        (41, 40, 40),
        (39, None, 38),
        (33, None, 32),
        (32, None, 31),
        (2, None, 1),
        (1, None, None),
        (0, None, None),
    ],
)
def test_prompt_about_as_long_as_the_entry(prompt: int, exact: int | None, cut: int | None) -> None:
    """Equal prompts take all; shorter ones leave the last token to compute, which an exact entry cannot offer."""
    tokens = list(range(100, 200))
    for trimmable, expected in ((False, exact), (True, cut)):
        match = index_of(entry(tokens[:40], trimmable=trimmable)).find(tokens[:prompt])
        assert (match.length if match else None) == expected


def test_other_suffix_takes_only_what_is_common() -> None:
    """A prompt that parts from an entry gets the common part of a cuttable one and nothing of an exact one."""
    kept, other = list(range(50)), [*range(45), 7, 7, 7]
    assert index_of(entry(kept, trimmable=False)).find(other) is None
    match = index_of(entry(kept, trimmable=True)).find(other)
    assert match is not None
    assert match.length == 45
    assert match.entry.token_ids[:45] == tuple(other[:45])


def test_exact_entry_wins_among_equals() -> None:
    """What needs no cut is taken before what does, in whatever order they came."""
    tokens = list(range(80))
    long, short = entry(tokens, trimmable=True), entry(tokens[:70], trimmable=False)
    for order in ((long, short), (short, long)):
        assert index_of(*order).find([*tokens[:70], 1, 2]) == Match(short, 70)
        # Of a prompt of 71 tokens the cuttable entry can serve no more than 70 either.
        assert index_of(*order).find(tokens[:71]) == Match(short, 70)


def test_equal_hash_is_not_equal_text() -> None:
    """Where all hashes are one, other tokens still do not match, and what is shorter but true does."""
    liar, honest = entry([9] * 96, trimmable=False), entry([1] * 40, trimmable=True)
    tested = PrefixIndex(lambda digest, block: digest + b"x")
    tested.add(liar)
    tested.add(honest)
    assert tested.find([1] * 96 + [2]) == Match(honest, 40)
    assert tested.find([2] * 96) is None


def test_add_refuses_what_could_not_be_restored() -> None:
    """No tokens, a parent that is gone, and one that is not a shorter prefix are errors and leave nothing behind."""
    root = entry([1, 2, 3], trimmable=True)
    tested = index_of(root)
    gone, unlike = entry([1, 2], trimmable=True), entry([1, 2, 3], trimmable=True, parent=root)
    with pytest.raises(ValueError, match="no tokens"):
        tested.add(entry([], trimmable=True))
    with pytest.raises(ValueError, match="is not kept"):
        tested.add(entry([1, 2, 4], trimmable=True, parent=gone))
    with pytest.raises(ValueError, match="no prefix"):
        tested.add(entry([1, 2, 4, 5], trimmable=True, parent=root))
    with pytest.raises(ValueError, match="no prefix"):
        tested.add(Entry("other name", unlike.token_ids, root, True))
    assert len(tested) == 1
    assert tested.remove(root.snapshot_id) == (root,)


def test_second_add_keeps_the_first() -> None:
    """An entry saved again stays where it is, with what builds on it."""
    root = entry([1], trimmable=False)
    first = entry([1, 2], trimmable=False, parent=root)
    child = entry([1, 2, 3], trimmable=False, parent=first)
    tested = index_of(root, first, child)
    tested.add(entry([1, 2], trimmable=False))
    assert tested.get(first.snapshot_id) is first
    assert [stored.snapshot_id for stored in tested.remove(root.snapshot_id)] == [
        stored.snapshot_id for stored in (root, first, child)
    ]
    assert tested.remove(root.snapshot_id) == ()
    assert first.snapshot_id not in tested


def test_deepest_ancestor() -> None:
    """The longest that is not longer, itself included; None above them all."""
    a = entry(range(10), trimmable=True)
    b = entry(range(20), trimmable=True, parent=a)
    c = entry(range(30), trimmable=True, parent=b)
    assert [deepest_ancestor(c, length) for length in (31, 30, 29, 20, 19, 10, 9, 0)] == [c, c, b, b, a, a, None, None]


@pytest.mark.parametrize("trimmable", [True, False])
def test_memory_grows_with_the_tokens_not_with_the_turns(trimmable: bool) -> None:
    """What turns have in common is listed once, and what fits only whole is listed at its end alone."""
    tested = PrefixIndex()
    tokens: tuple[int, ...] = ()
    entries: list[Entry] = []
    for turn in range(200):
        tokens += tuple(range(turn, turn + BLOCK_TOKENS))
        entries.append(entry(tokens, trimmable=trimmable, parent=entries[-1] if entries else None))
    tracemalloc.start()
    try:
        for stored in entries:
            tested.add(stored)
        used_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Listed once a block: about 1 KiB a turn. Listed once a turn and block, it would be a hundred times that.
    assert used_bytes < 4096 * len(entries)
    match = tested.find([*tokens, 5])
    assert match is not None
    assert match.entry is entries[-1]


@pytest.mark.parametrize("trimmable", [True, False])
def test_long_prompts_and_many_entries_stay_cheap(trimmable: bool) -> None:
    """100,000 tokens against branches of a long document and thousands of short entries: far below a second."""
    rng = random.Random(3)
    document = tuple(rng.randrange(150_000) for _ in range(100_000))
    tested = PrefixIndex()
    for turn in range(40):
        tested.add(entry([*document[:99_990], 1, 2, turn], trimmable=trimmable))
    for _ in range(4000):
        tested.add(entry([*document[:40], *(rng.randrange(150_000) for _ in range(8))], trimmable=trimmable))
    tested.add(entry(document[:90_000], trimmable=trimmable))

    prompt = list(document)
    started = time.process_time()
    match = tested.find(prompt)
    seconds = time.process_time() - started

    assert match is not None
    assert match.length == (99_990 if trimmable else 90_000)
    assert seconds < 0.3
