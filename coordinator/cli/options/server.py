"""What a server offers to clients: where it listens, whom it lets in, under which names and how many at once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import click

from coordinator.api.api_keys import ApiKeys
from coordinator.api.http.allowed_hosts import AllowedHosts, own_names
from coordinator.api.http.kept_answers import KEEP_S
from coordinator.cli.option_groups import Flag
from coordinator.cluster.supervisor import REPLACE_AFTER_S
from coordinator.engine.generation import RESUME_TIMEOUT_S
from coordinator.text.model_files import REASONING_FORMATS
from coordinator.text.parsers.tools import ALIASES, NONE, known_formats
from services.addresses import is_loopback
from services.errors import InvalidArgument
from services.net.client_server import CLIENT_TIMEOUT_S
from services.net.client_tls import ClientTls, load_client_tls

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9.-]+|\[[0-9a-f:]+\])(:[0-9]{1,5})?")
_HOST_NAME = re.compile(r"\*|(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_.])?", re.IGNORECASE)
_TOOL_CALL_FORMATS = sorted({*known_formats(), *ALIASES} - {NONE})
_PORT = click.IntRange(0, 65535)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenOptions:
    """Where HTTP and gRPC listen."""

    host: Annotated[
        str, Flag("The address at which HTTP and gRPC listen; at 127.0.0.1 only this host reaches them.")
    ] = "127.0.0.1"
    port: Annotated[int, Flag("The port of HTTP; 0 takes a free one.", type=_PORT)] = 8000
    grpc: Annotated[bool, Flag("Listen for gRPC clients too.", "--grpc/--no-grpc")] = True
    grpc_port: Annotated[int, Flag("The port of gRPC; 0 takes a free one.", type=_PORT)] = 50051


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessOptions:
    """Which clients are let in, and how the server proves to them who it is."""

    api_keys: Annotated[
        tuple[str, ...],
        Flag(
            "A key that clients must send; may be given several times, in FLASHSPLIT_API_KEYS with spaces between. "
            "Better in a file.",
            "--api-key",
            metavar="KEY",
        ),
    ] = ()
    api_key_file: Annotated[Path | None, Flag("A file of such keys, one a line.", metavar="FILE")] = None
    ssl_certfile: Annotated[Path | None, Flag("PEM certificate that clients see, HTTP and gRPC.", metavar="FILE")] = (
        None
    )
    ssl_keyfile: Annotated[Path | None, Flag("The certificate's key.", metavar="FILE")] = None
    ssl_ca_certs: Annotated[Path | None, Flag("Who must have signed clients' own certificates.", metavar="FILE")] = None
    ssl_crlfile: Annotated[
        Path | None, Flag("PEM list of clients' certificates that their authority has revoked.", metavar="FILE")
    ] = None
    allowed_hosts: Annotated[
        tuple[str, ...],
        Flag(
            "Further names by which clients may call the server over HTTP, such as its Service's or its proxy's; "
            "*.example for all below one, * for all. Addresses, localhost, --host, this host's own name and those of "
            "the certificate are let in anyway. May be given several times, too.  [default: none]",
            metavar="NAME[,NAME…]",
        ),
    ] = ()
    cors_origins: Annotated[
        tuple[str, ...],
        Flag(
            "Web sites whose pages may use the HTTP APIs from a browser, like https://chat.example; * for all. May be "
            "given several times, too.  [default: none]",
            metavar="ORIGIN[,ORIGIN…]",
        ),
    ] = ()
    insecure: Annotated[bool, Flag("Listen beyond this host without TLS or without an API key.")] = False

    def __post_init__(self) -> None:
        """Raise InvalidArgument for an origin of another form than browsers send, and for a host that is no name."""
        for name in self.host_names:
            if _HOST_NAME.fullmatch(name) is None:
                raise InvalidArgument(
                    f"--allowed-hosts {name!r} must be a name without scheme, port and path, like gpu.example, "
                    "*.example for all below one, or * for all",
                    field="--allowed-hosts",
                )
        for origin in self.origins:
            if origin != "*" and _ORIGIN.fullmatch(origin) is None:
                raise InvalidArgument(
                    f"--cors-origins {origin!r} must be scheme, host and port as browsers send them, like "
                    "https://chat.example or http://localhost:3000, or * for all",
                    field="--cors-origins",
                )

    def hosts(self, host: str, tls: ClientTls | None) -> AllowedHosts:
        """Return by which names clients may call the server. host: where it listens."""
        return AllowedHosts([*own_names(host, () if tls is None else tls.names), *self.host_names])

    @property
    def host_names(self) -> tuple[str, ...]:
        """The further names by which clients may call the server."""
        given = (name.strip() for names in self.allowed_hosts for name in names.split(","))
        return tuple(name for name in given if name)

    @property
    def origins(self) -> tuple[str, ...]:
        """The web sites whose pages may use the HTTP APIs."""
        given = (origin.strip() for origins in self.cors_origins for origin in origins.split(","))
        return tuple(dict.fromkeys(origin for origin in given if origin))

    def load(self, host: str) -> tuple[ApiKeys, ClientTls | None]:
        """Return the keys and the certificates, None without any. host: where the server will listen.

        Raises InvalidArgument for files that cannot be used, and for a host that others reach without TLS or without a
        key, unless that is accepted by --insecure.
        """
        keys = ApiKeys(self.api_keys, self.api_key_file)
        tls = load_client_tls(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs, self.ssl_crlfile)
        if self.insecure or (keys and tls is not None) or is_loopback(f"[{host}]:0" if ":" in host else f"{host}:0"):
            return keys, tls
        missing = [] if tls is not None else ["a certificate with --ssl-certfile and --ssl-keyfile"]
        missing += [] if keys else ["API keys with --api-key-file"]
        raise InvalidArgument(
            f"--host {host} can be reached from other hosts: give {' and '.join(missing)}, listen on 127.0.0.1, or "
            "accept that with --insecure",
            field="--host",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """Under which names the model is served, how it writes tool calls, to how many requests at once, and how serving
    ends."""

    served_model_name: Annotated[
        tuple[str, ...],
        Flag(
            "What clients call the model; further ones are aliases. May be given several times, too.  [default: the "
            "directory]",
            metavar="NAME[,NAME…]",
            # Its name before it was that of the flag.
            envvar="FLASHSPLIT_NAMES",
        ),
    ] = ()
    tool_call_parser: Annotated[
        str | None,
        Flag(
            "How the model writes tool calls, where its chat template takes tools but shows no format that is known. "
            " [default: what the chat template shows; where it shows none, tools are said in the messages]",
            type=click.Choice(_TOOL_CALL_FORMATS),
        ),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        Flag(
            "How the model writes its reasoning, where its chat template does not show it: openai_gptoss and gemma4 on "
            "channels of their own, the others between <think> and </think>.  [default: what the chat template shows]",
            type=click.Choice(REASONING_FORMATS),
        ),
    ] = None
    max_model_len: Annotated[
        int | None,
        Flag(
            "Most tokens of prompt and answer together.  [default: the model's context]",
            type=click.IntRange(2),
            metavar="N",
        ),
    ] = None
    max_concurrent_requests: Annotated[
        int, Flag("Requests that run at once; more of them wait.", type=click.IntRange(1), metavar="N")
    ] = 16
    max_waiting_requests: Annotated[
        int, Flag("Requests that wait; more of them are told to come again (429).", type=click.IntRange(0), metavar="N")
    ] = 64
    resume: Annotated[
        bool,
        Flag(
            "When a worker is lost, let answers wait until it is back, and go on with the same tokens; otherwise they "
            "end with an error.",
            "--resume/--no-resume",
        ),
    ] = True
    resume_timeout: Annotated[
        float,
        Flag(
            "How long an answer waits for lost workers.",
            type=click.FloatRange(0, min_open=True),
            metavar="SECONDS",
        ),
    ] = RESUME_TIMEOUT_S
    replace_after: Annotated[
        float,
        Flag(
            "How long a lost worker may take to come back, where none stands by, before its layers are split anew over "
            "the others if these have room. When it is back the layers return to it while nothing runs, or after half "
            "a minute between two steps.",
            type=click.FloatRange(0),
            metavar="SECONDS",
        ),
    ] = REPLACE_AFTER_S
    journal: Annotated[
        Path | None,
        Flag(
            "A directory to which running answers are written as they come. A server that is started again with it "
            "goes on with those that had not ended, with the same tokens; clients ask again with their "
            "Idempotency-Key or Last-Event-ID. Responses in the background need it. It holds prompts and answers as "
            "they are.",
            metavar="DIR",
        ),
    ] = None
    keep_answers: Annotated[
        float,
        Flag(
            "How long answers that have ended can be asked for again: those with an Idempotency-Key, and with "
            "--journal streamed ones and responses in the background. Then they are removed, from the journal too.",
            type=click.FloatRange(0, min_open=True),
            metavar="SECONDS",
        ),
    ] = KEEP_S
    client_timeout: Annotated[
        float,
        Flag(
            "How long a client may take to send its request, and may leave unread what is written to it; then the "
            "request ends.",
            type=click.FloatRange(0, min_open=True),
            metavar="SECONDS",
        ),
    ] = CLIENT_TIMEOUT_S
    metrics_compat: Annotated[
        str | None, Flag("Show the metrics under the names of another server, too.", type=click.Choice(["vllm"]))
    ] = None
    access_log: Annotated[
        bool,
        Flag(
            "Write a line for each request to the log, whatever --log-level is: what was asked, its status, tokens and "
            "time. Probes of health and metrics have none.",
            "--access-log/--no-access-log",
        ),
    ] = True
    drain_timeout: Annotated[
        float,
        Flag("How long running answers may take to finish after SIGTERM.", type=click.FloatRange(0), metavar="SECONDS"),
    ] = 60.0

    @property
    def names(self) -> tuple[str, ...]:
        """What clients call the model, the name that is shown first; none where none was given."""
        given = (name.strip() for names in self.served_model_name for name in names.split(","))
        return tuple(dict.fromkeys(name for name in given if name))
