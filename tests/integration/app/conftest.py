from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvloop

from app.address import parse_address
from app.application import Gateway
from app.clients.websocket import PING_SECONDS
from app.factory import create_app
from app.fleet.liveness import WorkerState
from app.fleet.replica import WorkerEntry
from app.processes.listener import bind
from app.server import GatewayServer
from app.settings import GatewaySettings
from tests.integration.app.fake_worker import MODEL, FakeWorker


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, Any]:
    """These tests run on the loop that the gateway runs on."""
    return {"uvloop": uvloop.new_event_loop}


NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For clients that speak plain HTTP: each would otherwise load the system's certificates, which takes 18 ms."""


class Shell:
    """Which of the two shells relays: the server's own protocol class ("direct"), or what any ASGI server would run."""

    chosen = "direct"


@pytest.fixture(params=["direct", "asgi"], autouse=True)
def shell(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test runs through both."""
    chosen: str = request.param
    monkeypatch.setattr(Shell, "chosen", chosen)
    return chosen


one_shell = pytest.mark.parametrize("shell", ["direct"], indirect=True)
"""For what happens behind the relay (choosing workers, waiting for them, sending spans), while the way of a request
through either shell is tested elsewhere."""


@dataclass
class Running:
    """A gateway that serves on a real socket, in this process."""

    server: GatewayServer
    gateway: Gateway
    client: httpx.AsyncClient
    port: int
    task: asyncio.Task[None]

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def entry(self, worker: FakeWorker) -> WorkerEntry:
        return self.gateway.registry.entries[parse_address(worker.address)]

    def state(self, worker: FakeWorker) -> WorkerState:
        return self.entry(worker).history[-1].state

    async def until(self, condition: Callable[[], bool]) -> None:
        await until(condition)

    @asynccontextmanager
    async def stream(self, **extra: Any) -> AsyncIterator[httpx.Response]:
        body = {"model": MODEL, "messages": [], "stream": True} | extra
        async with self.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            yield answer

    async def raw(self, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Bytes on a connection of their own."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        return reader, writer

    async def read_all(self) -> None:
        """Wait until the gateway has read what was written to any of its connections before, if it reads there at all:
        its loop looks at all of them before it answers on another one."""
        for _ in range(2):
            assert (await self.client.get("/live")).status_code == 200

    async def raw_chat(self, *, stream: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        body = json.dumps({"model": MODEL, "stream": stream}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: {len(body)}\r\n\r\n"
        return await self.raw(head.encode() + body)

    async def chat(self, *, stream: bool = False, **extra: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": stream}
        return await self.client.post("/v1/chat/completions", json=body | extra)


PATIENCE_SECONDS = 20.0
"""For what comes by an event. It is never waited for in a test that passes, so a slow machine has it, too."""


async def until(condition: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until something is so; looks every loop turn or so."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  # the condition is about somebody else's state
            await asyncio.sleep(0.001)


@asynccontextmanager
async def run_gateway(
    *workers: FakeWorker,
    wait_until_ready: bool = True,
    ping_seconds: float = PING_SECONDS,
    **settings: Any,
) -> AsyncIterator[Running]:
    """A gateway over these workers; ready, and with every running worker up, when this returns."""
    addresses = ",".join(worker.address for worker in workers)
    # Fake workers say that they have a spare, and few of them are followed by one.
    given = {"workers": addresses, "wait_for_worker_seconds": 5, "resume_home_seconds": 0} | settings
    app = create_app(GatewaySettings(**{name: value for name, value in given.items() if value is not None}))
    if Shell.chosen == "asgi":
        app.direct = {}
    server = GatewayServer(app, ping_seconds=ping_seconds)
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    task = asyncio.create_task(server.serve(sockets=[listener]))
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", timeout=10, limits=limits, trust_env=False, verify=NO_CERTIFICATES
    ) as client:
        running = Running(server, app.gateway, client, port, task)
        try:
            if wait_until_ready:
                await until(lambda: app.gateway.lifecycle.state.value == "ready" or task.done())
            yield running
        finally:
            server.should_exit = True
            async with asyncio.timeout(PATIENCE_SECONDS):
                await task
            listener.close()


async def read_response(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the next response on a raw connection; interim ones are skipped."""
    while (head := (await reader.readuntil(b"\r\n\r\n")).decode()).startswith("HTTP/1.1 1"):
        pass
    first, *lines = head.strip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if "content-length" in headers:
        return int(first.split()[1]), headers, await reader.readexactly(int(headers["content-length"]))
    body = bytearray()
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readuntil(b"\r\n")
    return int(first.split()[1]), headers, bytes(body)


@pytest.fixture
async def workers() -> AsyncIterator[Callable[..., Any]]:
    """Starts fake workers; ends them with the test."""
    async with AsyncExitStack() as stack:

        async def start(*names: str, **options: Any) -> list[FakeWorker]:
            return [await stack.enter_async_context(FakeWorker(name, **options)) for name in names]

        yield start
