"""`flashsplit certs`: makes an authority and a certificate for every host, says where each file goes, and takes
certificates back."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

import click
from cryptography import x509

from coordinator.cli.certificate_authority import (
    Authority,
    check_name,
    make_authority,
    read_authority,
    replace_private,
)
from coordinator.cli.command import Command, CommandGroup
from coordinator.cli.option_groups import with_options
from services.errors import FlashsplitError, InvalidArgument

COORDINATOR = "coordinator"
# Outlives the certificates, so that a new host doesn't need new files everywhere.
_AUTHORITY_DAYS = 3650
_LOCAL = ("localhost", "127.0.0.1", "::1")
_PORT = 7001

_EPILOG = """Examples:

\b
  flashsplit certs --out ~/flashsplit-certs --host gpu-a --host gpu-b.lan,10.0.0.7
  flashsplit certs --out ~/flashsplit-certs --host gpu-c       # one host more, same authority
  flashsplit certs revoke --out ~/flashsplit-certs gpu-b.lan   # nobody is to trust this host any more
"""
_REVOCATIONS = "crl.pem"


@click.group(cls=CommandGroup, invoke_without_command=True, epilog=_EPILOG)
@with_options
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Where to write them. With an authority in it from an earlier time, that signs the new ones.",
)
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME|IP[,NAME|IP…]",
    help="A host with workers: the names and addresses by which it is dialled, joined by commas. Give it once "
    "for every host.  [default: this host alone, as localhost]",
)
@click.option(
    "--days",
    type=click.IntRange(1, 3650),
    default=365,
    show_default=True,
    help="How long the hosts' certificates hold; the authority's holds ten years.",
)
@click.option(
    "--force",
    is_flag=True,
    help="Make everything anew, the authority too: older certificates are no longer trusted.",
)
async def certs(out: Path | None, hosts: tuple[str, ...], days: int, force: bool) -> None:
    """Make certificates, so that coordinator and workers on several hosts can trust each other.

    Writes an authority (ca.pem, ca-key.pem), its list of revoked certificates (crl.pem), a pair for the coordinator
    and a pair for every host, all for their user alone, and prints which file goes where and the command lines that
    use them. To renew a pair, remove its two files and make it again: what runs reads new files by itself.
    """
    context = click.get_current_context()
    if context.invoked_subcommand is not None:
        return
    if out is None:
        raise click.UsageError("Missing option '--out'.", context)
    names = parse_hosts(hosts or ("localhost",))
    directory = out.absolute()
    stems = make_certificates(directory, names, days, force=force)
    click.echo("\n".join(instructions(directory, names, stems)))


@certs.command(cls=Command)
@with_options
@click.option(
    "--out",
    required=True,
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    metavar="DIR",
    help="Where flashsplit certs wrote the authority.",
)
@click.argument("names", nargs=-1, required=True, metavar="NAME|FILE…")
async def revoke(out: Path, names: tuple[str, ...]) -> None:
    """Take certificates back: who shows one is refused from then on.

    NAME is a host as --host had it first, or coordinator; its two files are removed, so that a new pair can be made.
    FILE is a certificate that lies elsewhere. What runs with --tls-crl (--ssl-crlfile for clients) reads the list again
    when it changes: calls of a revoked caller are refused from then on, and revoked workers are not connected to.
    """
    directory = out.absolute()
    revoke_certificates(directory, names)
    click.echo(
        f"{directory / _REVOCATIONS} has {', '.join(names)} now. Copy it to every host, in the place of the one there; "
        "nothing need be restarted."
    )


def revoke_certificates(directory: Path, names: Sequence[str]) -> None:
    """Add certificates to the list of an authority, and remove the files of those that it made in its directory.

    Raises InvalidArgument before anything is changed.
    """
    authority = read_authority(*files_of(directory, "ca"))
    path = directory / _REVOCATIONS
    revoked: list[x509.Certificate] = []
    files: list[Path] = []
    for name in names:
        own = files_of(directory, file_stem(name))
        file = own[0] if own[0].exists() and own[0] != directory / "ca.pem" else Path(name)
        try:
            revoked.append(x509.load_pem_x509_certificate(file.read_bytes()))
        except (OSError, ValueError) as error:
            raise InvalidArgument(
                f"{name!r} is neither a host with a certificate in {directory} nor a file with one", field="NAME"
            ) from error
        files += own if file == own[0] else []
    try:
        before = x509.load_pem_x509_crl(path.read_bytes()) if path.exists() else None
    except ValueError as error:
        raise InvalidArgument(f"{path} does not hold a list of revoked certificates", field="--out") from error
    replace_private(path, authority.revocation_list(revoked, before))
    for file in files:
        file.unlink(missing_ok=True)


def parse_hosts(texts: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return all names of each host by the first one.

    Raises InvalidArgument for what is no name, and for a host whose files have the names of another one's.
    """
    hosts: dict[str, tuple[str, ...]] = {}
    for text in texts:
        names = tuple(dict.fromkeys(check_name(part.strip(), "--host") for part in text.split(",")))
        if "localhost" in names:
            names = tuple(dict.fromkeys([*names, *_LOCAL]))
        taken = [file for stem in ("ca", COORDINATOR, *map(file_stem, hosts)) for file in files_of(Path(), stem)]
        taken.append(Path(_REVOCATIONS))
        for file in files_of(Path(), file_stem(names[0])):
            if file in taken:
                raise InvalidArgument(
                    f"--host {text!r}: {file} is already another certificate's file: begin with another name of that "
                    "host",
                    field="--host",
                )
        hosts[names[0]] = names
    return hosts


def make_certificates(directory: Path, hosts: dict[str, tuple[str, ...]], days: int, *, force: bool) -> list[str]:
    """Write the certificates and keys, and return the stems of the new files.

    Raises InvalidArgument before anything would be overwritten.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _write(directory, hosts, days, force=force)
    except FlashsplitError:
        raise
    except OSError as error:
        raise InvalidArgument(f"--out {directory}: {error.filename}: {error.strerror}", field="--out") from error


def _write(directory: Path, hosts: dict[str, tuple[str, ...]], days: int, *, force: bool) -> list[str]:
    """Write the files as `make_certificates` says. Raises OSError too."""
    if directory.stat().st_mode & 0o077:
        raise InvalidArgument(
            f"--out {directory} is open to other users: chmod 700 it, or name a directory that isn't there yet",
            field="--out",
        )
    pairs = {file_stem(host): names for host, names in hosts.items()}
    if force or not (directory / f"{COORDINATOR}.pem").exists():
        pairs[COORDINATOR] = (COORDINATOR,)
    existing = [path for stem in pairs for path in files_of(directory, stem) if path.exists()]
    authority_files = files_of(directory, "ca")
    old_authority = [path for path in authority_files if path.exists()]
    revocations = directory / _REVOCATIONS
    if force:
        for path in (*existing, *old_authority, revocations):
            path.unlink(missing_ok=True)
    elif existing or len(old_authority) == 1:
        raise InvalidArgument(
            f"{(existing or old_authority)[0]} is there already: give --force to make it and the authority anew, or "
            "name another directory",
            field="--out",
        )
    authority = read_authority(*authority_files) if old_authority and not force else _new_authority(*authority_files)
    if not revocations.exists():
        replace_private(revocations, authority.revocation_list())
    for stem, names in pairs.items():
        authority.issue(names, days).write(*files_of(directory, stem))
    return list(pairs)


def _new_authority(certificate: Path, key: Path) -> Authority:
    """Make an authority, write its files and return it."""
    authority = make_authority(_AUTHORITY_DAYS)
    authority.write(certificate, key)
    return authority


def file_stem(host: str) -> str:
    """Return a host's name as that of a file."""
    return host.replace(":", "-")


def files_of(directory: Path, stem: str) -> tuple[Path, Path]:
    """Return the paths of a certificate and its key."""
    return directory / f"{stem}.pem", directory / f"{stem}-key.pem"


def instructions(directory: Path, hosts: dict[str, tuple[str, ...]], stems: list[str]) -> list[str]:
    """Return which file goes where, and the command lines. stems: of the new files.

    Paths are those of this host: copies may lie elsewhere.
    """
    lines = [f"In {directory}, new: {', '.join(f'{stem}.pem' for stem in stems)}. Copy to the same directory:", ""]
    for host in hosts:
        stem = file_stem(host)
        lines.append(f"  on {host}: ca.pem {_REVOCATIONS} {stem}.pem {stem}-key.pem")
    lines += [
        f"  where flashsplit runs: ca.pem {_REVOCATIONS} {COORDINATOR}.pem {COORDINATOR}-key.pem",
        "  nowhere: ca-key.pem (who has it can make certificates that every worker trusts)",
    ]
    addresses = [f"[{host}]:{_PORT}" if ":" in host else f"{host}:{_PORT}" for host in hosts]
    for host, address in zip(hosts, addresses, strict=True):
        everywhere = f"[::]:{_PORT}" if ":" in host else f"0.0.0.0:{_PORT}"
        listen = shlex.quote(address if host in _LOCAL else everywhere)
        lines += ["", f"On {host}:", f"  flashsplit-worker --listen {listen} {_flags(directory, file_stem(host))}"]
    lines += [
        "",
        "Where flashsplit runs (generate, serve):",
        f"  flashsplit generate --target-devices {shlex.quote(','.join(addresses))} {_flags(directory, COORDINATOR)} "
        "--model DIR --prompt Hi",
    ]
    return lines


def _flags(directory: Path, stem: str) -> str:
    """Return the flags by which a process uses its certificate."""
    certificate, key = files_of(directory, stem)
    files = {"--tls-cert": certificate, "--tls-key": key, "--tls-ca": directory / "ca.pem"}
    files["--tls-crl"] = directory / _REVOCATIONS
    return shlex.join(word for flag, path in files.items() for word in (flag, str(path)))
