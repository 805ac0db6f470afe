"""On a machine with a GPU: a real mixed-backend split, `cuda:0` beside `cpu`, gives the CPU's tokens in float32, and so
do experts in the memory of its host."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from shard_worker.device.devices import best_devices
from tests.e2e.conftest import ROOT, generate
from tests.reference import checkpoints, target

DEMO = ROOT / "deploy" / "demo"


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_demo_pair_over_gpu_and_cpu_gives_the_cpus_tokens() -> None:
    """Plain and with DFlash, GPU first and CPU first, float32, on held-out chats."""
    gpu = best_devices()[0]
    chats = json.loads((DEMO / "prompts.json").read_text())["chat"]
    texts = [chat["prompt"] for chat in chats[:6]]
    for text in texts:
        asked = ["--model", DEMO / "target", "--chat", "--prompt", text, "--max-tokens", "120", "--dtype", "float32"]
        expected = generate(*asked, "--target-devices", "cpu")["token_ids"]
        for devices in (f"{gpu},cpu", f"cpu,{gpu}", gpu):
            for more in ([], ["--draft", DEMO / "draft"]):
                found = generate(*asked, *more, "--target-devices", devices)
                assert found["token_ids"] == expected, (devices, more, text)


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("write", "options"),
    [
        (checkpoints.write_qwen3_moe, {"dense": (1,)}),
        (checkpoints.write_qwen3_5_moe, {}),
        (checkpoints.write_gpt_oss, {"layers": 2, "packed": True}),
    ],
)
def test_experts_in_the_hosts_memory_give_the_cpus_tokens(
    write: Callable[..., Path], options: dict[str, object], tmp_path: Path
) -> None:
    """All of them or a share, on the host of a GPU, against everything on the CPU and transformers, in float32."""
    gpu, path = best_devices()[0], write(tmp_path / "mixture", **options)
    prompt, expected = target.clear_prompt(target.load(path), 12, 40)
    asked = ["--model", path, "--prompt-ids", ",".join(map(str, prompt)), "--max-tokens", "40", "--dtype", "float32"]
    assert generate(*asked, "--target-devices", "cpu")["token_ids"] == expected
    for experts in ("cpu", f"{gpu}=0.4,cpu=0.6"):
        found = generate(*asked, "--target-devices", gpu, "--expert-devices", experts)
        assert found["token_ids"] == expected, experts
