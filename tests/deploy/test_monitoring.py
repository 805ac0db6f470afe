"""The dashboard and the alerts against what a server that has worked says at /metrics."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.conftest import ROOT
from tests.e2e.server import PAIR, get, serving

DASHBOARD = ROOT / "deploy" / "grafana" / "flashsplit.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yaml"
# Of Prometheus' own making, or of the query language.
OTHER_LABELS = {"instance", "le"}


def expressions(file: Path) -> list[str]:
    """All that a dashboard or a file of rules asks for."""
    if file.suffix == ".yaml":
        return [rule["expr"] for group in yaml.safe_load(file.read_text())["groups"] for rule in group["rules"]]
    dashboard = json.loads(file.read_text())
    queries = [
        variable["query"]["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"
    ]
    return queries + [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, set[str]]]:
    """Labels of each sample name, after a chat that was asked twice; its system message is long enough to be kept."""
    with serving(tmp_path_factory.mktemp("metrics"), *PAIR, "--target-devices", "cpu,cpu") as server:
        for _ in range(2):
            messages = [{"role": "system", "content": "You calculate. " * 60}]
            messages.append({"role": "user", "content": "Calculate 4729 + 3485."})
            body = {"messages": messages, "max_tokens": 40}
            headers = {"content-type": "application/json"}
            request = urllib.request.Request(f"{server.url}/v1/chat/completions", json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert json.load(answer)["choices"]
        found: dict[str, set[str]] = {}
        for family in text_string_to_metric_families(get(f"{server.url}/metrics")[1]):
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
        yield found


@pytest.mark.parametrize("file", [DASHBOARD, ALERTS], ids=lambda path: path.parent.name)
def test_every_metric_is_there(file: Path, samples: dict[str, set[str]]) -> None:
    """By its whole name, with the labels that are asked for; a counter that never counts would not show."""
    asked = expressions(file)
    assert len(asked) > 5
    for expression in asked:
        names = set(re.findall(r"\bflashsplit_\w+", expression))
        assert names, expression
        assert names <= set(samples), names - set(samples)
        labels = {
            label for inside in re.findall(r"\{([^}]*)\}", expression) for label in re.findall(r"(\w+)\s*[=!]", inside)
        }
        labels |= {
            label for inside in re.findall(r"by \(([^)]*)\)", expression) for label in re.findall(r"\w+", inside)
        }
        labels |= set(re.findall(r"label_values\(\w+, (\w+)\)", expression))
        known = set.union(*(samples[name] for name in names))
        assert labels <= known | OTHER_LABELS, (expression, labels - known)


def test_nothing_that_is_measured_is_left_out(samples: dict[str, set[str]]) -> None:
    """Each of the server's own metrics is on the dashboard."""
    text = DASHBOARD.read_text()
    own = {re.sub(r"_(bucket|sum|count)$", "", name) for name in samples if not name.endswith("_created")}
    assert {name for name in own if name not in text} == set()


def test_panels_lie_beside_each_other() -> None:
    """None over another, each with an id of its own, in Grafana's grid of 24 columns."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)


@pytest.mark.parametrize("command", [["check", "rules", str(ALERTS)], ["test", "rules", "alerts.test.yaml"]])
def test_alerts_go_off_when_they_should(command: list[str]) -> None:
    """By promtool: the rules are right, and over made-up series those sound that should."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    done = subprocess.run([promtool, *command], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
