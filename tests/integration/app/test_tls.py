"""The gateway over TLS, through both shells: as without it, with certificates that are replaced while it runs."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from app import server
from app.cli.door import trust_only
from app.cli.observe import ask_gateway
from app.cli.reports import Absence, GatewayReport
from app.cli.run_dir import GatewayFile
from app.clients.protocol import ClientProtocol
from app.security import watched_files
from tests.integration.app.conftest import Running, read_response, run_gateway, until
from tests.integration.app.fake_worker import DONE, FakeWorker, answers, event, streams_then_waits
from tests.support.certificates import Pair, make_pair

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[Pair]:
    folder = tmp_path_factory.mktemp("tls")
    return [make_pair(folder / "one"), make_pair(folder / "two", days=30)]


@pytest.fixture
def pair(made: list[Pair], tmp_path: Path) -> Pair:
    """A copy, for the gateway, of the first one."""
    mine = Pair(tmp_path / "tls.crt", tmp_path / "tls.key")
    mine.replace(made[0])
    return mine


@asynccontextmanager
async def run_tls(*workers: FakeWorker, pair: Pair, **settings: Any) -> AsyncIterator[Running]:
    settings |= {"tls_certificate": str(pair.certificate), "tls_key": str(pair.key)}
    async with run_gateway(*workers, **settings) as gateway:
        yield gateway


def client(gateway: Running, pair: Pair) -> httpx.AsyncClient:
    verify = ssl.create_default_context(cafile=pair.certificate)
    return httpx.AsyncClient(base_url=f"https://127.0.0.1:{gateway.port}", verify=verify, trust_env=False, timeout=10)


async def connect(gateway: Running, context: ssl.SSLContext) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", gateway.port, ssl=context)


async def shown_by(gateway: Running) -> bytes:
    """The certificate of a new handshake, whatever it is."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await connect(gateway, context)
    found: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()
    return found


def der(pair: Pair) -> bytes:
    return ssl.PEM_cert_to_DER_cert(pair.certificate.read_text())


async def test_answers_and_streams(workers: Callable[..., Any], pair: Pair) -> None:
    [worker] = await workers("pod-0")
    async with run_tls(worker, pair=pair) as gateway, client(gateway, pair) as https:
        for path in ("/live", "/health", "/v1/models"):
            assert (await https.get(path)).status_code == 200
        for _ in range(2):  # on one connection
            answer = await https.post("/v1/chat/completions", json={"model": "tiny"})
            assert answer.json()["choices"][0]["message"]["content"] == "from pod-0"
        async with https.stream("POST", "/v1/chat/completions", json={"model": "tiny", "stream": True}) as stream:
            assert await stream.aread() == event("from pod-0") + event(" done") + DONE
        worker.will(answers(document={"text": "x" * 3_000_000}))
        big = await https.post("/tokenize", content=json.dumps({"model": "tiny", "prompt": "y" * 3_000_000}))
        assert len(big.json()["text"]) == 3_000_000
        assert len(worker.calls[-1].body) > 3_000_000
        assert len(gateway.server.server_state.connections) == 1


@pytest.mark.parametrize(
    ("version", "welcome"),
    [(ssl.TLSVersion.TLSv1_1, False), (ssl.TLSVersion.TLSv1_2, True), (ssl.TLSVersion.TLSv1_3, True)],
)
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
async def test_versions(workers: Callable[..., Any], pair: Pair, version: ssl.TLSVersion, welcome: bool) -> None:
    [worker] = await workers("pod-0")
    async with run_tls(worker, pair=pair) as gateway:
        context = trust_only(pair.certificate)
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
        context.minimum_version = context.maximum_version = version
        context.set_alpn_protocols(["h2", "http/1.1"])
        if not welcome:
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await connect(gateway, context)
            return
        _, writer = await connect(gateway, context)
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
        writer.transport.abort()


async def test_a_new_pair_is_shown_to_new_handshakes(
    workers: Callable[..., Any],
    pair: Pair,
    made: list[Pair],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(watched_files, "LOOK_SECONDS", 0.02)
    first, second = made
    name = "hotspare_tls_certificate_expiry_timestamp_seconds"
    with caplog.at_level(logging.INFO):
        async with run_tls(await only(workers), pair=pair) as gateway, client(gateway, first) as before:
            assert (await before.get("/live")).status_code == 200
            assert await shown_by(gateway) == der(first)
            said = (await before.get("/metrics")).text
            assert f'{name}{{certificate="{pair.certificate}"}}' in said

            # A key that does not fit, and then a certificate that is none: the old pair stays, and that is said.
            pair.key.write_bytes(second.key.read_bytes())
            await until(lambda: "does not belong to the certificate" in caplog.text)
            assert await shown_by(gateway) == der(first)
            pair.certificate.write_text("gone wrong")
            await until(lambda: "holds no certificate" in caplog.text)
            assert await shown_by(gateway) == der(first)
            # The rest of the new pair.
            pair.certificate.write_bytes(second.certificate.read_bytes())
            tls = gateway.gateway.access.tls
            assert tls is not None
            old = tls.expires_at
            await until(lambda: tls.expires_at != old)
            assert await shown_by(gateway) == der(second)
            assert (await before.get("/live")).status_code == 200  # on its old connection
            assert (await before.get("/metrics")).text != said
            async with client(gateway, second) as after:
                assert (await after.get("/live")).status_code == 200
    assert caplog.text.count("stays in use") == 2


async def only(workers: Callable[..., Any]) -> FakeWorker:
    [worker] = await workers("pod-0")
    found: FakeWorker = worker
    return found


async def test_who_does_not_shake_hands_is_let_go_and_holds_nobody_up(workers: Callable[..., Any], pair: Pair) -> None:
    async with (
        run_tls(await only(workers), pair=pair, tls_handshake_timeout_seconds=3) as gateway,
        client(gateway, pair) as https,
    ):
        silent = [await gateway.raw(b"") for _ in range(20)]
        halfway = [await gateway.raw(b"\x16\x03\x01\x02\x00\x01") for _ in range(5)]
        plain, plain_writer = await gateway.raw(b"GET /live HTTP/1.1\r\nhost: g\r\n\r\n")
        assert (await https.get("/live")).status_code == 200
        assert not any(reader.at_eof() for reader, _ in (*silent, *halfway))  # they are waited for, and it was not
        async with asyncio.timeout(15):
            for reader, writer in (*silent, *halfway):
                await ended(reader)
                writer.close()
            assert b"HTTP" not in await ended(plain)
        plain_writer.close()
        await gateway.until(lambda: len(gateway.server.server_state.connections) == 1)


async def test_who_does_not_shake_hands_counts_among_the_connections(
    workers: Callable[..., Any], pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.clients.tls_front.SURPLUS_HEAD_SECONDS", 0.5)
    monkeypatch.setattr("app.clients.connections.SURPLUS", 8)
    async with (
        run_tls(await only(workers), pair=pair, max_connections=1, tls_handshake_timeout_seconds=60) as gateway,
        asyncio.timeout(20),
    ):
        count = gateway.server.config.connections
        first, first_writer = await gateway.raw(b"")
        await gateway.until(lambda: count.open == 1)
        async with client(gateway, pair) as https:  # one too many: it learns so, and may ask whether we live
            answer = await https.get("/v1/models")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "too_many_connections")
            assert (await https.get("/live")).status_code == 200
        await gateway.until(lambda: count.open == 1)
        silent = [await gateway.raw(b"") for _ in range(8)]
        await gateway.until(lambda: count.open == 9)
        reader, writer = await gateway.raw(b"")
        assert await ended(reader) == b""  # closed unheard
        writer.close()
        for reader, writer in silent:  # a surplus one has less time
            assert await ended(reader) == b""
            writer.close()
        await gateway.until(lambda: count.open == 1)
        assert not first.at_eof()
        first_writer.close()
        await gateway.until(lambda: count.open == 0)
        async with client(gateway, pair) as https:
            for _ in range(2):
                assert (await https.get("/v1/models")).status_code == 200
            assert count.open == 1
        await gateway.until(lambda: count.open == 0)


async def ended(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionError:
        return b""


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01"])
async def test_a_handshake_under_way_does_not_hold_up_the_end(
    workers: Callable[..., Any], pair: Pair, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CLOSING_SECONDS", 60.0)  # what it does not wait for, it does not miss
    async with run_tls(await only(workers), pair=pair, drain_timeout_seconds=20) as gateway:
        reader, writer = await gateway.raw(sent)
        await gateway.until(lambda: len(gateway.server.server_state.connections) == 1)
        gateway.server.request_drain()
        async with asyncio.timeout(5):
            await gateway.task
        assert await ended(reader) == b""
        writer.close()


async def test_an_early_answer_arrives_and_the_connection_ends(
    workers: Callable[..., Any], pair: Pair, shell: str
) -> None:
    """The rest of the body is still on its way: closing at once could take the answer away."""
    async with run_tls(await only(workers), pair=pair, max_body_bytes=1024) as gateway:
        reader, writer = await connect(gateway, trust_only(pair.certificate))
        writer.write(b"POST /tokenize HTTP/1.1\r\nhost: g\r\ncontent-length: 300000\r\n\r\n")
        async with asyncio.timeout(8):
            writer.write(b"x" * 100_000)
            status, headers, body = await read_response(reader)
            assert (status, json.loads(body)["error"]["code"]) == (413, "body_too_large")
            if shell == "direct":
                assert headers["connection"] == "close"
                writer.write(b"x" * 100_000)
                assert await ended(reader) == b""
        writer.transport.abort()


async def test_a_client_that_goes_is_noticed(workers: Callable[..., Any], pair: Pair) -> None:
    worker = await only(workers)
    worker.will(streams_then_waits(event("a")))
    async with run_tls(worker, pair=pair) as gateway:
        reader, writer = await connect(gateway, trust_only(pair.certificate))
        body = b'{"model":"tiny","stream":true}'
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        async with asyncio.timeout(5):
            await reader.readuntil(b'"a"')
            writer.transport.abort()
            await worker.calls[0].closed.wait()


async def test_a_slow_reader_holds_no_more_than_without_tls(workers: Callable[..., Any], pair: Pair) -> None:
    """The loop's own limit for TLS is eight times the other's."""
    worker = await only(workers)
    async with run_tls(worker, pair=pair) as gateway:
        _, writer = await connect(gateway, trust_only(pair.certificate))
        await gateway.until(
            lambda: any(isinstance(one, ClientProtocol) for one in gateway.server.server_state.connections)
        )
        for one in gateway.server.server_state.connections:
            if isinstance(one, ClientProtocol):
                assert one.transport.get_write_buffer_limits()[1] == 64 * 1024
        writer.transport.abort()


async def test_a_slow_reader_gets_its_last_byte_while_the_gateway_drains(
    workers: Callable[..., Any], pair: Pair
) -> None:
    """What TLS has handed to the socket's transport counts as not sent, too."""
    worker = await only(workers)
    document = {"text": "x" * 3_900_000}
    worker.will(answers(document=document))
    async with run_tls(worker, pair=pair, drain_timeout_seconds=20) as gateway:
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        context = trust_only(pair.certificate)

        def ask() -> ssl.SSLSocket:
            plain.settimeout(20)
            plain.connect(("127.0.0.1", gateway.port))
            secure = context.wrap_socket(plain)
            secure.sendall(b'POST /tokenize HTTP/1.1\r\nhost: g\r\ncontent-length: 16\r\n\r\n{"model":"tiny"}')
            return secure

        secure = await asyncio.to_thread(ask)
        with secure:
            head = await asyncio.to_thread(secure.recv, 100)
            assert head.startswith(b"HTTP/1.1 200")
            gateway.server.request_drain()
            await asyncio.sleep(1.5)  # longer than the server waits for connections once nothing is in flight
            assert not gateway.task.done()
            rest = await asyncio.to_thread(read_all, secure)
        assert json.loads((head + rest).partition(b"\r\n\r\n")[2]) == document
        async with asyncio.timeout(10):
            await gateway.task


def read_all(secure: ssl.SSLSocket) -> bytes:
    return b"".join(iter(lambda: secure.recv(1 << 20), b""))


async def test_the_commands_know_the_gateway_by_its_certificate(
    workers: Callable[..., Any], pair: Pair, made: list[Pair], tmp_path: Path
) -> None:
    async with run_tls(await only(workers), pair=pair, api_keys="k") as gateway:

        async def ask(certificate: Path, key: str | None) -> GatewayReport | Absence:
            file = GatewayFile(pid=1, host="0.0.0.0", port=gateway.port, tls_certificate=str(certificate))
            return await ask_gateway(file, key=key)

        seen = await ask(pair.certificate, "k")
        assert isinstance(seen, GatewayReport)
        assert await ask(pair.certificate, None) is Absence.UNAUTHORIZED
        assert await ask(made[1].certificate, "k") is Absence.UNTRUSTED
        assert await ask(tmp_path / "none", "k") is Absence.UNTRUSTED
