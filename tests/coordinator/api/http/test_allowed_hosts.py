"""By which names a server may be called: its own and those it is told, so that no web site can take it for itself."""

from __future__ import annotations

import socket

import pytest

from coordinator.api.http.allowed_hosts import EVERY_HOST, AllowedHosts, own_names
from coordinator.api.http.errors import HttpRefusal

HOSTS = AllowedHosts([*own_names("gpu.example", ["served.example", "*.pods.example"]), "Proxy.Example."])


@pytest.mark.parametrize(
    "header",
    [
        *(
            "localhost",
            "localhost:8000",
            "LOCALHOST:8000",
            "page.localhost:1",
            "127.0.0.1:8000",
            "127.5.5.5",
            "[::1]:8000",
        ),
        *("10.0.0.7:8000", "[fd00::1]", socket.gethostname(), f"{socket.gethostname()}.local:8000"),
        *("gpu.example:8000", "served.example", "a.pods.example", "proxy.example", "proxy.example.:443"),
    ],
)
def test_names_that_are_let_in(header: str) -> None:
    HOSTS.check([header])


@pytest.mark.parametrize(
    "header",
    [
        *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "notlocalhost"),
        *("pods.example", "served.example.evil", "", "[evil.example]", "a:b:c", "127.0.0.1@evil.example", "*"),
    ],
)
def test_names_that_are_not(header: str) -> None:
    with pytest.raises(HttpRefusal, match="--allowed-hosts") as refused:
        HOSTS.check([header])
    assert refused.value.error.status == 403
    with pytest.raises(HttpRefusal):
        HOSTS.check(["localhost", header])
    EVERY_HOST.check([header])


def test_what_is_no_browser_need_not_say() -> None:
    """HTTP/1.0 has no such header."""
    HOSTS.check([])
