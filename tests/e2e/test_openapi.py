"""Whatever /openapi.json allows, and what it doesn't: no reply is a crash, and each is one that it documents."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.e2e.server import PAIR, Server, get, serving

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
# More of them take longer and find more.
EXAMPLES = int(os.environ.get("OPENAPI_EXAMPLES", "12"))
FEW = 4
"""Bodies of each kind by default; with more of them the same fields only meet more often."""
ASKING = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]
COUNTING = ["/v1/messages/count_tokens", "/tokenize", "/detokenize"]
READING = [
    "/health",
    "/ready",
    "/metrics",
    "/version",
    "/tokenizer_info",
    "/v1/models",
    "/v1/models/{name}",
    "/v1/status",
    "/v1/responses/{response_id}",
]
ENDING = [("/v1/responses/{response_id}/cancel", "POST"), ("/v1/responses/{response_id}", "DELETE")]
OPERATING = ["/v1/drain"]
ENDLESS = ["/v1/events"]
LIMITS = {"max_tokens": 2, "max_completion_tokens": 2, "max_output_tokens": 2, "n": 2}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    names = ("--served-model-name", "demo")
    with serving(tmp_path_factory.mktemp("serve"), *PAIR, "--target-devices", "cpu", *names) as running:
        yield running
        # What came was answered: nothing is left over, and nobody was surprised.
        assert '"running":0' in get(f"{running.url}/ready")[1]
        assert "_failed" not in running.log.read_text()


@pytest.fixture(scope="module")
def schema(server: Server) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def test_everything_is_in_it(schema: Any) -> None:
    paths = {operation.ok().path for operation in schema.get_all_operations()}
    assert paths == {*ASKING, *COUNTING, *OPERATING, *READING, *dict(ENDING), *ENDLESS}


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["allowed", "refused"])
@pytest.mark.parametrize("path", [*ASKING, *COUNTING, *OPERATING])
@pytest.mark.parametrize("examples", [FEW, pytest.param(EXAMPLES, marks=pytest.mark.slow)])
def test_bodies(schema: Any, path: str, mode: GenerationMode, examples: int) -> None:
    check(schema[path]["POST"], mode, examples)


@pytest.mark.parametrize("path", READING)
def test_questions(schema: Any, path: str) -> None:
    check(schema[path]["GET"], GenerationMode.POSITIVE, 5)


@pytest.mark.parametrize(("path", "method"), ENDING)
def test_what_ends_answers(schema: Any, path: str, method: str) -> None:
    check(schema[path][method], GenerationMode.POSITIVE, 5)


def check(operation: Any, mode: GenerationMode, examples: int) -> None:
    """Send so many requests, the same ones every time, and check the replies."""

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Case) -> None:
        if isinstance(case.body, dict):
            case.body.update(bounded(case.body, operation.path))
        case.validate_response(case.call(timeout=60), checks=CHECKS)

    send()


def bounded(body: dict[str, Any], path: str) -> dict[str, Any]:
    """Fields that keep answers short, and a model that is there, in place of numbers and names that were made up."""
    found: dict[str, Any] = {
        name: min(body[name], most) for name, most in LIMITS.items() if isinstance(body.get(name), int)
    }
    if path in ASKING and body.get(name := "max_output_tokens" if path == "/v1/responses" else "max_tokens") is None:
        found[name] = 2
    return found | ({"model": "demo"} if isinstance(body.get("model"), str) else {})
