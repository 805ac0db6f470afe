"""`--config`: flags by name, beneath environment and command line, and a whole cluster drawn as a list of workers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from coordinator.__main__ import main
from coordinator.cli.commands.serve import serve

PAGE = Path(__file__).parents[3] / "docs" / "serving.md"
CLUSTER = """
model: {model}
draft: {model}
prefill-drafter: {model}
prefill-compression: off
workers:
  - at: cuda:0
    layers: 0:5
  - {{at: "hip:0+hip:1", layers: 5:35, command: /opt/rocm/bin/flashsplit-worker}}
  - at: c.example:7001
    roles: [target, draft]
    layers: 35:64
  - {{at: "unix:/run/reader.sock", roles: [compress]}}
certificates: {{cert: a.pem, key: a-key.pem, ca: ca.pem, server-name: c, crl: crl.pem, token-file: token}}
kubernetes: {{namespace: llm}}
port: 0
"""


def parse(folder: Path, text: str, *arguments: str) -> dict[str, Any]:
    """What `serve` is given by a file and a command line."""
    path = folder / "cluster.yaml"
    path.write_text(text)
    words = ["--config", str(path), *arguments]
    if "model:" not in text:
        words += ["--model", str(folder)]
    return serve.make_context("serve", words, auto_envvar_prefix="FLASHSPLIT").params


def test_flags_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dashes or underscores, lists or text, several or one; the environment and the command line win."""
    text = """
target-devices: [cpu, "cpu"]
target_layers: 0:5,5:12
api-key: secret
served-model-name: [a, b]
grpc: false
port: 1
kv-cache-budget: 1e9
grpc-port: 3
prefill-compression: off
kv-dtype: fp8
"""
    monkeypatch.setenv("FLASHSPLIT_PORT", "2")
    params = parse(tmp_path, text, "--grpc-port", "4")

    assert (params["target_devices"], params["target_layers"]) == ("cpu,cpu", "0:5,5:12")
    assert (params["api_keys"], params["served_model_name"]) == (("secret",), ("a", "b"))
    assert (params["grpc"], params["port"], params["grpc_port"]) == (False, 2, 4)
    assert (params["prefill_compression"], params["kv_dtype"]) == ("off", "fp8")


@pytest.mark.parametrize(
    ("variable", "name", "value"),
    [
        ("FLASHSPLIT_PORT", "port", 1),
        ("FLASHSPLIT_TARGET_DEVICES", "target_devices", "1"),
        ("FLASHSPLIT_SERVED_MODEL_NAME", "served_model_name", ("1",)),
        ("FLASHSPLIT_NAMES", "served_model_name", ("1",)),
        ("FLASHSPLIT_API_KEYS", "api_keys", ("1",)),
    ],
)
def test_the_environment_sets_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, name: str, value: object
) -> None:
    """By their names; keys have a plural, as FLASHSPLIT_API_KEY is the one that clients send."""
    monkeypatch.setenv(variable, "1")

    assert parse(tmp_path, "grpc: true")[name] == value


@pytest.mark.parametrize(("line", "value"), [("grpc: true", True), ("no-grpc: true", False), ("no-grpc: false", True)])
def test_switches(tmp_path: Path, line: str, value: bool) -> None:
    """A pair of flags is one value, whichever of the two a file names."""
    assert parse(tmp_path, line)["grpc"] is value


def test_a_cluster(tmp_path: Path) -> None:
    """Workers with roles, layers, programs and addresses; certificates; what is for Kubernetes is left alone."""
    params = parse(tmp_path, CLUSTER.format(model=tmp_path))

    assert params["target_devices"] == "cuda:0,hip:0+hip:1,c.example:7001"
    assert params["target_layers"] == "0:5,5:35,35:64"
    assert params["target_layer_split"] is params["draft_device"] is None
    assert params["prefill_device"] == "unix:/run/reader.sock"
    assert params["worker_command"] == ("hip=/opt/rocm/bin/flashsplit-worker",)
    names = ("tls_cert", "tls_key", "tls_ca", "tls_server_name", "tls_crl", "cluster_token_file")
    assert [params[name] for name in names] == ["a.pem", "a-key.pem", "ca.pem", "c", "crl.pem", "token"]
    assert (params["port"], params["model"]) == (0, tmp_path)


@pytest.mark.parametrize(
    ("workers", "flags"),
    [
        ("[{at: cpu}, {at: cpu}]", {"target_devices": "cpu,cpu", "target_layers": None}),
        ("[{at: cpu, share: 1}, {at: cpu, share: 2.5}]", {"target_layer_split": "1.0,2.5"}),
        ("[{at: cpu}, {at: 'a:1', roles: [draft]}]", {"target_devices": "cpu", "draft_device": "a:1"}),
        ("[{at: 'a:1', roles: [target, draft]}, {at: cpu}]", {"target_devices": "a:1,cpu", "draft_device": "a:1"}),
        ("[{at: cpu, roles: [target, draft, compress]}]", {"draft_device": None, "prefill_device": None}),
        ("[{at: cuda:1}, {at: cuda:0, roles: [target, compress]}]", {"prefill_device": "cuda:0"}),
    ],
)
def test_where_roles_are(tmp_path: Path, workers: str, flags: dict[str, object]) -> None:
    """Each as the flags of the same meaning."""
    params = parse(tmp_path, f"draft: {tmp_path}\nprefill-drafter: {tmp_path}\nworkers: {workers}")

    assert {name: params[name] for name in flags} == flags


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1, 2]", "must hold keys"),
        ("port: [", "not readable YAML"),
        ("prot: 8000", "'prot' is not a flag of serve"),
        ("config: other.yaml", "'config' is not a flag"),
        ("port: many", "'many' is not a valid integer"),
        ("workers: []", "workers is []: list should have at least 1 item"),
        ("workers: [{device: cpu}]", "workers[0].at is missing; write it like 'cuda:0 or gpu-a:7001'"),
        ("workers: [{at: cpu, layer: 0:5}]", "workers[0].layer is unknown; known here are at, roles, layers"),
        (
            "workers: [{at: cpu, layers: [0, 5]}]",
            "workers[0].layers is [0, 5]: input should be a valid string; write it like '0:12'",
        ),
        ("workers: [{at: tpu}]", "workers[0].at 'tpu' is neither a device"),
        (
            "workers: [{at: cpu, roles: [stage]}]",
            "workers[0].roles is ['stage']: these are not some of target, draft, compress",
        ),
        ("workers: [{at: cpu, roles: []}]", "workers[0].roles is []: these are not some of"),
        ("workers: [{at: cpu, roles: [compress]}]\nprefill-drafter: .", "none has the role target"),
        ("workers: [{at: cpu, layers: '0:1', share: 1}]", "has layers and a share"),
        ("workers: [{at: cpu, share: 1}, {at: cpu}]", "workers[1] has no share and others do"),
        (
            "workers: [{at: cpu}, {at: cpu, roles: [draft], share: 1}]\ndraft: .",
            "workers[1] has layers and not the role",
        ),
        ("workers: [{at: 'a:1', command: x}]", "workers[0].command has no effect on a:1"),
        ("workers: [{at: cpu, roles: [target, draft]}, {at: cpu}]\ndraft: .", "beside a stage sits beside the last"),
        ("workers: [{at: cpu, roles: [target, draft]}, {at: cpu, roles: [draft]}]\ndraft: .", "2 have the role draft"),
        ("workers: [{at: cpu, roles: [target, draft]}]", "draft is missing"),
        ("workers: [{at: cpu, roles: [target, compress]}]", "prefill-drafter is missing"),
        ("workers: [{at: cpu}]\ntarget-devices: cpu", "target-devices says again what workers says"),
        ("certificates: {cert: a}\ntls-key: b", "tls-key says again what certificates says"),
        ("certificates: {crt: a}", "certificates.crt is unknown; known here are cert"),
    ],
)
def test_refusals(tmp_path: Path, text: str, words: str) -> None:
    """Each names the file, the key and what is wrong with it."""
    with pytest.raises(click.UsageError) as caught:
        parse(tmp_path, text)
    assert words in caught.value.message.replace("\n", " "), caught.value.message


def test_the_cluster_of_the_serving_page(tmp_path: Path) -> None:
    """As it stands there, but for the checkpoints' place."""
    [text] = re.findall(r"```yaml\n(model: .*?)```", PAGE.read_text(), re.DOTALL)
    params = parse(tmp_path, re.sub(r"/models/\S+", str(tmp_path), text))

    assert params["target_devices"] == "cuda:0,hip:0,nas.example:7001"
    assert (params["target_layers"], params["draft_device"]) == ("0:20,20:28,28:36", "nas.example:7002")
    assert params["cluster_token_file"] == "token"


@pytest.mark.parametrize("words", [["plan"], ["generate", "--prompt", "a"], ["bench", "decode"]], ids=" ".join)
def test_one_file_is_for_all_commands_that_place_a_model(words: list[str], tmp_path: Path) -> None:
    """Flags of serve alone are passed over; what no command knows is refused, whatever the command."""
    (tmp_path / "config.json").write_text("{}")
    lines = f"model: {tmp_path}\nport: 1\napi-key: a\ntarget-devices: cpu:7\n"
    path = tmp_path / "cluster.yaml"
    path.write_text(lines)
    result = CliRunner().invoke(main, [*words, "--config", str(path)])
    # The file named a checkpoint, which is read, and found to be none.
    assert result.exit_code == 2
    assert "num_hidden_layers" in result.stderr, result.stderr

    path.write_text(lines.replace("port", "prot"))
    result = CliRunner().invoke(main, [*words, "--config", str(path)])
    assert result.exit_code == 2
    assert f"'prot' is not a flag of {words[-1] if words[0] == 'bench' else words[0]}" in result.stderr
