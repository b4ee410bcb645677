"""Workers from EndpointSlices, of an API server over TLS."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from app.address import Address
from app.discovery import kubernetes
from tests.integration.app.conftest import Running, run_gateway, until
from tests.integration.app.fake_kubernetes import FakeKubernetes, make_credentials
from tests.integration.app.fake_worker import FakeWorker, event, streams_then_waits


@pytest.fixture
def shell() -> None:
    """Not a matter of the shell."""


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    make_credentials(folder)
    return folder


@pytest.fixture
def credentials(keys: Path, tmp_path: Path) -> Path:
    """What a pod sees of its service account."""
    (tmp_path / "ca.crt").write_bytes((keys / "ca.crt").read_bytes())
    (tmp_path / "token").write_text("first\n")
    return tmp_path


@pytest.fixture
async def server(keys: Path) -> AsyncIterator[FakeKubernetes]:
    async with FakeKubernetes(keys) as started:
        yield started


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "SHORT_LIFE_SECONDS", 0.0)
    monkeypatch.setattr(kubernetes, "retry_delay", lambda failures, fraction: 0.01)


@asynccontextmanager
async def followed(server: FakeKubernetes, credentials: Path, *, ready: bool = True) -> AsyncIterator[Running]:
    async with run_gateway(
        wait_until_ready=ready,
        workers=None,
        workers_kubernetes="ns/pods:http",
        kubernetes_api=server.url,
        kubernetes_credentials=credentials,
    ) as gateway:
        yield gateway


async def has(gateway: Running, *workers: FakeWorker | str) -> None:
    wanted = sorted(w if isinstance(w, str) else w.address for w in workers)
    await until(lambda: sorted(map(str, gateway.gateway.registry.entries)) == wanted)


async def test_slices_are_followed(workers: Any, server: FakeKubernetes, credentials: Path) -> None:
    (worker,) = await workers("one")
    server.put("a", worker.address, ready=True)
    async with followed(server, credentials) as gateway:
        assert (await gateway.chat()).status_code == 200
        server.put("b", "127.0.0.2:1")
        await has(gateway, worker, "127.0.0.2:1")
        server.delete("b")
        await has(gateway, worker)
        server.delete("a")
        await has(gateway)  # an empty Service is one without workers
        assert gateway.gateway.discovery.up
        assert (await gateway.client.get("/health")).status_code == 200
        assert server.lists == 1


async def test_a_terminating_pod_ends_its_streams_and_stays_watched(
    workers: Any, server: FakeKubernetes, credentials: Path
) -> None:
    (worker,) = await workers("one")
    worker.will(streams_then_waits(event("a"), then=event("b")))
    server.put("a", worker.address, ready=True, serving=True, terminating=False)
    async with followed(server, credentials) as gateway, gateway.stream() as answer:
        lines = answer.aiter_lines()
        assert "a" in await anext(lines)
        server.put("a", worker.address, ready=False, serving=False, terminating=True)
        server.put("b", "127.0.0.2:1")
        await has(gateway, worker, "127.0.0.2:1")
        assert len(gateway.gateway.registry.candidates("")) == 1  # until its own watch says otherwise
        server.delete("a")
        await has(gateway, "127.0.0.2:1")
        (await worker.call()).go.set()
        assert [line async for line in lines][-2:] == ["data: [DONE]", ""]


async def test_a_watch_goes_on_where_the_last_one_ended(server: FakeKubernetes, credentials: Path) -> None:
    server.put("a", "127.0.0.1:1")
    async with followed(server, credentials) as gateway:
        await until(lambda: server.watches_opened == 1)
        server.bookmark()
        server.end_watches()
        server.put("b", "127.0.0.2:1")  # while nobody watches
        await has(gateway, "127.0.0.1:1", "127.0.0.2:1")
        assert (server.lists, server.watches_opened) == (1, 2)


@pytest.mark.parametrize("how", ["cut", "expire", "forget"])
async def test_a_watch_that_cannot_go_on_begins_anew(
    server: FakeKubernetes, credentials: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    server.put("a", "127.0.0.1:1")
    async with followed(server, credentials) as gateway:
        await until(lambda: server.watches_opened == 1)
        match how:
            case "cut":
                server.cut_watches()
            case "expire":
                server.expire_watches()
            case "forget":
                server.forget_history()
                server.end_watches()
        server.put("b", "127.0.0.2:1")
        await has(gateway, "127.0.0.1:1", "127.0.0.2:1")
        await until(lambda: server.watches_opened == 2)
        assert server.lists == 2
        assert gateway.gateway.discovery.up
    assert not [r for r in caplog.records if r.levelname == "WARNING" and "Service" in r.getMessage()]


async def test_the_token_is_read_again(server: FakeKubernetes, credentials: Path) -> None:
    server.put("a", "127.0.0.1:1")
    async with followed(server, credentials) as gateway:
        await until(lambda: server.watches_opened == 1)
        server.token = "second"
        server.end_watches()
        await until(lambda: not gateway.gateway.discovery.up)
        assert "answered 401: the service account needs" in (gateway.gateway.discovery.problem or "")
        assert list(gateway.gateway.registry.entries) == [Address("127.0.0.1", 1)]
        (credentials / "token").write_text("second")
        await until(lambda: gateway.gateway.discovery.up)
        server.put("b", "127.0.0.2:1")
        await has(gateway, "127.0.0.1:1", "127.0.0.2:1")


@pytest.mark.parametrize("name", ["token", "ca.crt"])
async def test_credentials_that_are_no_plain_files_are_not_waited_for(
    server: FakeKubernetes, credentials: Path, name: str
) -> None:
    content = (credentials / name).read_bytes()
    (credentials / name).unlink()
    os.mkfifo(credentials / name)
    async with followed(server, credentials, ready=False) as gateway:
        await until(lambda: "it is not a regular file" in (gateway.gateway.discovery.problem or ""))
        assert str(credentials / name) in (gateway.gateway.discovery.problem or "")
        (credentials / name).unlink()
        (credentials / name).write_bytes(content)
        await until(lambda: gateway.gateway.discovery.up and server.watches_opened == 1)


async def test_a_certificate_among_other_words(server: FakeKubernetes, credentials: Path) -> None:
    """As OpenSSL's tools write them, and people comment on them."""
    certificate = (credentials / "ca.crt").read_bytes()
    (credentials / "ca.crt").write_bytes("# für den Cluster\n".encode() + certificate)
    async with followed(server, credentials) as gateway:
        await until(lambda: gateway.gateway.discovery.up and server.watches_opened == 1)


async def test_a_right_to_list_without_one_to_watch_is_said(server: FakeKubernetes, credentials: Path) -> None:
    server.watchable = False
    async with followed(server, credentials) as gateway:
        await until(lambda: "answered 403" in (gateway.gateway.discovery.problem or ""))


async def test_an_api_server_that_is_away(
    server: FakeKubernetes, credentials: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.put("a", "127.0.0.1:1")
    async with followed(server, credentials) as gateway:
        await until(lambda: server.watches_opened == 1)
        await server.stop()
        await until(lambda: not gateway.gateway.discovery.up)
        assert list(gateway.gateway.registry.entries) == [Address("127.0.0.1", 1)]
        server.put("b", "127.0.0.2:1")
        await server.start()
        await has(gateway, "127.0.0.1:1", "127.0.0.2:1")
    said = [r.getMessage() for r in caplog.records if "the 1 workers known last stay in use" in r.getMessage()]
    assert len(said) == 1


async def test_a_server_that_is_not_the_clusters_gets_no_token(
    server: FakeKubernetes, credentials: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    make_credentials(other)
    (credentials / "ca.crt").write_bytes((other / "ca.crt").read_bytes())
    async with followed(server, credentials, ready=False) as gateway:
        await until(lambda: "certificate verify failed" in (gateway.gateway.discovery.problem or ""))
        assert (await gateway.client.get("/health")).status_code == 503
    assert (server.refused, server.lists) == (0, 0)


async def test_no_service_account(server: FakeKubernetes, tmp_path: Path) -> None:
    async with followed(server, tmp_path / "none", ready=False) as gateway:
        await until(lambda: "No such file" in (gateway.gateway.discovery.problem or ""))
