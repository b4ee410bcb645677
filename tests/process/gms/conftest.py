"""A real service in a process of its own, and clients in theirs, so that kill means kill."""

from __future__ import annotations

import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gms.client import GmsClient
from tests.process.gms import bench as benches
from tests.process.gms.bench import Bench, Device
from tests.process.gms.processes import Process, descriptors_of, until
from tests.support.fakecuda import built_once

PRELUDE = """
import os, signal, sys, threading
from gms.client import *
from gms.mapping import *
SOCKET = sys.argv[1]
def connect(engine="a", **more):
    return GmsClient.connect(SOCKET, engine=engine, instance="test", **more)
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # one write a line: forked children say things too
def hear():
    return sys.stdin.readline().strip()
def mapped(allocation, writable=True):
    reservation = Reservation(allocation.size_bytes)
    reservation.map(allocation.chunks, writable=writable)
    return reservation
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: a socket's may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="gms-") as path:
        yield Path(path)


@pytest.fixture
def socket_path(folder: Path) -> Path:
    return folder / "gms.sock"


Spawn = Callable[..., Process]


@pytest.fixture
def spawn(folder: Path) -> Iterator[Spawn]:
    """What is started here is gone before its folder is."""
    processes: list[Process] = []

    def start(arguments: list[str], environment: dict[str, str] | None = None, stream: str = "stdout") -> Process:
        processes.append(Process(arguments, environment, stream))
        return processes[-1]

    yield start
    for process in processes:
        process.close()


@pytest.fixture
def serve(spawn: Spawn, socket_path: Path) -> Spawn:
    """Starts a service that listens before it is returned."""

    def start(*flags: str, environment: dict[str, str] | None = None) -> Process:
        process = spawn(["-m", "gms", "--socket", str(socket_path), *flags], environment, "stderr")
        process.expect("listens on")
        return process

    return start


@pytest.fixture
def service(serve: Spawn) -> Process:
    return serve()


@pytest.fixture
def actor(spawn: Spawn, socket_path: Path) -> Spawn:
    """A client in a process of its own, running the code given after PRELUDE."""

    def start(code: str) -> Process:
        return spawn(["-c", PRELUDE + textwrap.dedent(code), str(socket_path)])

    return start


@pytest.fixture
def client(service: Process, socket_path: Path) -> Iterator[GmsClient]:
    with GmsClient.connect(socket_path, engine="test", instance="test") as connection:
        yield connection


@pytest.fixture(autouse=True)
def no_descriptor_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    before = descriptors_of("self")
    yield
    if "client" not in request.fixturenames and "spawn" not in request.fixturenames:
        assert descriptors_of("self") == before


@pytest.fixture
def eventually() -> Callable[[Callable[[], object], str], None]:
    return until


@pytest.fixture(scope="module", params=["host", "cuda"])
def device(request: pytest.FixtureRequest) -> Device:
    """What asks for it runs on both."""
    found: Device = request.getfixturevalue("host" if request.param == "host" else "gpu")
    return found


@pytest.fixture(scope="session")
def host() -> Iterator[Device]:
    with benches.host().with_server() as made:
        yield made


@pytest.fixture(scope="session")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    with benches.cuda(built_once(tmp_path_factory)).with_server() as made:
        yield made


@pytest.fixture
def bench(device: Device) -> Iterator[Bench]:
    with Bench(device) as made:
        yield made
