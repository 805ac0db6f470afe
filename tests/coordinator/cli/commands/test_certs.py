"""`flashsplit certs`: what it makes, what it refuses, and that it says where everything goes."""

from __future__ import annotations

import datetime
import ipaddress
import shlex
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from coordinator.__main__ import main
from coordinator.cli.commands.certs import certs as command
from services.net.tls import TlsFiles, load_credentials


def certs(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def made(*arguments: object) -> list[str]:
    """Lines of a call that must go well."""
    result = certs(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def refused(*arguments: object) -> str:
    result = certs(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def names(path: Path) -> list[object]:
    found = certificate(path).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [name.value for name in found]


def test_it_is_listed() -> None:
    """With what it is for."""
    assert "  certs " in CliRunner().invoke(main, ["--help"]).output


def test_a_pair_for_every_host_and_the_coordinator(tmp_path: Path) -> None:
    """P-256, signed by the authority, for servers and clients, with the right names; all files private."""
    out = tmp_path / "new" / "certs"
    made("--out", out, "--host", "GPU-a", "--host", "gpu-b.lan,10.0.0.7", "--host", "fe80::1", "--days", 30)

    stems = ["ca", "coordinator", "gpu-a", "gpu-b.lan", "fe80--1"]
    pairs = {f"{stem}{end}.pem" for stem in stems for end in ("", "-key")}
    assert {path.name for path in out.iterdir()} == {*pairs, "crl.pem"}
    assert stat.S_IMODE(out.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()} == {0o600}
    authority = certificate(out / "ca.pem")
    assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value == x509.BasicConstraints(True, 0)
    now = datetime.datetime.now(datetime.UTC)
    for stem in stems:
        found = certificate(out / f"{stem}.pem")
        key = load_pem_private_key((out / f"{stem}-key.pem").read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        assert isinstance(key.curve, ec.SECP256R1)
        assert key.public_key() == found.public_key()
        found.verify_directly_issued_by(authority)
        if stem == "ca":
            continue
        usages = found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert set(usages) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
        assert not found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        assert now < found.not_valid_after_utc <= now + datetime.timedelta(days=30)
        assert found.not_valid_before_utc < now
        load_credentials(TlsFiles(out / f"{stem}.pem", out / f"{stem}-key.pem", out / "ca.pem"))
    assert names(out / "gpu-a.pem") == ["gpu-a"]
    assert names(out / "gpu-b.lan.pem") == ["gpu-b.lan", ipaddress.ip_address("10.0.0.7")]
    assert names(out / "fe80--1.pem") == [ipaddress.ip_address("fe80::1")]
    assert names(out / "coordinator.pem") == ["coordinator"]


def test_this_host_alone_by_default(tmp_path: Path) -> None:
    """Without --host: localhost by all its names, for a year."""
    made("--out", tmp_path / "certs")

    loopback = [ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1")]
    assert names(tmp_path / "certs" / "localhost.pem") == ["localhost", *loopback]
    found = certificate(tmp_path / "certs" / "localhost.pem")
    assert (found.not_valid_after_utc - datetime.datetime.now(datetime.UTC)).days in (364, 365)


def test_instructions_name_every_file_and_whole_command_lines(tmp_path: Path) -> None:
    """Which files go to which host; each command line can be taken as it stands, also with odd directory names."""
    out = tmp_path / "my certs"
    lines = made("--out", out, "--host", "gpu-a", "--host", "fe80::1")

    text = "\n".join(lines)
    assert "on gpu-a: ca.pem crl.pem gpu-a.pem gpu-a-key.pem" in text
    assert "where flashsplit runs: ca.pem crl.pem coordinator.pem coordinator-key.pem" in text
    assert "nowhere: ca-key.pem" in text
    workers = [shlex.split(line) for line in lines if "flashsplit-worker" in line]
    tls = ["--tls-cert", f"{out}/gpu-a.pem", "--tls-key", f"{out}/gpu-a-key.pem", "--tls-ca", f"{out}/ca.pem"]
    tls += ["--tls-crl", f"{out}/crl.pem"]
    assert workers[0] == ["flashsplit-worker", "--listen", "0.0.0.0:7001", *tls]
    assert workers[1][:3] == ["flashsplit-worker", "--listen", "[::]:7001"]
    [generate] = [shlex.split(line) for line in lines if "flashsplit generate" in line]
    assert generate[:4] == ["flashsplit", "generate", "--target-devices", "gpu-a:7001,[fe80::1]:7001"]
    assert str(out / "coordinator-key.pem") in generate


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    """A second call refuses and changes nothing; --force makes all of it anew."""
    out = tmp_path / "certs"
    made("--out", out, "--host", "a")
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    message = refused("--out", out, "--host", "b", "--host", "a")
    assert f"{out}/a.pem is there already: give --force" in message
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before

    made("--out", out, "--host", "a", "--force")
    after = {path.name: path.read_bytes() for path in out.iterdir()}
    assert after.keys() == before.keys()
    assert all(after[name] != before[name] for name in before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()} == {0o600}


def test_a_host_more_is_signed_by_the_same_authority(tmp_path: Path) -> None:
    """The authority and the coordinator's pair stay as they are."""
    out = tmp_path / "certs"
    made("--out", out, "--host", "a")
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    made("--out", out, "--host", "b")

    after = {path.name: path.read_bytes() for path in out.iterdir()}
    assert {name for name in after if name not in before} == {"b.pem", "b-key.pem"}
    assert before.items() <= after.items()
    certificate(out / "b.pem").verify_directly_issued_by(certificate(out / "ca.pem"))


@pytest.mark.parametrize("spoilt", ["ca.pem", "ca-key.pem"])
def test_an_authority_that_is_none_is_refused(spoilt: str, tmp_path: Path) -> None:
    """Half of one, a damaged one, and one whose key is another's."""
    out = tmp_path / "certs"
    made("--out", out, "--host", "a")
    whole = (out / spoilt).read_bytes()
    other = tmp_path / "other"
    made("--out", other)

    (out / spoilt).write_bytes(whole[:100])
    assert "are no certificate authority: make a new one with --force" in refused("--out", out, "--host", "b")
    (out / spoilt).write_bytes((other / spoilt).read_bytes())
    assert "is not the key of" in refused("--out", out, "--host", "b")
    (out / spoilt).unlink()
    assert "is there already: give --force" in refused("--out", out, "--host", "b")
    assert not (out / "b.pem").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "a b"], "--host 'a b' is neither a DNS name nor an IP address"),
        (["--host", "../a"], "neither a DNS name"),
        (["--host", ""], "neither a DNS name"),
        (["--host", "a,"], "neither a DNS name"),
        (["--host", "*.lan"], "neither a DNS name"),
        (["--host", "300.1.1.1"], "neither a DNS name"),
        (["--host", "a:7001"], "neither a DNS name"),
        (["--host", "-a"], "neither a DNS name"),
        (["--host", "x" * 64], "neither a DNS name"),
        (["--host", "a", "--host", "A"], "a.pem is already another certificate's file"),
        (["--host", "coordinator"], "coordinator.pem is already another certificate's file"),
        (["--host", "ca"], "ca.pem is already"),
        (["--host", "crl"], "crl.pem is already"),
        (["--host", "a", "--host", "a-key"], "a-key.pem is already"),
        (["--days", "0"], "--days"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], words: str, tmp_path: Path) -> None:
    """One sentence, and no directory left behind."""
    assert words in refused("--out", tmp_path / "certs", *arguments)
    assert not (tmp_path / "certs").exists()


def test_a_directory_that_others_can_read_is_refused(tmp_path: Path) -> None:
    """Keys don't go where others look; nor into what is no directory."""
    out = tmp_path / "certs"
    out.mkdir()
    out.chmod(0o755)
    assert "is open to other users: chmod 700 it" in refused("--out", out)
    assert list(out.iterdir()) == []
    (tmp_path / "file").write_text("")
    assert "--out" in refused("--out", tmp_path / "file" / "certs")


def listed(out: Path) -> dict[int, datetime.datetime]:
    """When each certificate was taken back, by its number, as the authority has signed it."""
    found = x509.load_pem_x509_crl((out / "crl.pem").read_bytes())
    assert found.is_signature_valid(certificate(out / "ca.pem").public_key())
    assert found.next_update_utc == certificate(out / "ca.pem").not_valid_after_utc
    return {entry.serial_number: entry.revocation_date_utc for entry in found}


def test_certificates_are_taken_back(tmp_path: Path) -> None:
    """By a host's name or by a file, one by one; the list grows, and a host gets a new pair of the same authority."""
    out = tmp_path / "certs"
    made("--out", out, "--host", "a", "--host", "b.lan,10.0.0.7")
    assert listed(out) == {}
    numbers = {stem: certificate(out / f"{stem}.pem").serial_number for stem in ("a", "b.lan", "coordinator")}
    elsewhere = tmp_path / "copy.pem"
    elsewhere.write_bytes((out / "b.lan.pem").read_bytes())

    [said] = made("revoke", "--out", out, "a")
    assert f"{out}/crl.pem has a now" in said
    first = listed(out)
    assert first.keys() == {numbers["a"]}
    assert not (out / "a.pem").exists()
    assert not (out / "a-key.pem").exists()
    made("revoke", "--out", out, elsewhere, "coordinator")
    assert listed(out).keys() == set(numbers.values())
    assert first.items() <= listed(out).items()
    assert elsewhere.exists()

    made("--out", out, "--host", "a")
    assert certificate(out / "a.pem").serial_number not in listed(out)
    assert (out / "coordinator.pem").exists()


def test_what_cannot_be_taken_back(tmp_path: Path) -> None:
    """Unknown hosts, other authorities' certificates, the authority's own, and lists that are none: nothing changes."""
    out, other = tmp_path / "certs", tmp_path / "other"
    made("--out", out, "--host", "a")
    made("--out", other, "--host", "a")
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    assert "'b' is neither a host with a certificate in" in refused("revoke", "--out", out, "a", "b")
    assert "'ca' is neither a host" in refused("revoke", "--out", out, "ca")
    assert "comes from another authority" in refused("revoke", "--out", out, "a", other / "a.pem")
    assert "NAME|FILE" in refused("revoke", "--out", out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    (out / "crl.pem").write_bytes((other / "crl.pem").read_bytes())
    assert "another authority's" in refused("revoke", "--out", out, "a")
    (out / "crl.pem").write_text("nothing")
    assert "does not hold a list" in refused("revoke", "--out", out, "a")
    assert (out / "a-key.pem").exists()
