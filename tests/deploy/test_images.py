"""The images' steps, run in folders: what they install, how much that is, and that it starts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from tests.deploy.dockerfile import FILE, Build, stages, steps
from tests.e2e.conftest import ROOT, Worker, end, until

VERSION = metadata.version("flashsplit")
STAGES = stages()
TARGETS = {
    "coordinator": "flashsplit",
    "cpu": "flashsplit-worker",
    "cuda": "flashsplit-worker",
    "rocm": "flashsplit-worker",
}
COORDINATOR_BYTES = 150 << 20
BARE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def built_from(target: str) -> str:
    """The stage whose environment an image takes."""
    [stage] = [rest.split()[0].removeprefix("--from=") for instruction, rest in steps(STAGES, target)
               if instruction == "COPY" and rest.startswith("--from=")]  # fmt: skip
    return stage


def test_the_dockerfile_is_clean() -> None:
    """By hadolint."""
    program = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([program, "--no-color", str(FILE)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("target", TARGETS)
def test_images_start_the_program_as_nobody(target: str) -> None:
    """The entry point is in the environment that they copy, on the path; the user has no name of root's."""
    found = list(steps(STAGES, target))
    assert [json.loads(rest) for instruction, rest in found if instruction == "ENTRYPOINT"] == [[TARGETS[target]]]
    assert ("USER", "10001:10001") in found
    assert any(instruction == "ENV" and "PATH=/opt/flashsplit/bin:$PATH" in rest for instruction, rest in found)
    assert ("COPY", f"--from={built_from(target)} /opt/flashsplit /opt/flashsplit") in found
    assert metadata.entry_points(group="console_scripts", name=TARGETS[target])


def test_what_is_copied_reaches_the_builder() -> None:
    """Each source of a COPY is let through by the ignore file, and there."""
    allowed = {
        line[1:] for line in FILE.with_name("Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    copied = {
        source
        for stage in STAGES.values()
        for instruction, rest in stage.steps
        if instruction == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    }
    assert copied == allowed
    assert all((ROOT / source).exists() for source in copied)


def test_the_torch_is_the_one_that_make_installs() -> None:
    """By its exact version, before anything else could ask for another."""
    made = re.search(r"torch==([\d.]+)", (ROOT / "Makefile").read_text())
    assert made is not None
    assert ("ARG", f"TORCH={made[1]}") in STAGES["torch"].steps


def answers(prefix: Path) -> None:
    """Both programs say who they are and what they take."""
    for program in ("flashsplit", "flashsplit-worker"):
        for option in ("--version", "--help"):
            command = [str(prefix / "bin" / program), option]
            done = subprocess.run(
                command, env=BARE, cwd=prefix, capture_output=True, text=True, timeout=60, check=False
            )
            assert done.returncode == 0, done.stderr
            assert f"version {VERSION}" in done.stdout or "Usage: " in done.stdout


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The coordinator's environment, as its image has it."""
    build = Build(tmp_path_factory.mktemp("image"), ROOT)
    build.run(steps(STAGES, built_from("coordinator")))
    return build.prefix


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_coordinator_is_small_and_has_no_engine(coordinator: Path) -> None:
    """Neither torch nor what reads weights; who asks it for a worker of its own is told in a sentence."""
    answers(coordinator)
    size = sum(path.lstat().st_blocks * 512 for path in coordinator.rglob("*"))
    assert size < COORDINATOR_BYTES
    for module in ("torch", "safetensors", "numpy"):
        command = [str(coordinator / "bin" / "python"), "-c", f"import {module}"]
        assert subprocess.run(command, env=BARE, capture_output=True, check=False).returncode != 0
    command = [str(coordinator / "bin" / "flashsplit"), "generate", "--model", str(ROOT / "deploy/demo/target")]
    command += ["--prompt", "Hi", "--target-devices", "cpu"]
    done = subprocess.run(command, env=BARE, cwd=coordinator, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "a worker needs torch, safetensors, numpy, llguidance, not installed here" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_coordinator_serves_with_workers_elsewhere(
    coordinator: Path, start_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    """From its own environment, the demo pair on two workers of this one: an answer, and metrics."""
    one, two = start_worker(), start_worker()
    demo = ROOT / "deploy" / "demo"
    command = [str(coordinator / "bin" / "flashsplit"), "--log-level", "info", "serve", "--port", "0", "--no-grpc"]
    command += ["--model", str(demo / "target"), "--draft", str(demo / "draft"), "--dtype", "float32"]
    command += ["--target-devices", f"{one.address},{two.address}"]
    log = tmp_path / "log"
    with contextlib.ExitStack() as stack:
        with log.open("w") as output:
            process = subprocess.Popen(command, env=BARE, cwd=tmp_path, stdout=output, stderr=output)
        stack.callback(end, process)
        until(lambda: "serve.ready" in log.read_text() or process.poll() is not None, 60)
        [url] = re.findall(r"^curl (http\S+)", log.read_text(), re.MULTILINE)
        body = json.dumps({"messages": [{"role": "user", "content": "Calculate 4729 + 3485."}], "max_tokens": 200})
        request = urllib.request.Request(url, body.encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert "8214" in json.load(answer)["choices"][0]["message"]["content"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_worker_is_built_and_for_its_vendor_only(tmp_path: Path) -> None:
    """The CPU's serves; in the images for GPUs the build of torch decides, and a wrong one ends theirs."""
    build = Build(tmp_path, ROOT)
    build.run(steps(STAGES, built_from("cpu")))
    answers(build.prefix)
    python = str(build.prefix / "bin" / "python")
    code = "import torch, shard_worker.worker; print(torch.version.cuda, torch.version.hip)"
    done = subprocess.run([python, "-c", code], env=BARE, cwd=tmp_path, capture_output=True, text=True, check=True)
    vendors = dict(zip(("cuda", "rocm"), done.stdout.split(), strict=True))

    for target, version in vendors.items():
        assert STAGES[built_from(target)].base == built_from("cpu")
        if version == "None":
            with pytest.raises(subprocess.CalledProcessError) as raised:
                build.run(STAGES[built_from(target)].steps)
            assert f"is no {target.upper().replace('ROCM', 'ROCm')} build" in raised.value.stderr
        else:
            build.run(STAGES[built_from(target)].steps)
    # pytest keeps the folders of the last runs, and this is a gigabyte.
    shutil.rmtree(build.prefix)
