from __future__ import annotations

import os
import ssl
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.security.certificates import not_after
from app.security.tls import ServerTls
from app.settings import GatewaySettings
from app.start_error import StartError
from tests.support.certificates import Pair, make_pair, openssl


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[Pair]:
    folder = tmp_path_factory.mktemp("tls")
    return [make_pair(folder / "a"), make_pair(folder / "b", days=30 * 365)]


def der(pair: Pair) -> bytes:
    return ssl.PEM_cert_to_DER_cert(pair.certificate.read_text())


def end_of(pair: Pair) -> float:
    said = openssl("x509", "-noout", "-enddate", "-in", str(pair.certificate)).strip().removeprefix("notAfter=")
    return datetime.strptime(said, "%b %d %H:%M:%S %Y GMT").replace(tzinfo=UTC).timestamp()


def test_the_end_of_validity_is_what_openssl_says(pairs: list[Pair]) -> None:
    """The second one ends after 2049, in the other form of time."""
    for pair in pairs:
        assert not_after(der(pair)) == end_of(pair)
    assert parsedate_to_datetime("Fri, 01 Jan 2050 00:00:00 +0000").timestamp() < end_of(pairs[1])


def test_a_certificate_that_is_cut_short(pairs: list[Pair]) -> None:
    whole = der(pairs[0])
    for length in range(0, len(whole), 7):
        with pytest.raises(ValueError, match=r"cut short|type"):
            not_after(whole[:length])


@given(st.binary(max_size=200))
def test_bytes_that_are_no_certificate(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whatever it says
        not_after(data)


def test_what_cannot_be_used_is_a_sentence(tmp_path: Path, pairs: list[Pair]) -> None:
    one, other = pairs
    junk = tmp_path / "junk"
    junk.write_text("no PEM")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    locked = tmp_path / "locked.key"
    openssl("ec", "-in", str(one.key), "-out", str(locked), "-aes128", "-passout", "pass:secret")
    for certificate, key, said in (
        (one.certificate, other.key, "the key does not belong to the certificate"),
        (tmp_path / "none", one.key, r"none cannot be read.*HOTSPARE_TLS_CERTIFICATE"),
        (one.certificate, tmp_path / "none", r"none cannot be read.*HOTSPARE_TLS_KEY"),
        (pipe, one.key, "pipe cannot be read: it is not a regular file"),
        (one.certificate, pipe, "pipe cannot be read: it is not a regular file"),
        (junk, one.key, "holds no certificate in PEM form"),
        (one.certificate, junk, "cannot be used"),
        (one.certificate, locked, "is encrypted"),
    ):
        with pytest.raises(StartError, match=said):
            ServerTls(certificate, key)


def test_a_pair_that_does_not_fit_changes_nothing(tmp_path: Path, pairs: list[Pair]) -> None:
    mine = make_pair(tmp_path / "mine")
    tls = ServerTls(*mine)
    before = tls.expires_at
    os.replace(mine.certificate, tmp_path / "aside")
    with pytest.raises(StartError):
        tls.reload()
    mine.certificate.write_bytes(pairs[1].certificate.read_bytes())
    with pytest.raises(StartError, match="does not belong"):
        tls.reload()
    assert tls.expires_at == before
    mine.key.write_bytes(pairs[1].key.read_bytes())
    assert tls.reload().startswith("the TLS certificate was read again and is valid until 20")
    assert tls.expires_at == end_of(pairs[1])


def test_half_a_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="belong together"):
        GatewaySettings(tls_certificate=Path("/x"))
