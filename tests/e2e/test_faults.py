"""What a user does wrong and what fate does: one sentence, an exit code, no hang, no orphan, others still serving."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from services.messages.description import WorkerDescription
from services.rpc.peers import Peers
from tests import forking
from tests.e2e.conftest import (
    Pair,
    Worker,
    alive,
    children,
    end,
    flashsplit,
    generate,
    interrupt,
    refusal,
    until,
)
from tests.reference import checkpoints, storage


def describe(address: str) -> WorkerDescription:
    async def ask() -> WorkerDescription:
        peers = Peers()
        try:
            return await (await peers.worker(address)).describe()
        finally:
            await peers.close()

    return asyncio.run(ask())


def test_unknown_family_is_refused_with_the_known_ones(pairs: dict[str, Pair], tmp_path: Path) -> None:
    """The message names the type, the stage and what is known."""
    model = shutil.copytree(pairs["qwen3"].target, tmp_path / "model")
    storage.edit_config(model, lambda config: config.update(model_type="gpt5"))

    err = refusal("--model", model, "--prompt-ids", "1", "--target-devices", "cpu")

    assert all(word in err for word in ("gpt5", "stage 0", "qwen3, qwen3_5")), err


def test_missing_and_misshaped_tensors_are_named(pairs: dict[str, Pair], tmp_path: Path) -> None:
    """A tensor that isn't there, and one of another shape, each by name and stage."""
    name = "model.layers.5.mlp.up_proj.weight"
    missing = shutil.copytree(pairs["qwen3"].target, tmp_path / "missing")
    storage.edit_tensors(missing, lambda tensors: tensors.pop(name))
    misshaped = shutil.copytree(pairs["qwen3"].target, tmp_path / "misshaped")
    storage.edit_tensors(misshaped, lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))

    for model, word in ((missing, "missing"), (misshaped, "shape")):
        err = refusal("--model", model, "--prompt-ids", "1", "--target-devices", "cpu,cpu")
        assert all(part in err for part in (name, word, "stage 1")), err


def test_truncated_weights_are_named(pairs: dict[str, Pair], tmp_path: Path) -> None:
    """A cut file is reported as such, by path."""
    model = shutil.copytree(pairs["qwen3_5"].target, tmp_path / "model")
    [file] = model.glob("*.safetensors")
    os.truncate(file, file.stat().st_size // 2)

    err = refusal("--model", model, "--prompt-ids", "1", "--target-devices", "cpu")

    assert file.name in err
    assert "truncated" in err


def test_different_checkpoints_behind_two_stages_are_refused(
    pairs: dict[str, Pair], start_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    """Two workers with weights of another training each: both are named."""
    other = checkpoints.write_qwen3(tmp_path / "other", seed=7, layers=6, tied=True)
    first = start_worker("--model", str(pairs["qwen3"].target)).address
    second = start_worker("--model", str(other)).address

    err = refusal("--model", pairs["qwen3"].target, "--prompt-ids", "1", "--target-devices", f"{first},{second}")

    assert all(word in err for word in ("stage 1", "stage 0", "fingerprint")), err


def test_draft_of_another_target_is_refused(pairs: dict[str, Pair], tmp_path: Path) -> None:
    """A draft with another hidden size does not load, and the message says what to do."""
    wide = checkpoints.write_qwen3(tmp_path / "wide", hidden=96, layers=6)
    draft = checkpoints.write_draft(tmp_path / "draft", wide)

    err = refusal("--model", pairs["qwen3"].target, "--draft", draft, "--prompt-ids", "1", "--target-devices", "cpu")

    assert all(
        word in err
        for word in ("draft draft", pairs["qwen3"].target.name, "hidden_size", "96", "64", "made for this target")
    ), err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt-ids", "1", "--max-tokens", "5000"], ["context", "4096"]),
        (["--prompt-ids", "1,999"], ["999", "vocabulary"]),
        (["--prompt-ids", "1;2"], ["--prompt-ids", "whole numbers"]),
        (["--prompt", "hello"], ["tokenizer.json", "--prompt-ids"]),
        ([], ["exactly one", "--prompt"]),
        (["--prompt-ids", "1", "--temperature", "-1"], ["temperature", "-1", "at least 0"]),
        (["--prompt-ids", "1", "--top-p", "1.5"], ["top_p", "1.5"]),
        (["--prompt-ids", "1", "--stop", "x"], ["stop", "tokenizer"]),
        (["--prompt-ids", "1", "--target-devices", "cuda:0"], ["cuda:0", "CUDA build"]),
        (["--prompt-ids", "1", "--target-devices", "hip:0"], ["hip:0", "ROCm build"]),
        (["--prompt-ids", "1", "--target-layer-split", "1"], ["--target-devices"]),
        (["--prompt-ids", "1", "--target-devices", "127.0.0.1:1"], ["127.0.0.1:1", "flashsplit-worker"]),
    ],
)
def test_wrong_input_is_one_sentence(pairs: dict[str, Pair], arguments: list[str], words: list[str]) -> None:
    """Each refusal names what was wrong and what would be accepted, within seconds."""
    devices = [] if "--target-devices" in arguments or "--target-layer-split" in arguments else ["cpu"]
    placed = [*arguments, *(["--target-devices", *devices] if devices else [])]

    err = refusal("--model", pairs["qwen3"].target, *placed)

    assert all(word in err for word in words), err
    assert len(err.strip().splitlines()) == 1, err


def long_run(pair: Pair, *more: object) -> list[object]:
    return [
        "generate", "--model", pair.target, "--draft", pair.draft, "--prompt-ids", "1,2,3",
        "--max-tokens", "4000", "--ignore-eos", *more,
    ]  # fmt: skip


Moment = Callable[[subprocess.Popen[str], Path], bool]

MOMENTS: dict[str, Moment] = {
    "start": lambda process, folder: len(children(process.pid)) == 2,
    "load": lambda process, folder: len(list(folder.glob("flashsplit-*/worker.sock"))) == 2,
    "work": lambda process, folder: bool(process.stdout and process.stdout.read(40)),
}


VICTIMS = ("parent", "stage 0", "stage 1")
SELDOM = {*product(VICTIMS, MOMENTS)} - {("parent", "work"), ("stage 1", "start")}
"""What differs little from the others. Stages that die at work are also tested behind a server."""


@pytest.mark.usefixtures("own_processes")
@pytest.mark.parametrize(
    ("victim", "moment"),
    [
        pytest.param(victim, moment, marks=pytest.mark.slow if (victim, moment) in SELDOM else ())
        for victim, moment in product(VICTIMS, MOMENTS)
    ],
)
def test_kill_9_leaves_nothing_behind(
    pairs: dict[str, Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str, moment: str
) -> None:
    """Of whichever process, while starting, loading or decoding: no orphan, no socket, no directory, no segment in
    memory. A dead stage is told with its number, process, device and signal, at once."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    segments = set(os.listdir("/dev/shm"))
    process = flashsplit(*long_run(pairs["qwen3_5"], "--target-devices", "cpu,cpu"))
    until(lambda: MOMENTS[moment](process, tmp_path), 20)
    # In the order in which they were started.
    workers = sorted(children(process.pid))
    killed = process.pid if victim == "parent" else workers[int(victim[-1])]
    killed_at = time.monotonic()
    os.kill(killed, signal.SIGKILL)
    _, err = process.communicate(timeout=20)

    assert time.monotonic() - killed_at < 5
    until(lambda: not any(alive(worker) for worker in workers), 3)
    until(lambda: not list(tmp_path.iterdir()), 3)
    assert set(os.listdir("/dev/shm")) <= segments
    if victim != "parent":
        assert process.returncode == 1
        assert all(word in err for word in (f"process {killed}", "stage ", "SIGKILL", "cpu")), err
        assert "Traceback" not in err


def test_frozen_worker_is_given_up(pairs: dict[str, Pair], start_worker: Callable[..., Worker]) -> None:
    """A worker that is stopped, not ended, keeps its sockets open: the request fails by name all the same."""
    first, second = start_worker(), start_worker()
    process = flashsplit(*long_run(pairs["qwen3"], "--target-devices", f"{first.address},{second.address}"))
    assert process.stdout is not None
    process.stdout.read(40)
    stopped = forking.forked(second.process.pid)
    os.kill(stopped, signal.SIGSTOP)
    try:
        _, err = process.communicate(timeout=20)
    finally:
        os.kill(stopped, signal.SIGCONT)

    assert process.returncode == 1
    assert second.address in err
    assert len(err.strip().splitlines()) == 1, err


@pytest.mark.slow
def test_other_workers_go_on_serving(pairs: dict[str, Pair], start_worker: Callable[..., Worker]) -> None:
    """One remote worker is killed under a request: the request fails by name, the other worker serves the next one."""
    first, second = start_worker(), start_worker()
    devices = f"{first.address},{second.address}"
    process = flashsplit(*long_run(pairs["qwen3"], "--target-devices", devices))
    assert process.stdout is not None
    process.stdout.read(40)
    end(second.process)
    _, err = process.communicate(timeout=20)

    assert process.returncode == 1
    assert second.address in err
    until(lambda: describe(first.address).open_sessions == 0, 5)
    answer = generate(
        "--model", pairs["qwen3"].target, "--prompt-ids", "1,2", "--max-tokens", "5", "--target-devices", first.address
    )
    assert len(answer["token_ids"]) == 5


# Of a server with many requests it is tested by default.
@pytest.mark.slow
def test_lost_draft_worker_leaves_plain_decode(pairs: dict[str, Pair], start_worker: Callable[..., Worker]) -> None:
    """The draft's worker is killed under a request: the answer goes on to its end, plainly, and says so [40]."""
    pair, draft = pairs["qwen3"], start_worker()
    placed = ["--target-devices", "cpu,cpu", "--draft-device", draft.address]
    length = ["--prompt-ids", "1,2,3", "--max-tokens", "700", "--ignore-eos"]
    process = flashsplit("generate", "--model", pair.target, "--draft", pair.draft, *length, *placed, "--json")
    until(lambda: describe(draft.address).open_sessions == 1, 20)
    # One that is told to stop would let the session go on for two seconds, and the answer would have to be as long.
    draft.process.kill()
    out, err = process.communicate(timeout=60)

    assert process.returncode == 0, err
    answer = json.loads(out)
    plain = generate("--model", pair.target, *length, "--target-devices", "cpu")
    assert answer["token_ids"] == plain["token_ids"]
    assert any("draft was lost" in note for note in answer["stats"]["notes"])


@pytest.mark.usefixtures("own_processes")
@pytest.mark.parametrize(
    ("number", "after_s"),
    [
        *((signal.SIGINT, after_s) for after_s in (0.1, 4.0)),
        (signal.SIGTERM, 0.8),
        *(pytest.param(signal.SIGINT, after_s, marks=pytest.mark.slow) for after_s in (0.8, 1.6, 2.4)),
        pytest.param(signal.SIGTERM, 4.0, marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_at_any_moment(pairs: dict[str, Pair], after_s: float, number: int) -> None:
    """Ctrl-C or SIGTERM while starting, loading or decoding ends every child within 3 s, without a traceback."""
    process = flashsplit(*long_run(pairs["qwen3_5"], "--target-devices", "cpu,cpu"))
    time.sleep(after_s)
    workers = children(process.pid)
    took_s = interrupt(process, number)

    assert took_s < 3
    # Before its first line runs, Python itself answers Ctrl-C, with 1.
    assert process.returncode in (128 + number, -number, *([1] if after_s < 0.2 else []))
    assert not any(alive(worker) for worker in workers)
