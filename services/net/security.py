"""How a process proves who it is and knows who calls: certificates on TCP, a token in every call, both or neither."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.net.cluster_token import FLAG as TOKEN_FLAG, VARIABLE, ClusterToken, read_token
from services.net.tls import Credentials, load_credentials, tls_files


@dataclass(frozen=True, slots=True)
class Security:
    """What one process uses on all of its connections. The token stays out of repr, and so out of logs."""

    tls: Credentials | None = None
    token: ClusterToken | None = field(default=None, repr=False)

    def child_arguments(self) -> list[str]:
        """Return the flags that give a child the same files, as it may have to call remote workers."""
        words = [] if self.tls is None else self.tls.files.arguments()
        file = None if self.token is None else self.token.file
        return words if file is None else [*words, TOKEN_FLAG, str(file.absolute())]

    def child_environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return a child's environment, made from this process's own.

        A token that came from no file is in it and not among the flags, because everybody on the host can read a
        command line.
        """
        others = {name: value for name, value in environment.items() if name != VARIABLE}
        return others if self.token is None or self.token.file is not None else {**others, VARIABLE: self.token.sent}


OPEN = Security()
"""Neither certificates nor a token."""


def load_security(
    *,
    tls_cert: str | None = None,
    tls_key: str | None = None,
    tls_ca: str | None = None,
    tls_server_name: str | None = None,
    tls_crl: str | None = None,
    cluster_token_file: str | None = None,
) -> Security:
    """Read what the flags of the same names say. Raises InvalidArgument naming the flag that is wrong."""
    files = tls_files(tls_cert, tls_key, tls_ca, tls_server_name, tls_crl)
    return Security(None if files is None else load_credentials(files), read_token(cluster_token_file))
