"""`flashsplit cache` on real directories: what it shows, finds, removes and refuses."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from coordinator.cli.commands.cache import cache as cache_command
from coordinator.prefix.disk.disk_cache import DiskCache
from coordinator.prefix.stores.directory import DirectoryStore
from tests.coordinator.prefix.conftest import disk_cache
from tests.coordinator.prefix.disk.exports import DRAFTED, LAYERS, PLAIN, ids, leftovers, save

ROOT = Path(__file__).parents[4]
FIRST, SECOND, THIRD = (PLAIN.snapshot_id(ids(count)) for count in (20, 30, 35))
OTHER = DRAFTED.snapshot_id(ids(20))


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    """A chain of three and one with a draft."""
    found = DirectoryStore(tmp_path / "cache")

    async def fill() -> None:
        cache = disk_cache(found)
        await cache.start()
        await save(cache, ids(20))
        await save(cache, ids(30), 20)
        await save(cache, ids(35), 30)
        await save(cache, ids(20), lineage=DRAFTED)
        await cache.record_use(cache.find(PLAIN, ids(30)))  # type: ignore[arg-type]

    asyncio.run(fill())
    return found


def run(store: DirectoryStore, *arguments: str, answer: str | None = None) -> Result:
    """Errors reach stderr in one sentence, never as a traceback."""
    result = CliRunner().invoke(
        cache_command, [*arguments, "--kv-cache-dir", store.location], input=answer, catch_exceptions=True
    )
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def flashsplit(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The real command."""
    return subprocess.run(
        [sys.executable, "-m", "coordinator", "cache", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


def test_ls_lists_all(store: DirectoryStore) -> None:
    """Chains in order, with sizes that add up; as JSON everything in full."""
    shown = run(store, "ls").stdout
    rows = [line.split() for line in shown.splitlines() if re.match("[0-9a-f]{12}", line)]
    assert len(rows) == 4
    position = {row[0]: index for index, row in enumerate(rows)}
    assert position[FIRST[:12]] < position[SECOND[:12]] < position[THIRD[:12]]
    row = rows[position[SECOND[:12]]]
    assert row[1:4] == ["tiny", "bfloat16", "no"]
    assert row[4] == "20-30"
    assert FIRST[:12] in row
    assert row[-1] == "1"
    assert "4 snapshots" in shown
    listing = json.loads(run(store, "ls", "--json").stdout)
    entries = {one["snapshot_id"]: one for one in listing["entries"]}
    assert set(entries) == {FIRST, SECOND, THIRD, OTHER}
    assert listing["total_bytes"] == sum(one["size_bytes"] for one in entries.values())
    assert listing["unreadable"] == []
    assert entries[THIRD]["parent_id"] == SECOND
    assert (entries[SECOND]["hits"], entries[OTHER]["draft"], entries[OTHER]["last_used"]) == (1, True, None)
    assert all(one["usable"] for one in entries.values())


def test_keys_and_values_of_another_type_are_told_apart(store: DirectoryStore) -> None:
    """The same tokens of the same weights: two entries, each with both types."""
    narrow = replace(PLAIN, kv_dtype="float8_e4m3fn")

    async def fill() -> None:
        cache = DiskCache(store, [narrow], LAYERS, "tiny", budget_bytes=1 << 30, min_tokens=1)
        await cache.start()
        await save(cache, ids(20), lineage=narrow)
        await cache.close()

    asyncio.run(fill())
    name = narrow.snapshot_id(ids(20))
    (row,) = [line.split() for line in run(store, "ls").stdout.splitlines() if line.startswith(name[:12])]
    assert row[1:4] == ["tiny", "bfloat16/float8_e4m3fn", "no"]
    assert "(bfloat16/float8_e4m3fn, 6 layers)" in run(store, "show", name).stdout
    entries = {one["snapshot_id"]: one for one in json.loads(run(store, "ls", "--json").stdout)["entries"]}
    assert set(entries) == {FIRST, SECOND, THIRD, OTHER, name}
    assert [entries[one]["kv_dtype"] for one in (FIRST, name)] == ["bfloat16", "float8_e4m3fn"]


def test_ls_shows_what_is_wrong(store: DirectoryStore) -> None:
    """Unreadable entries and broken chains don't vanish."""
    base = Path(store.location)
    (base / PLAIN.key / FIRST / "manifest.json").write_text('{"version": 9}')
    (base / DRAFTED.key / OTHER / "manifest.json").write_text("[")
    shown = run(store, "ls").stdout
    assert f"{FIRST[:12]} is foreign: " in shown
    assert f"{OTHER[:12]} is damaged: " in shown
    assert "[damaged]" in shown
    assert f"{FIRST[:12]} (missing)" in shown
    assert "2 snapshots · " in shown
    assert "2 unreadable" in shown
    assert "2 without what they build on" in shown
    listing = json.loads(run(store, "ls", "--json").stdout)
    assert {one["snapshot_id"]: one["fault"] for one in listing["unreadable"]} == {FIRST: "foreign", OTHER: "damaged"}
    assert not any(one["usable"] for one in listing["entries"])


def test_show_tells_everything(store: DirectoryStore) -> None:
    """Files, tensors by kind, the chain in both directions."""
    shown = run(store, "show", SECOND[:6]).stdout
    for words in (SECOND, FIRST, THIRD, "stage-0-4.safetensors", "[20, 30)", "2 x layers.*.k bfloat16 [2, 10, 4]",
                  "logits", "1 hits", "6 layers"):  # fmt: skip
        assert words in shown, words
    value = json.loads(run(store, "show", OTHER, "--json").stdout)
    assert value["token_ids"] == list(ids(20))
    assert [part["file"] for part in value["parts"]] == [
        "stage-0-4.safetensors",
        "stage-4-6.safetensors",
        "draft.safetensors",
    ]
    assert len(value["parts"][0]["tensors"][0]["sha256"]) == 64


def test_verify_reads_everything(store: DirectoryStore) -> None:
    """Nothing wrong: exit code 0 and a verdict; then each kind of damage by name and exit code 1."""
    well = run(store, "verify")
    assert (well.exit_code, "all good" in well.stdout) == (0, True)
    base = Path(store.location)
    path = base / PLAIN.key / SECOND / "stage-4-6.safetensors"
    data = bytearray(path.read_bytes())
    data[-50] ^= 4
    path.write_bytes(bytes(data))
    bad = run(store, "verify")
    assert bad.exit_code == 1
    assert re.search(f"{SECOND}: stage-4-6.safetensors: .* does not match its digest", bad.stdout)
    assert "1 bad" in bad.stdout
    assert run(store, "verify", FIRST).exit_code == 0
    assert run(store, "verify", FIRST, SECOND[:8]).exit_code == 1
    path.unlink()
    (base / DRAFTED.key / OTHER / "manifest.json").write_text("[")
    (base / PLAIN.key / FIRST / "manifest.json").write_text('{"version": 9}')
    bad = run(store, "verify")
    assert bad.exit_code == 1
    for words in ("is not there", f"{OTHER}: the manifest", f"{FIRST}: skipped", "which it builds on, is missing"):
        assert words in bad.stdout, words


def test_rm_removes_what_is_named(store: DirectoryStore) -> None:
    """After asking; what others build on only with them; files are gone."""
    refused = run(store, "rm", FIRST[:8], "--yes")
    assert refused.exit_code == 1
    assert "--recursive" in refused.stderr
    assert run(store, "rm", OTHER, answer="n\n").exit_code == 1
    assert len(store.entries(DRAFTED.key)) == 1
    assert "1 snapshots removed" in run(store, "rm", OTHER, answer="y\n").stdout
    assert store.entries(DRAFTED.key) == {}
    assert "2 snapshots removed" in run(store, "rm", SECOND, "-r", "-y").stdout
    assert list(store.entries(PLAIN.key)) == [FIRST]
    # Together they need no --recursive.
    (Path(store.location) / PLAIN.key / FIRST / "manifest.json").write_text("[")
    assert "1 snapshots removed" in run(store, "rm", "--all", "--yes").stdout
    assert store.entries(PLAIN.key) == {}
    assert leftovers(store) == []


def test_rm_of_a_chain_named_in_full(store: DirectoryStore) -> None:
    """Every link named: nothing is left without its parent, so --recursive isn't asked for."""
    assert "3 snapshots removed" in run(store, "rm", FIRST, THIRD, SECOND, "--yes").stdout


def test_prune_by_age_and_by_budget(store: DirectoryStore) -> None:
    """Unused ones go first; what is used keeps what it builds on."""
    assert "0 snapshots removed" in run(store, "prune", "--older-than", "1h").stdout
    day_ago = time.time() - 86400
    for name in (THIRD, OTHER):
        for path in Path(store.location).glob(f"*/{name}/manifest.json"):
            path.write_text(re.sub(r'"created":[0-9.]+', f'"created":{day_ago}', path.read_text()))
    assert "2 snapshots removed" in run(store, "prune", "--older-than", "12h").stdout
    assert sorted(store.entries(PLAIN.key)) == sorted([FIRST, SECOND])
    shown = run(store, "prune", "--budget", "7KiB").stdout
    assert "1 snapshots removed" in shown
    assert list(store.entries(PLAIN.key)) == [FIRST]
    assert "1 snapshots removed" in run(store, "prune", "--budget", "0", "--older-than", "1d").stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("show", "0000"), 1, "no snapshot's id begins with '0000'"),
        (("show", ""), 2, "give more digits"),
        (("rm",), 2, "--all"),
        (("rm", "--all", "abc"), 2, "--all"),
        (("prune",), 2, "--budget"),
        (("prune", "--budget", "lots"), 2, "--budget"),
        (("prune", "--older-than", "7"), 2, "--older-than"),
    ],
)
def test_what_is_refused(store: DirectoryStore, arguments: tuple[str, ...], code: int, words: str) -> None:
    """One sentence that names what to change; nothing is touched."""
    result = run(store, *arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert words in result.stderr
    assert len(store.entries(PLAIN.key)) == 3


def test_choosing_the_store(store: DirectoryStore, tmp_path: Path) -> None:
    """Option, URL or environment; the command line wins; a store that isn't there is not created."""
    assert "4 snapshots" in flashsplit("ls", FLASHSPLIT_KV_CACHE_DIR=store.location).stdout
    both = flashsplit("ls", "--url", f"file://{store.location}", FLASHSPLIT_KV_CACHE_DIR=str(tmp_path / "no"))
    assert "4 snapshots" in both.stdout, both.stderr
    missing = flashsplit("ls", "--dir", str(tmp_path / "no"))
    assert (missing.returncode, missing.stdout) == (1, "")
    assert missing.stderr.startswith("flashsplit: error: --kv-cache-dir")
    assert not (tmp_path / "no").exists()

    def refused(*arguments: str) -> str:
        result = CliRunner().invoke(cache_command, arguments)
        assert result.exit_code != 0
        return result.stderr

    assert "--kv-cache-dir is missing" in refused("ls")
    assert "not both" in refused("ls", "--dir", "/a", "--url", "memory://a")
    assert "known: " in refused("ls", "--url", "http://a/b")
    assert "Usage" in refused("nonsense")


@pytest.mark.parametrize("command", ["ls", "show", "verify", "rm", "prune"])
def test_help_teaches(command: str) -> None:
    """Every command says what it is for and where the store is."""
    shown = CliRunner().invoke(cache_command, [command, "--help"]).stdout
    assert "FLASHSPLIT_KV_CACHE_DIR" in shown
    assert len(shown.splitlines()) > 10
