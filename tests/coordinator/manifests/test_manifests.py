"""`flashsplit manifests` in this process: what it refuses, what it writes, what it leaves alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from coordinator.cli.commands.manifests import manifests

ROOT = Path(__file__).parents[3]
BASE = ROOT / "deploy" / "kubernetes" / "base"

File = dict[str, Any]


def cluster(*workers: File, **changes: object) -> File:
    """A file that is right, with other workers and fields changed; None takes one out."""
    file: File = {"model": "/models/a", "workers": list(workers) or [{"at": "cpu"}, {"at": "cpu"}]}
    file |= {name.replace("_", "-"): value for name, value in changes.items()}
    return {name: value for name, value in file.items() if value is not None}


def write(folder: Path, file: File | str, *arguments: str) -> Result:
    """Run the command over a file."""
    path = folder / "cluster.yaml"
    path.write_text(file if isinstance(file, str) else yaml.safe_dump(file, sort_keys=False))
    return CliRunner().invoke(manifests, ["--config", str(path), "--base", str(BASE), *arguments])


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


DRAFTED = {"draft": "/models/b"}


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("a: [", ["--config", "is not readable YAML"]),
        ("- a", ["it must be a mapping"]),
        (cluster(workers=None), ["workers is missing", "- at: cuda:0"]),
        (cluster(workers=[]), ["workers is []"]),
        (cluster(ports=1), ["'ports' is neither a flag of serve", "serve --help"]),
        (cluster({"at": 7}), ["workers[0].at is 7", "gpu-a:7001"]),
        (cluster({"at": "gpu"}), ["workers[0].at 'gpu' is neither a device"]),
        (cluster({"at": "cpu", "role": "draft"}), ["workers[0].role is unknown", "roles"]),
        (cluster({"at": "cpu", "roles": "draft"}), ["workers[0].roles is 'draft'", "['target', 'draft']"]),
        (cluster({"at": "cpu", "roles": ["drafts"]}), ["workers[0].roles is ['drafts']"]),
        (cluster({"at": "cpu", "layers": 312}), ["workers[0].layers is 312", "'0:12'"]),
        (cluster({"at": "cpu", "layers": "0-5"}), ["workers[0].layers is '0-5'", "FIRST:BEHIND"]),
        (cluster({"at": "cpu", "share": "half"}), ["workers[0].share is 'half'", "0.3"]),
        (cluster({"at": "cpu", "share": 1, "layers": "0:5"}), ["workers[0] has layers and a share"]),
        (cluster({"at": "cpu", "share": 0}), ["workers[0].share is 0", "greater than 0"]),
        (cluster({"at": "cpu", "share": 1}, {"at": "cpu"}), ["workers[1] has no share and others do"]),
        (
            cluster({"at": "cpu", "layers": "0:5"}, {"at": "cpu", "layers": "6:9"}),
            ["6:9 leaves out layers 5:6", "begin it at 5"],
        ),
        (
            cluster({"at": "cpu", "layers": "0:5"}, target_layer_split="auto"),
            ["target-layer-split says again what workers says"],
        ),
        (cluster(target_layer_split="1,2"), ["target-layer-split says again what workers says"]),
        (
            cluster({"at": "cpu"}, {"at": "cpu", "roles": ["draft"], "share": 1}, **DRAFTED),
            ["workers[1] has layers and not the role target"],
        ),
        (cluster({"at": "cpu", "roles": ["draft"]}, **DRAFTED), ["none has the role target"]),
        (cluster({"at": "cpu", "roles": ["target", "draft"]}), ["one has the role draft and draft is missing"]),
        (
            cluster({"at": "cpu", "roles": ["target", "draft"]}, {"at": "cpu", "roles": ["draft"]}, **DRAFTED),
            ["2 have the role draft"],
        ),
        (cluster({"at": "gpu-a:7001"}), ["workers[0].at 'gpu-a:7001'", "kubernetes: {device: cuda:0}"]),
        (cluster({"at": "unix:/a"}), ["workers[0].at 'unix:/a'", "kubernetes: {device: cuda:0}"]),
        (cluster({"at": "best"}), ["workers[0].at 'best'", "device: cuda:0"]),
        (cluster({"at": "cpu", "kubernetes": {"device": "cuda:1"}}), ["kubernetes.device 'cuda:1'", "from 0"]),
        (cluster({"at": "cpu", "kubernetes": {"device": "tpu"}}), ["workers[0].kubernetes.device 'tpu'"]),
        (cluster({"at": "cuda:0", "kubernetes": {"gpus": 2}}), ["workers[0].kubernetes.gpus is 2", "gpus: 1"]),
        (cluster({"at": "cpu", "kubernetes": {"replicas": 2}}), ["workers[0].kubernetes.replicas is 2"]),
        (cluster({"at": "cpu", "kubernetes": {"memory": "a lot"}}), ["kubernetes.memory is 'a lot'", "24Gi"]),
        (cluster({"at": "cpu", "kubernetes": {"nodes": 1}}), ["kubernetes.nodes is unknown", "node-selector"]),
        (cluster(kubernetes={"namespace": "Q_1"}), ["kubernetes.namespace is 'Q_1'", "lower-case letters"]),
        (cluster(kubernetes={"images": {"gpu": "a"}}), ["kubernetes.images.gpu is unknown", "coordinator, cpu"]),
        (cluster(kubernetes={"model-mount": "models"}), ["kubernetes.model-mount is 'models'", "/models"]),
        (cluster(kubernetes={"components": ["../a"]}), ["kubernetes.components has '../a'", "no kustomization.yaml"]),
        (cluster(certificates={"certificate": "a"}), ["certificates.certificate is unknown", "token-file"]),
        (cluster(model=None), ["model is None", "mounted at /models"]),
        (cluster(model="/data/a"), ["model is '/data/a'", "model-mount"]),
        (cluster(draft="/models/../b"), ["draft is '/models/../b'", "below it"]),
        (cluster(kv_cache_dir="prefixes"), ["kv-cache-dir is 'prefixes'", "absolute path"]),
        (cluster(kv_cache_dir="/models/prefixes"), ["kv-cache-dir is '/models/prefixes'", "/models is another mount"]),
        (cluster({"at": "cpu", "command": 5}), ["workers[0].command is 5"]),
        (cluster({"at": "cpu", "kubernetes": {"cpu": True}}), ["workers[0].kubernetes.cpu is True"]),
        (cluster({"at": "cpu", "kubernetes": [1]}), ["workers[0].kubernetes is [1]", "dictionary"]),
        (cluster(drain_timeout=float("nan")), ["drain-timeout is nan"]),
        (cluster(target_devices="cpu"), ["target-devices says again what workers says"]),
        (cluster(api_key=["a-secret"]), ["api-key cannot be rendered", "api-key-file"]),
        (cluster(ssl_ca_certs="ca.pem"), ["ssl-ca-certs cannot be rendered", "probes"]),
        (cluster(insecure=True), ["insecure cannot be rendered", "server-tls"]),
        (cluster(port=0), ["port is 0", "1 to 65535"]),
        (cluster(port=50051), ["port and grpc-port are both 50051"]),
        (cluster(drain_timeout="1m"), ["drain-timeout is '1m'", "seconds"]),
        (cluster(config="other.yaml"), ["'config' is neither a flag of serve"]),
    ],
)
def test_what_cannot_be_rendered_is_refused(
    file: File | str, words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """By the field's name, its value and what to write; nothing is written."""
    result = write(tmp_path, file)

    text = result.output + capfd.readouterr().err
    assert result.exit_code == 2, text
    assert all(word in text for word in words), text
    assert "a-secret" not in text
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.yaml"]


def test_the_coordinators_flags(tmp_path: Path) -> None:
    """Those of the file, with the pods' addresses and paths; workers' own are theirs; a Service listens for clients."""
    file = cluster(
        {"at": "cuda:1", "share": 0.25},
        {"at": "hip:2+hip:3", "share": 0.75},
        {"at": "cpu", "roles": ["draft", "compress"], "kubernetes": {"cpu": 4}},
        draft="/models/b",
        prefill_drafter="/models/c",
        host="127.0.0.1",
        port=80,
        no_grpc=True,
        prefix_cache_bytes="1GiB",
        gpu_memory_utilization=0.8,
        tls_cert="a.pem",
        api_key_file="keys.txt",
        served_model_name=["x", "y"],
    )
    result = write(tmp_path, file, "--out", str(tmp_path / "out"))

    assert result.exit_code == 0, result.output
    [serve] = documents(tmp_path / "out" / "serve.yaml")
    assert serve["target-devices"] == "worker-0:7001,worker-1:7001"
    assert serve["target-layer-split"] == "0.25,0.75"
    assert serve["draft-device"] == serve["prefill-device"] == "worker-2:7001"
    assert (serve["host"], serve["port"], serve["grpc"], serve["served-model-name"]) == (
        "0.0.0.0",
        8000,
        False,
        ["x", "y"],
    )
    assert serve["tls-cert"] == "/etc/flashsplit/tls/tls.crt"
    assert serve["api-key-file"] == "/etc/flashsplit/keys/api-keys"
    assert not {
        "prefix-cache-bytes",
        "gpu-memory-utilization",
        "workers",
        "kubernetes",
        "grpc-port",
        "cluster-token-file",
    } & set(serve)
    [service] = [item for item in documents(tmp_path / "out" / "coordinator.yaml") if item["kind"] == "Service"]
    assert [port["port"] for port in service["spec"]["ports"][1:]] == [80]
    expected = {
        0: (["--device=cuda:0", "--roles=target"], {"nvidia.com/gpu": "1"}),
        1: (["--device=hip:0+hip:1", "--roles=target"], {"amd.com/gpu": "2"}),
        2: (["--device=cpu", "--roles=draft,compress", "--threads=4"], {}),
    }
    for index, (arguments, limits) in expected.items():
        worker = documents(tmp_path / "out" / f"worker-{index}" / "worker.yaml")[0]
        [container] = worker["spec"]["template"]["spec"]["containers"]
        common = {"--prefix-cache-bytes=1GiB", "--gpu-memory-utilization=0.8", "--drain-timeout=70"}
        assert {*arguments, *common} <= set(container["args"])
        assert container.get("resources", {}).get("limits", {}) == limits


def test_the_draft_sits_where_serve_puts_it(tmp_path: Path) -> None:
    """Beside the last stage, and the prompts' reader beside the first, unless entries say otherwise."""
    file = cluster({"at": "cpu"}, {"at": "cpu"}, draft="/models/b", prefill_drafter="/models/c")
    assert write(tmp_path, file).exit_code == 0

    [serve] = documents(tmp_path / "serve.yaml")
    assert not {"draft-device", "prefill-device"} & set(serve)
    roles = [
        next(word for word in documents(tmp_path / f"worker-{index}" / "worker.yaml")[0]["spec"]["template"]["spec"]
             ["containers"][0]["args"] if word.startswith("--roles"))
        for index in range(2)
    ]  # fmt: skip
    assert roles == ["--roles=target,compress", "--roles=target,draft"]


def test_an_overlay_is_written_again_but_nothing_else(tmp_path: Path) -> None:
    """What an earlier file made is gone, what others wrote stays, and stands in the way where a file would go."""
    assert write(tmp_path, cluster({"at": "cpu"}, {"at": "cpu"}, {"at": "cpu"})).exit_code == 0
    (tmp_path / "mine.yaml").write_text("a: 1\n")
    assert write(tmp_path, cluster({"at": "cpu"})).exit_code == 0

    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.yaml"))
    assert found == ["cluster.yaml", "coordinator.yaml", "kustomization.yaml", "mine.yaml", "serve.yaml",
                     "worker-0/kustomization.yaml", "worker-0/worker.yaml"]  # fmt: skip

    (tmp_path / "serve.yaml").write_text("model: mine\n")
    refused = write(tmp_path, cluster())
    assert refused.exit_code == 2
    assert (tmp_path / "serve.yaml").read_text() == "model: mine\n"
    assert not (tmp_path / "worker-1").exists()


def test_a_base_that_is_not_there_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """An overlay without one would render nothing."""
    result = write(tmp_path, cluster(), "--base", str(tmp_path))

    assert result.exit_code == 2
    words = "has no coordinator/kustomization.yaml: name deploy/kubernetes/base"
    assert words in result.output + capfd.readouterr().err


def test_components_are_named_from_the_cluster_file(tmp_path: Path) -> None:
    """Wherever the overlay goes."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "kustomization.yaml").touch()
    file = cluster(kubernetes={"components": ["mine"]})
    assert write(tmp_path, file, "--out", str(tmp_path / "a" / "b")).exit_code == 0

    [top] = documents(tmp_path / "a" / "b" / "kustomization.yaml")
    assert top["components"] == ["../../mine"]
    assert (tmp_path / "a" / "b" / top["resources"][0]).resolve() == BASE / "coordinator"


def test_it_says_what_to_type_next(tmp_path: Path) -> None:
    """The Secrets that nobody else makes; the token's where there is one."""
    plain = write(tmp_path, cluster())
    token = write(tmp_path, cluster(certificates={"token-file": "token"}))

    assert f"kubectl apply -k {tmp_path}" in plain.output
    assert "create secret generic api-keys" in plain.output
    assert "cluster-token" not in plain.output
    assert "create secret generic cluster-token" in token.output


def test_the_cluster_file_of_the_deploying_page_is_one(tmp_path: Path) -> None:
    """As it stands there, but for a component that lies elsewhere."""
    [text] = re.findall(r"```yaml\n(model: .*?)```", (ROOT / "docs" / "deploying.md").read_text(), re.DOTALL)
    file = yaml.safe_load(text)
    del file["kubernetes"]["components"]

    assert write(tmp_path, file).exit_code == 0
    [serve] = documents(tmp_path / "serve.yaml")
    assert serve["target-layer-split"] == "0.3,0.7"
