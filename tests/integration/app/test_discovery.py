"""Addresses that come and go under a running gateway."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from app import factory
from app.discovery.sources import FILE_LOOK_SECONDS, DnsSource, FileSource, Resolve
from tests.integration.app.conftest import Running, run_gateway
from tests.integration.app.fake_worker import FakeWorker, event, streams_then_waits


@pytest.fixture
def shell() -> None:
    """Not a matter of the shell."""


@asynccontextmanager
async def followed(
    path: Path, *workers: FakeWorker, ready: bool = True, look_seconds: float = 0.02
) -> AsyncIterator[Running]:
    """A gateway that follows this file, and looks at it more often than usual."""
    if workers:
        name(path, *workers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(factory, "FileSource", lambda path: FileSource(path, look_seconds=look_seconds))
        async with run_gateway(workers=None, workers_file=path, wait_until_ready=ready) as gateway:
            yield gateway


def name(path: Path, *workers: FakeWorker) -> None:
    partial = path.with_suffix(".new")
    partial.write_text("".join(f"{worker.address}\n" for worker in workers))
    partial.replace(path)


def left(gateway: Running) -> int:
    return len(gateway.gateway.registry._leaving)


async def metric(gateway: Running, name: str) -> float:
    text = (await gateway.client.get("/metrics")).text
    (line,) = (line for line in text.splitlines() if line.startswith(f"{name} "))
    return float(line.split()[1])


TRIES = 3
"""The best one of them counts: a busy machine may be late."""


async def test_requests_follow_a_file_within_a_second(workers: Any, tmp_path: Path) -> None:
    one, two = await workers("one", "two")
    async with followed(tmp_path / "workers", one, look_seconds=FILE_LOOK_SECONDS) as gateway:
        assert (await gateway.chat()).json()["choices"][0]["message"]["content"] == "from one"
        took: list[float] = []
        for _ in range(TRIES):
            began = time.monotonic()
            name(tmp_path / "workers", two)
            await gateway.until(lambda: [r.key.worker for r in gateway.gateway.registry.candidates("")] == ["two"])
            took.append(time.monotonic() - began)
            if took[-1] < 1:
                break
            name(tmp_path / "workers", one)
            await gateway.until(lambda: [r.key.worker for r in gateway.gateway.registry.candidates("")] == ["one"])
        assert min(took) < 1, took
        assert (await gateway.chat()).json()["choices"][0]["message"]["content"] == "from two"
        await gateway.until(lambda: not left(gateway) and not one._tasks)
        text = (await gateway.client.get("/metrics")).text
        assert two.address in text
        assert one.address not in text
        assert [w["address"] for w in (await gateway.client.get("/status")).json()["workers"]] == [two.address]


async def test_a_removed_worker_keeps_its_streams_and_its_watch_until_they_end(workers: Any, tmp_path: Path) -> None:
    one, two = await workers("one", "two")
    one.will(streams_then_waits(event("a"), then=event("b")))
    async with followed(tmp_path / "workers", one) as gateway, gateway.stream() as answer:
        lines = answer.aiter_lines()
        assert "a" in await anext(lines)
        name(tmp_path / "workers", two)
        await gateway.until(lambda: left(gateway) == 1)
        assert (await gateway.chat()).json()["choices"][0]["message"]["content"] == "from two"
        assert len(one._watchers) == 1
        (await one.call()).go.set()
        rest = [line async for line in lines]
        assert any('"b"' in line for line in rest)
        assert rest[-2:] == ["data: [DONE]", ""]
        await gateway.until(lambda: not left(gateway) and not one._tasks)


async def test_a_removed_worker_that_dies_is_noticed(workers: Any, tmp_path: Path) -> None:
    one, two = await workers("one", "two")
    one.will(streams_then_waits(event("a")))
    async with followed(tmp_path / "workers", one) as gateway, gateway.stream() as answer:
        lines = answer.aiter_lines()
        assert "a" in await anext(lines)
        name(tmp_path / "workers", two)
        await gateway.until(lambda: left(gateway) == 1)
        await one.die()
        assert any("worker_lost" in line for line in [line async for line in lines])
        await gateway.until(lambda: not left(gateway))


async def test_a_worker_that_comes_back_while_its_streams_run(workers: Any, tmp_path: Path) -> None:
    one, two = await workers("one", "two")
    one.will(streams_then_waits(event("a"), then=event("b")))
    path = tmp_path / "workers"
    async with followed(path, one, two) as gateway, gateway.stream() as answer:
        lines = answer.aiter_lines()
        assert "a" in await anext(lines)
        name(path, two)
        await gateway.until(lambda: left(gateway) == 1)
        name(path, one, two)
        await gateway.until(lambda: len(gateway.gateway.registry.candidates("")) == 2)
        told = {(await gateway.chat()).json()["choices"][0]["message"]["content"] for _ in range(4)}
        assert told == {"from one", "from two"}
        (await one.call()).go.set()
        assert [line async for line in lines][-2:] == ["data: [DONE]", ""]
        await gateway.until(lambda: not left(gateway))
        await gateway.until(lambda: len(one._watchers) == 1)
        assert len(gateway.gateway.registry.candidates("")) == 2


async def test_nothing_is_lost_while_workers_come_and_go_under_load(workers: Any, tmp_path: Path) -> None:
    fleet = await workers("one", "two", "three")
    path = tmp_path / "workers"
    async with followed(path, *fleet) as gateway:
        over = asyncio.Event()
        answered = 0

        async def client(number: int) -> None:
            nonlocal answered
            while not over.is_set():
                answer = await gateway.chat(stream=bool(number % 2))
                assert answer.status_code == 200
                assert "worker_lost" not in answer.text
                answered += 1

        clients = [asyncio.create_task(client(number)) for number in range(8)]
        for turn in range(6):
            present = [worker for number, worker in enumerate(fleet) if number != turn % 3]
            before = answered
            name(path, *present)
            wanted = [worker.address for worker in present]
            await gateway.until(lambda: list(map(str, gateway.gateway.registry.entries)) == wanted)  # noqa: B023
            await gateway.until(lambda: answered >= before + 10)  # noqa: B023
        over.set()
        await asyncio.gather(*clients)
        assert answered > 50
        assert all(worker.calls for worker in fleet)


async def test_a_file_that_is_not_there_keeps_the_gateway_starting(workers: Any, tmp_path: Path) -> None:
    (worker,) = await workers("one")
    path = tmp_path / "workers"
    async with followed(path, ready=False) as gateway:
        await gateway.until(lambda: gateway.gateway.discovery.picture.problem is not None)
        health = await gateway.client.get("/health")
        assert health.status_code == 503
        assert health.json() == {
            "status": "starting",
            "workers": 0,
            "routable": 0,
            "discovery": f"file {path} cannot be read: No such file or directory",
        }
        assert await metric(gateway, "hotspare_discovery_up") == 0
        waiting = asyncio.create_task(gateway.chat())
        await gateway.until(lambda: gateway.gateway.queue.waiting == 1)
        name(path, worker)
        assert (await waiting).status_code == 200
        await gateway.until(lambda: gateway.gateway.lifecycle.state.value == "ready")
        assert "discovery" not in (await gateway.client.get("/health")).json()


async def test_the_last_list_stays_and_a_condition_is_logged_once(
    workers: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (worker,) = await workers("one")
    path = tmp_path / "workers"
    async with followed(path, worker) as gateway:
        assert await metric(gateway, "hotspare_discovery_up") == 1
        success = await metric(gateway, "hotspare_discovery_last_success_timestamp_seconds")
        assert time.time() - 5 < success <= time.time()
        for broken, said in ((b"", "names no worker any more"), (b"nonsense", "has a bad line 1")):
            path.write_bytes(broken)
            await gateway.until(lambda: said in (gateway.gateway.discovery.problem or ""))  # noqa: B023
            assert (await gateway.chat()).status_code == 200
        assert await metric(gateway, "hotspare_discovery_up") == 0
        assert (await gateway.client.get("/health")).status_code == 200
        path.write_text(json.dumps([]))
        await gateway.until(lambda: gateway.gateway.discovery.up)
        assert await metric(gateway, "hotspare_discovered_workers") == 0
        said_of_it = [
            r.getMessage() for r in caplog.records if r.levelname == "WARNING" and str(path) in r.getMessage()
        ]
    assert len(said_of_it) == 2
    assert said_of_it[0].endswith("the 1 workers known last stay in use")


async def test_a_name(workers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each address of the name is a worker at the one port."""
    (worker,) = await workers("one")
    hosts: list[str] = []

    async def resolve(host: str, port: int) -> list[str]:
        assert host == "pods.test"
        if not hosts:
            raise OSError(-2, "Name or service not known")
        return hosts

    def source(*arguments: Any, resolve: Resolve = resolve, **options: Any) -> DnsSource:
        return DnsSource(*arguments, resolve=resolve, **options)

    monkeypatch.setattr(factory, "DnsSource", source)
    settings: dict[str, Any] = {"workers": None, "workers_dns": f"pods.test:{worker.port}"}
    async with run_gateway(wait_until_ready=False, discovery_interval_seconds=0.02, **settings) as gateway:
        await gateway.until(lambda: gateway.gateway.discovery.picture.problem is not None)
        assert "name pods.test cannot be resolved" in (await gateway.client.get("/health")).json()["discovery"]
        hosts.append("127.0.0.1")
        assert (await gateway.chat()).status_code == 200
        hosts.append("127.0.0.2")
        await gateway.until(lambda: len(gateway.gateway.registry.entries) == 2)
        hosts.clear()
        await gateway.until(lambda: not gateway.gateway.discovery.up)
        assert (await gateway.chat()).status_code == 200


async def test_localhost(workers: Any) -> None:
    """The system's own resolver."""
    (worker,) = await workers("one")
    async with run_gateway(workers=None, workers_dns=f"localhost:{worker.port}") as gateway:
        assert (await gateway.chat()).status_code == 200
