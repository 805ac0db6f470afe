"""What holds for all paths: HEAD beside GET, pages of other web sites, and which API's form a reply has."""

from __future__ import annotations

import pytest

from tests.coordinator.api.http.conftest import Connect
from tests.coordinator.fakes import engine

SITE = "https://chat.example"
HI = {"messages": [{"role": "user", "content": "hi"}]}
ANTHROPIC = {"anthropic-version": "2023-06-01"}


@pytest.mark.parametrize(
    "path", ["/health", "/health?ready=true", "/ready", "/version", "/metrics", "/v1/models", "/v1/models/demo", "/"]
)
async def test_head_is_get_without_a_body(path: str, connect: Connect) -> None:
    """Probes ask so: the same status and headers."""
    client = await connect(engine(), network=True)
    asked = await client.http.get(path)
    head = await client.http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    varying = ("x-request-id", "date", "content-length")
    assert {name: value for name, value in head.headers.items() if name not in varying} == {
        name: value for name, value in asked.headers.items() if name not in varying
    }


async def test_head_of_what_has_no_get(connect: Connect) -> None:
    """And of what never ends."""
    client = await connect(engine(), network=True)
    for path in ("/v1/chat/completions", "/v1/events"):
        assert (await client.http.head(path)).status_code == 405


async def test_pages_of_other_sites_are_let_in_by_name(connect: Connect) -> None:
    """A browser asks beforehand, without a key; refusals are readable too. Without the flag nothing is allowed."""
    asking = {
        "origin": SITE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    client = await connect(engine(), "secret", cors_origins=[SITE])
    before = await client.http.options("/v1/chat/completions", headers=asking)
    assert before.status_code == 200
    assert before.headers["access-control-allow-origin"] == SITE
    assert "authorization" in before.headers["access-control-allow-headers"].lower()
    for key, status in (("secret", 200), ("wrong", 401)):
        headers = {"origin": SITE, "authorization": f"Bearer {key}"}
        reply = await client.http.post("/v1/chat/completions", json=HI, headers=headers)
        assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (status, SITE)
        assert "request-id" in reply.headers["access-control-expose-headers"]
    other = await client.http.options("/v1/chat/completions", headers={**asking, "origin": "https://evil.example"})
    assert other.status_code == 400
    assert "access-control-allow-origin" not in other.headers

    closed = await connect(engine())
    reply = await closed.http.post("/v1/chat/completions", json=HI, headers={"origin": SITE})
    assert "access-control-allow-origin" not in reply.headers


async def test_models_in_pages_for_anthropics_clients(connect: Connect) -> None:
    """Forwards and backwards, as its API has it; a name that isn't there is refused in its form."""
    http = (await connect(engine(aliases=("b", "c")))).http

    async def page(query: str) -> tuple[list[str], bool, str | None, str | None]:
        body = (await http.get(f"/v1/models?{query}", headers=ANTHROPIC)).json()
        return [model["id"] for model in body["data"]], body["has_more"], body["first_id"], body["last_id"]

    assert await page("") == (["demo", "b", "c"], False, "demo", "c")
    assert await page("limit=2") == (["demo", "b"], True, "demo", "b")
    assert await page("limit=2&after_id=b") == (["c"], False, "c", "c")
    assert await page("limit=1&before_id=c") == (["b"], True, "b", "b")
    assert await page("after_id=c") == ([], False, None, None)
    for path, status, kind in (
        ("/v1/models/x", 404, "not_found_error"),
        ("/v1/models?after_id=x", 400, "invalid_request_error"),
        ("/v1/models?limit=0", 400, "invalid_request_error"),
    ):
        reply = await http.get(path, headers=ANTHROPIC)
        assert (reply.status_code, reply.json()["type"], reply.json()["error"]["type"]) == (status, "error", kind)
    assert (await http.get("/v1/models")).json()["object"] == "list"
