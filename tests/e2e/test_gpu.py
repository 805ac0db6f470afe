"""On a machine with a GPU: a real mixed-backend split, `cuda:0` beside `cpu`, gives the CPU's tokens in float32."""

from __future__ import annotations

import json

import pytest

from shard_worker.device.devices import best_devices
from tests.e2e.conftest import ROOT, generate

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
