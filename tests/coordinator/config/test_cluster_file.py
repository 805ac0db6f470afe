"""The part of a file that draws a cluster: what it means as flags, and what it refuses by field and value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordinator.config.cluster_file import check_plain_flags, cluster_flags, read_cluster
from coordinator.config.yaml_file import read_yaml
from services.errors import InvalidArgument


def read(folder: Path, text: str) -> dict[str, Any]:
    """Return the flags that a file draws, beside its plain ones."""
    path = folder / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    cluster, rest = read_cluster(read_yaml(path))
    check_plain_flags(cluster, rest)
    return cluster_flags(cluster) | rest


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("port: 1", {"port": 1}),
        ("workers: [{at: cpu}]", {"target_devices": "cpu"}),
        (
            "workers: [{at: cuda:0, layers: 0:5}, {at: 'a:1', layers: ' 5 : 12 '}]",
            {"target_devices": "cuda:0,a:1", "target_layers": "0:5, 5 : 12 "},
        ),
        ("workers: [{at: cpu, share: 0.3}, {at: cpu, share: 2}]", {"target_layer_split": "0.3,2.0"}),
        ("workers: [{at: cpu}, {at: cpu}]\ntarget-layer-split: auto", {"target-layer-split": "auto"}),
        ("certificates: {cert: c, key: k, ca: a}", {"tls_cert": "c", "tls_key": "k", "tls_ca": "a"}),
        ("certificates: {server-name: n, token-file: t}", {"tls_server_name": "n", "cluster_token_file": "t"}),
        ("workers: [{at: cpu, command: a b}, {at: cpu, command: a b}]", {"worker_command": ("cpu=a b",)}),
        ("workers: [{at: hip:0, command: h}, {at: cpu, command: c}]", {"worker_command": ("cpu=c", "hip=h")}),
        ("workers: [{at: cpu}, {at: hip:0, roles: [draft]}]\ndraft: d", {"draft_device": "hip:0", "draft": "d"}),
        (
            "workers: [{at: cpu, layers: 0:12}, {at: 'a:1', standby: true}, {at: hip:0, standby: true, command: h}]",
            {"target_devices": "cpu", "standby": "a:1,hip:0", "worker_command": ("hip=h",)},
        ),
        ("workers: [{at: cpu, roles: [target, target]}]", {"target_devices": "cpu"}),
        ("workers: [{at: cpu, kubernetes: {gpus: 1}}]\nkubernetes: {namespace: x}", {"target_devices": "cpu"}),
    ],
)
def test_what_is_drawn_as_flags(tmp_path: Path, text: str, flags: dict[str, object]) -> None:
    """Workers, certificates and programs become the flags of the same meaning; plain ones stay as they are."""
    found = read(tmp_path, text)

    assert {name: found.get(name) for name in flags} == flags


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        ("workers: cpu", "workers", "workers is 'cpu': input should be a valid list"),
        ("workers: [cpu]", "workers[0]", "workers[0] is 'cpu'"),
        ("workers: []", "workers", "workers is []: list should have at least 1 item"),
        ("workers: [{roles: [target]}]", "workers[0].at", "workers[0].at is missing; write it like 'cuda:0 or gpu"),
        ("workers: [{at: cpu, share: 0}]", "workers[0].share", "workers[0].share is 0: input should be greater than 0"),
        ("workers: [{at: cpu, share: .inf}]", "workers[0].share", "finite number; write it like 0.3"),
        ("workers: [{at: cpu}, {at: cpu, share: half}]", "workers[1].share", "workers[1].share is 'half'"),
        ("workers: [{at: cpu, layers: 0-5}]", "workers[0].layers", "'0-5': this is not FIRST:BEHIND; write it like"),
        ("workers: [{at: cpu, roles: target}]", "workers[0].roles", "is 'target': input should be a valid list; write"),
        ("workers: [{at: cpu, roles: [x]}]", "workers[0].roles", "these are not some of target, draft, compress"),
        ("workers: [{at: cpu, role: x}]", "workers[0].role", "is unknown; known here are at, roles, layers, share"),
        ("workers: [{at: host}]", "workers[0].at", "workers[0].at 'host' is neither a device"),
        (
            "workers: [{at: cpu}, {at: cpu, standby: true, share: 1}]",
            "workers[1]",
            "workers[1] stands by, for any",
        ),
        ("workers: [{at: cpu, standby: true}]", "workers", "workers: none has the role target; give it to"),
        ("workers: [{at: cpu, layers: 0:1, share: 1}]", "workers[0]", "workers[0] has layers and a share: give one"),
        ("workers: [{at: 'a:1', command: x}]", "workers[0].command", "no effect on a:1, which runs already: leave it"),
        ("workers: [{at: cpu, roles: [draft]}]\ndraft: d", "workers", "workers: none has the role target; give it to"),
        ("workers: [{at: cpu}, {at: cpu, layers: 0:1}]", "workers", "workers[0] has no layers and others do: give all"),
        ("workers: [{at: cpu, roles: [target, draft]}]", "draft", "one has the role draft and draft is missing: name"),
        ("workers: [{at: cpu}]\ntarget_devices: cpu", "target_devices", "target_devices says again what workers says"),
        ("workers: [{at: cpu, share: 1}]\ntarget-layer-split: auto", "target-layer-split", "says again what workers"),
        ("workers: [{at: cpu}]\ntarget-layer-split: 1,1", "target-layer-split", "says again what workers says"),
        ("certificates: {cert: 5}", "certificates.cert", "certificates.cert is 5: input should be a valid string"),
        ("certificates: {keys: k}", "certificates.keys", "known here are cert, key, ca, server-name, crl, token-file"),
        ("certificates: {ca: a}\ncluster-token-file: t", "cluster-token-file", "says again what certificates says"),
    ],
)
def test_refusals(tmp_path: Path, text: str, field: str, words: str) -> None:
    """Each names the field, its value and what would be accepted."""
    with pytest.raises(InvalidArgument) as caught:
        read(tmp_path, text)

    assert words in caught.value.message
    assert caught.value.where["field"] == field
