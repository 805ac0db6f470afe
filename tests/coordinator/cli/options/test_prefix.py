"""Options about kept prefixes: which store is meant, which combinations make sense, and in which words others fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.cli.options.prefix import PrefixOptions, ShortStoreOptions
from coordinator.cluster.cluster import Cluster
from coordinator.cluster.loading import Checkpoints
from coordinator.cluster.placement import make_plan
from services.errors import InvalidArgument, NotFound
from tests.coordinator.cli.command_line import parse, refusal

DIR, URL = "FLASHSPLIT_KV_CACHE_DIR", "FLASHSPLIT_KV_CACHE_URL"


@pytest.mark.parametrize(
    ("line", "environment", "expected"),
    [
        ("", {}, (None, None)),
        ("--kv-cache-dir a", {}, ("a", None)),
        ("", {DIR: "a"}, ("a", None)),
        ("--kv-cache-dir a", {DIR: "b"}, ("a", None)),
        ("--kv-cache-url s3://a", {DIR: "b"}, (None, "s3://a")),
        ("--kv-cache-dir a", {URL: "s3://b"}, ("a", None)),
        ("--dir a", {URL: "s3://b", DIR: "c"}, ("a", None)),
        ("--url s3://a", {URL: "s3://b", DIR: "c"}, (None, "s3://a")),
    ],
)
def test_the_command_line_wins_over_the_environment(
    line: str, environment: dict[str, str], expected: tuple[str | None, str | None]
) -> None:
    """Also where the two name a store in different ways: then the environment's is left out."""
    store = parse(ShortStoreOptions, *line.split(), environment=environment)

    assert (store.kv_cache_dir, store.kv_cache_url) == expected
    assert store.flag == ("--kv-cache-dir" if expected[0] else "--kv-cache-url" if expected[1] else None)


@pytest.mark.parametrize(
    ("line", "environment"),
    [("--kv-cache-dir a --kv-cache-url s3://b", {}), ("", {DIR: "a", URL: "s3://b"})],
)
def test_two_stores_are_refused(line: str, environment: dict[str, str]) -> None:
    """Where both are named in the same place, neither wins."""
    with pytest.raises(InvalidArgument, match="give one of --kv-cache-dir and --kv-cache-url, not both"):
        parse(ShortStoreOptions, *line.split(), environment=environment).open()


async def test_looking_at_a_store_needs_one_and_creates_none(tmp_path: Path) -> None:
    """What is missing or not there is named."""
    with pytest.raises(InvalidArgument, match="--kv-cache-dir is missing"):
        ShortStoreOptions().open()
    absent = tmp_path / "absent"
    with pytest.raises(NotFound, match=f"--kv-cache-dir '{absent}' is not there"):
        await ShortStoreOptions(kv_cache_dir=str(absent)).load()
    assert not absent.exists()
    (tmp_path / "empty").mkdir()
    _, catalog = await ShortStoreOptions(kv_cache_dir=str(tmp_path / "empty")).load()
    assert len(catalog.index) == 0


@pytest.mark.parametrize(
    ("line", "expected"),
    [("", None), ("--prefix-cache-bytes 2MiB", 2 << 20), ("--prefix-cache-bytes 0", 0), ("--no-prefix-cache", 0)],
)
def test_memory_of_local_workers(line: str, expected: int | None) -> None:
    """None leaves it to the worker; without a cache it is 0."""
    assert parse(PrefixOptions, *line.split()).worker_bytes == expected


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--no-prefix-cache --kv-cache-dir a", ["--kv-cache-dir has no effect with --no-prefix-cache", "leave out"]),
        ("--no-prefix-cache --kv-cache-url s3://a", ["--kv-cache-url has no effect with --no-prefix-cache"]),
        ("--no-prefix-cache --prefix-cache-bytes 1GiB", ["--prefix-cache-bytes has no effect with --no-prefix-cache"]),
        ("--kv-cache-budget 4G", ["--kv-cache-budget '4G' has the unknown unit 'G'", "like 4GiB"]),
        ("--prefix-cache-bytes many", ["--prefix-cache-bytes is 'many'", "like 4GiB"]),
        ("--kv-cache-min-tokens 0", ["--kv-cache-min-tokens", "0 is not in the range x>=1"]),
        ("--kv-cache-dir a --kv-cache-url s3://b", ["give one of --kv-cache-dir and --kv-cache-url"]),
    ],
)
def test_refusals(line: str, words: list[str]) -> None:
    """Each names the flag, its value and what would be accepted."""
    text = refusal(PrefixOptions, *line.split())

    assert all(word in text for word in words), text


def test_a_budget_needs_local_workers() -> None:
    """--prefix-cache-bytes is for workers that are started here."""
    options = parse(PrefixOptions, "--prefix-cache-bytes", "1GiB")
    options.check(cluster("h:1,cpu"))
    with pytest.raises(InvalidArgument, match="--prefix-cache-bytes 1GiB has no effect.*flashsplit-worker"):
        options.check(cluster("h:1,g:1"))


def cluster(devices: str) -> Cluster:
    """Return a cluster that is not started."""
    plan = make_plan(target_devices=devices, layer_split=None, draft_device=None, num_layers=12, has_draft=False)
    return Cluster(plan, Checkpoints(Path("model"), None, None))
