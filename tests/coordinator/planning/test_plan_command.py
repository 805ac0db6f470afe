"""`flashsplit plan` in this process: options that contradict each other, and what a plan says without measuring."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from coordinator.cli.commands.plan import plan

Pairs = dict[str, tuple[Path, Path]]
TWO = ("--target-devices", "cpu,cpu")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--auto", *TWO, "--target-layers", "0:3,3:6"), ["--auto", "--target-layers '0:3,3:6'", "--measure"]),
        (("--auto", *TWO, "--target-layer-split", "1,2"), ["--auto", "--target-layer-split '1,2'", "--measure"]),
        ((*TWO, "--target-layers", "0:3,4:6"), ["--target-layers", "4:6 leaves out layers 3:4"]),
        ((*TWO, "--max-model-len", "999999"), ["--max-model-len", "4096, the model's context"]),
        ((*TWO, "--features", "sum"), ["--features sum", "--draft"]),
        (("--target-devices", "h:1", "--measure", "--tls-cert", "a.pem"), ["--tls-key"]),
    ],
)
def test_contradictions_are_refused(
    pairs: Pairs, arguments: tuple[str, ...], words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """Each names the flag and its value, and exits as refused input does."""
    result = CliRunner().invoke(plan, ["--model", str(pairs["qwen3"][0]), *arguments])

    text = result.output + capfd.readouterr().err
    assert result.exit_code == 2, text
    assert all(word in text for word in words), text


def test_a_plan_as_an_object(pairs: Pairs) -> None:
    """This host's memory is known without asking anybody, a GPU's and a running worker's are not."""
    arguments = ["--model", str(pairs["qwen3_5"][0]), "--draft", str(pairs["qwen3_5"][1])]
    arguments += ["--target-devices", "cpu,cuda:0+cuda:1,h:1", "--sessions", "2", "--json"]
    result = CliRunner().invoke(plan, arguments)

    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert [device["device"] for device in found["devices"]] == ["cpu", "cuda:0", "cuda:1", "h:1"]
    assert [device["free_bytes"] is not None for device in found["devices"]] == [True, False, False, False]
    assert [edge["to"] for edge in found["edges"]] == ["stage 0", "stage 1", "stage 2"]
    assert (found["predicted"], found["measured"], found["sessions"]) == (None, [], 2)
    assert found["draft"]["reason"].startswith("beside stage 2")


def test_a_plan_says_which_experts_are_in_the_hosts_memory(pairs: Pairs, capfd: pytest.CaptureFixture[str]) -> None:
    """How much they take there, of what this host has; a dense model has none, and is refused."""
    arguments = ["--target-devices", "cuda:0", "--expert-devices", "cuda:0=1,cpu=3", "--json"]
    result = CliRunner().invoke(plan, ["--model", str(pairs["qwen3_moe"][0]), *arguments])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["expert_devices"] == "cuda:0=1,cpu=3"
    [device, host] = found["devices"]
    assert (device["device"], host["device"], host["owner"]) == ("cuda:0", "cpu", "stage 0 experts")
    assert device["weight_bytes"] + host["weight_bytes"] == found["weight_bytes"]
    assert device["free_bytes"] is None
    assert host["free_bytes"] > 0

    result = CliRunner().invoke(plan, ["--model", str(pairs["qwen3"][0]), *arguments])
    assert result.exit_code == 2
    assert "--expert-devices 'cuda:0=1,cpu=3' has no effect on a dense model" in capfd.readouterr().err + result.output


def test_the_help_teaches(pairs: Pairs) -> None:
    """Examples for each way of using it."""
    text = CliRunner().invoke(plan, ["--help"]).output

    assert all(word in text for word in ("--auto", "--measure", "--target-layers 0:20,20:64", "bench decode"))
