"""Options of `flashsplit serve` about clients: who may reach the server, and what it needs for that."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.cli.options.server import AccessOptions, ListenOptions, ServiceOptions
from services.errors import InvalidArgument
from tests.coordinator.cli.command_line import parse, refusal


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_this_host_needs_neither_keys_nor_tls(host: str) -> None:
    """Nobody else can call."""
    keys, tls = parse(AccessOptions).load(host)
    assert (bool(keys), tls) == (False, None)


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("", "give a certificate with --ssl-certfile and --ssl-keyfile and API keys with --api-key-file, listen on"),
        ("--api-key k", "give a certificate with --ssl-certfile and --ssl-keyfile, listen on"),
    ],
)
def test_other_hosts_need_both(line: str, missing: str) -> None:
    """What is missing is named, and the two ways to do without."""
    with pytest.raises(InvalidArgument) as caught:
        parse(AccessOptions, *line.split()).load("0.0.0.0")
    assert caught.value.message.startswith("--host 0.0.0.0 can be reached from other hosts: ")
    assert missing in caught.value.message
    assert caught.value.message.endswith("listen on 127.0.0.1, or accept that with --insecure")


def test_insecure_accepts_that() -> None:
    """Keys are still checked where there are some."""
    keys, _ = parse(AccessOptions, "--insecure", "--api-key", "k").load("0.0.0.0")
    assert keys


def test_keys_come_from_the_line_and_a_file(tmp_path: Path) -> None:
    """Any of them opens."""
    (tmp_path / "keys").write_text("# of this month\nb\n")
    options = parse(AccessOptions, "--api-key", "a", "--api-key-file", tmp_path / "keys")
    keys, _ = options.load("127.0.0.1")
    for key in "ab":
        keys.check(f"Bearer {key}", "")


def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    """A certificate without its key, and a file of keys that isn't there."""
    for words, expected in (
        (["--ssl-certfile", tmp_path / "a.pem"], "--ssl-keyfile is missing beside --ssl-certfile"),
        (["--api-key-file", tmp_path / "none"], f"--api-key-file {tmp_path / 'none'} cannot be read"),
    ):
        with pytest.raises(InvalidArgument, match=expected):
            parse(AccessOptions, *words).load("127.0.0.1")


def test_defaults() -> None:
    """As the help says."""
    assert parse(ListenOptions) == ListenOptions(host="127.0.0.1", port=8000, grpc=True, grpc_port=50051)
    assert parse(ListenOptions, "--no-grpc", "--port", 0) == ListenOptions(grpc=False, port=0)
    service = parse(ServiceOptions)
    assert (service.names, service.max_model_len, service.drain_timeout) == ((), None, 60.0)
    assert service.tool_call_parser is None
    assert parse(ServiceOptions, "--tool-call-parser", "llama3_json").tool_call_parser == "llama3_json"
    formats = "'glm45', 'hermes', 'llama3_json', 'openai', 'pythonic', 'qwen3_coder', 'qwen3_xml'"
    assert formats in refusal(ServiceOptions, "--tool-call-parser", "other")
    assert service.reasoning_parser is None
    assert parse(ServiceOptions, "--reasoning-parser", "openai_gptoss").reasoning_parser == "openai_gptoss"
    assert "'openai_gptoss', 'qwen3'" in refusal(ServiceOptions, "--reasoning-parser", "other")


def test_web_sites_that_may_use_the_apis() -> None:
    """None by default; what browsers never send is refused, because it would never match."""
    assert parse(AccessOptions).origins == ()
    given = parse(AccessOptions, "--cors-origins", "https://a.example,http://[::1]:3000", "--cors-origins", "*")
    assert given.origins == ("https://a.example", "http://[::1]:3000", "*")
    for origin in ("a.example", "https://a.example/", "https://a.example/chat"):
        said = refusal(AccessOptions, "--cors-origins", origin)
        assert f"--cors-origins '{origin}' must be scheme, host and port" in said


def test_names_that_clients_may_use() -> None:
    """What stands in no `Host` as it is given is refused, because it would never match."""
    assert parse(AccessOptions).host_names == ()
    given = parse(AccessOptions, "--allowed-hosts", "GPU.example,*.svc", "--allowed-hosts", "my_proxy., *")
    assert given.host_names == ("GPU.example", "*.svc", "my_proxy.", "*")
    for name in ("http://x/", "x/", "gpu.example:8000", "*example", "a.*.example", "-", "a b"):
        said = refusal(AccessOptions, "--allowed-hosts", name)
        assert f"--allowed-hosts '{name}' must be a name without scheme, port and path" in said


@pytest.mark.parametrize("line", ["--served-model-name a,b", "--served-model-name a --served-model-name b,a"])
def test_several_names(line: str) -> None:
    """In one value or several, each once; the first is shown."""
    assert parse(ServiceOptions, *line.split()).names == ("a", "b")


def test_names_of_the_environment() -> None:
    """With commas or spaces between."""
    for text in ("a,b", "a b"):
        assert parse(ServiceOptions, environment={"FLASHSPLIT_NAMES": text}).names == ("a", "b")


@pytest.mark.parametrize(
    ("group", "line", "words"),
    [
        (ListenOptions, "--port 65536", "65536 is not in the range 0<=x<=65535"),
        (ServiceOptions, "--max-model-len 1", "1 is not in the range x>=2"),
        (ServiceOptions, "--max-concurrent-requests 0", "0 is not in the range x>=1"),
        (ServiceOptions, "--metrics-compat sglang", "'sglang' is not 'vllm'"),
        (ServiceOptions, "--drain-timeout -1", "-1.0 is not in the range x>=0"),
    ],
)
def test_values_that_are_none_are_refused(group: type[object], line: str, words: str) -> None:
    """With the flag, the value and what would be accepted."""
    text = refusal(group, *line.split())
    assert words in text
    assert line.split()[0] in text
