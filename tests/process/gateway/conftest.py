from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from tests.support.certificates import Pair
from tests.support.processes import DEADLINE_SECONDS, Process

Start = Callable[..., Process]

ROOT = Path(__file__).parents[3]


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, Any]:
    """The client has to be fast, too."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def light_worker() -> Iterator[int]:
    """The port of a worker process."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "light_worker.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def start_gateway(tmp_path: Path, light_worker: int) -> Iterator[Start]:
    """Starts gateways on any port. :func:`ready` waits for them."""
    started: list[Process] = []

    def start(*arguments: str) -> Process:
        name = f"gateway-{len(started)}"
        command = [sys.executable, "-m", "app", "--port", "0", "--workers", f"127.0.0.1:{light_worker}", *arguments]
        process = Process(name, command, env={}, log=tmp_path / f"{name}.log")
        started.append(process)
        return process

    yield start
    for process in started:
        process.end()


async def ready(process: Process, pair: Pair | None = None) -> int:
    """The port of a gateway that has found its worker; ``pair``: its TLS."""
    scheme = "http" if pair is None else "https"

    def listening() -> int | None:
        words = process.output().partition(f"listening on {scheme}://127.0.0.1:")[2].split()
        return int(words[0]) if words else None

    async with asyncio.timeout(DEADLINE_SECONDS):
        while (port := listening()) is None:
            assert process.popen.poll() is None, process.output()
            await asyncio.sleep(0.01)
        verify = pair is None or ssl.create_default_context(cafile=str(pair.certificate))
        async with httpx.AsyncClient(trust_env=False, verify=verify) as client:
            while (await client.get(f"{scheme}://127.0.0.1:{port}/health")).json().get("routable") != 1:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    return port
