"""One ``hotspare up`` with two sim pods for all tests beside it: real processes, real sockets, no model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from openai import AsyncOpenAI, OpenAI

from tests.support.machine import Machine

MODEL = "sim"


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    folder = tmp_path_factory.mktemp("sdk")
    quick = {"HOTSPARE_SIM_TOKEN_SECONDS": "0.0005", "HOTSPARE_SIM_TTFT_SECONDS": "0.0005"}
    started = Machine(folder / "run", folder, ("--pods", "2"), quick)
    try:
        started.until_ready()
        yield started
    finally:
        started.end()


@pytest.fixture(scope="session")
def base_url(machine: Machine) -> str:
    return machine.until_ready()


@pytest.fixture
def client(base_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=20) as made:
        yield made


@pytest.fixture
async def async_client(base_url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=20) as made:
        yield made
