"""What workers keep since before this process: where they agree on it, and which prompts begin with it."""

from __future__ import annotations

from coordinator.prefix.leftovers import Leftover, Leftovers, common
from services.messages.snapshots import KeptSnapshot, SnapshotOwner
from tests.coordinator.prefix.disk.exports import DRAFTED, PLAIN, ids

STAGE, DRAFT = SnapshotOwner.STAGE, SnapshotOwner.DRAFT


def kept(name: str, count: int, parent: str | None = None, owner: SnapshotOwner = STAGE) -> KeptSnapshot:
    return KeptSnapshot(name, owner, count, parent)


def test_what_all_stages_keep_is_common() -> None:
    """With all that it builds on, in whatever order workers tell of it; the rest is to be freed, the longest last."""
    first = [kept("a", 10), kept("b", 20, "a"), kept("c", 30, "b"), kept("alone", 5), kept("d", 40, "alone")]
    second = [kept("d", 40, "alone"), kept("c", 30, "b"), kept("b", 20, "a"), kept("a", 10), kept("other", 7)]
    leftovers, partial = common([first, second], None)
    assert leftovers.snapshot_ids == ["a", "b", "c"]
    assert partial == ["alone", "other", "d"]


def test_stages_that_differ_about_a_prefix_do_not_agree() -> None:
    """In its length or in what it builds on; nor can one build on what is as long."""
    first = [kept("a", 10), kept("b", 20, "a"), kept("c", 20, "a"), kept("d", 10, "a")]
    second = [kept("a", 10), kept("b", 21, "a"), kept("c", 20), kept("d", 10, "a")]
    leftovers, partial = common([first, second], None)
    assert leftovers.snapshot_ids == ["a"]
    assert sorted(partial) == ["b", "c", "d"]


def test_the_drafts_part_may_be_missing() -> None:
    """Answers without a draft have none. What the draft alone keeps is of no use. Its own worker's list may be that of
    the last stage's worker."""
    stage = [kept("a", 10), kept("b", 20)]
    both = [*stage, kept("a", 10, owner=DRAFT), kept("gone", 10, owner=DRAFT), kept("b", 19, owner=DRAFT)]
    leftovers, partial = common([stage, both], both)
    assert [(one.snapshot_id, one.in_draft) for one in leftovers] == [("a", True), ("b", False)]
    assert partial == ["gone"]
    leftovers, _ = common([stage, stage], None)
    assert [(one.snapshot_id, one.in_draft) for one in leftovers] == [("a", False), ("b", False)]


def test_prompts_begin_with_leftovers_of_their_lineage() -> None:
    """The shortest first; not with those of the other lineage, of other tokens, or longer ones, and not where a worker
    says another length than the name stands for."""
    prompt = ids(100)
    chain = [Leftover(PLAIN.snapshot_id(prompt[:10]), 10, None, False)]
    for count in (40, 41, 100):
        chain.append(Leftover(PLAIN.snapshot_id(prompt[:count]), count, chain[-1].snapshot_id, False))
    others = [
        Leftover(DRAFTED.snapshot_id(prompt[:20]), 20, None, True),
        Leftover(PLAIN.snapshot_id(ids(20, 1)), 20, None, False),
        Leftover(PLAIN.snapshot_id(prompt[:50]), 40, None, False),
    ]
    leftovers = Leftovers([*others, *chain])
    assert leftovers.beginnings(PLAIN, prompt) == chain
    assert leftovers.beginnings(PLAIN, prompt[:99]) == chain[:3]
    assert leftovers.beginnings(DRAFTED, prompt) == others[:1]
    assert leftovers.beginnings(PLAIN, ()) == []


def test_what_builds_on_a_leftover_goes_with_it() -> None:
    """But not where that one is known by now."""
    leftovers = Leftovers([Leftover("a", 1, None, False), Leftover("b", 2, "a", False), Leftover("c", 3, "b", False)])
    leftovers.take("a")
    assert leftovers.remove("a") == []
    assert leftovers.snapshot_ids == ["b", "c"]
    assert leftovers.remove("b") == ["b", "c"]
    assert len(leftovers) == 0
