"""How a local worker is started: which program, with what."""

from __future__ import annotations

import re
import sys

import pytest

from services.errors import InvalidArgument
from services.net.cluster_token import VARIABLE as TOKEN_VARIABLE
from services.net.security import Security
from services.processes.launch import Launch, parse_commands
from tests.services.net.certificates import known


def test_a_program_for_each_vendor() -> None:
    """The one named for the devices' vendor, or the one beside this."""
    commands = parse_commands([f"hip={sys.executable} -m 'other worker'", f"cpu={sys.executable}"])
    launch = Launch(commands=commands)

    assert launch.command("hip:0+hip:1") == (sys.executable, "-m", "other worker")
    assert launch.command("cpu+cpu") == (sys.executable,)
    assert launch.command("cuda:0") == launch.command("best") == (sys.executable, "-m", "shard_worker")
    assert parse_commands([]) == {}


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["hip"], "'hip' must be VENDOR=PROGRAM"),
        (["hip="], "'hip=' must be VENDOR=PROGRAM"),
        ([f"rocm={sys.executable}"], "cpu, cuda, hip"),
        (["hip=/nowhere/flashsplit-worker"], "/nowhere/flashsplit-worker is not a program"),
        (["hip=/etc/passwd"], "/etc/passwd is not a program"),
        (["hip='open"], "cannot be read"),
        ([f"cpu={sys.executable}", f"cpu={sys.executable} -m x"], "for cpu twice"),
    ],
)
def test_refused_programs(texts: list[str], words: str) -> None:
    """The refusal names the flag and what is wrong with its value."""
    with pytest.raises(InvalidArgument, match=re.escape(words)) as caught:
        parse_commands(texts)
    assert caught.value.where == {"field": "--worker-command"}


def test_arguments_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What all workers have in common; the token travels in the environment only."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    launch = Launch(threads=3, prefix_cache_bytes=0, memory_share=0.5, security=Security(token=known("secret")))

    arguments = launch.arguments("cuda:1", ["target", "draft"])

    assert " ".join(arguments) == (
        "--device cuda:1 --roles target,draft --log-level info --payload-transport auto --threads 3 "
        "--prefix-cache-bytes 0 --gpu-memory-utilization 0.5"
    )
    environment = launch.environment("cuda:1")
    assert (environment[TOKEN_VARIABLE], environment["CUDA_VISIBLE_DEVICES"]) == ("secret", "1")
    assert "--device-memory 8GiB" in " ".join(launch.arguments("cuda:1", ["target"], "8GiB"))
    assert "--device-memory" not in arguments
    assert "--threads" not in Launch().arguments("cpu", ["target"])
