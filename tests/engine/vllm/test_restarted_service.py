"""The memory service is killed under a pair of real engines: nothing is loaded again, nothing is lost."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from gms.client import GmsClient, Status
from tests.engine.vllm.harness import DEADLINE_SECONDS, Driver, EngineProcess
from tests.support.processes import Process, running, until
from workers.memory import MemoryService

pytestmark = [pytest.mark.engine, pytest.mark.timeout(120)]

TOKENS = 24


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path / "gms.sock"


@contextlib.contextmanager
def serving(socket_path: Path) -> Iterator[Process]:
    """A service that answers. It is the first or the next on this path."""
    with running("gms", "gms", "--socket", str(socket_path), log_dir=socket_path.parent) as process:
        status_of(socket_path)
        yield process


def status_of(socket_path: Path) -> Status:
    with GmsClient.connect(socket_path, engine="test", instance="test") as client:
        return client.status()


def weights_files(pid: int) -> set[str]:
    """Inodes of the service's weights that the process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "/memfd:gms" in line and "weights" in line}


def until_held(engine: EngineProcess, *, restored: int) -> None:
    """Until both weights and KV pages are the service's, after having been handed back so often."""

    def ask() -> bool:
        states = engine.status()["custody"]
        found = [(state["pool"].partition("/")[0], state["phase"], state["restored"]) for state in states]
        return found == [("weights", "HELD", restored), ("kv", "HELD", restored)]

    until(ask, saying=f"pages are handed back, {restored} times by now", seconds=DEADLINE_SECONDS)


def test_engines_go_on_and_the_next_one_attaches_what_was_handed_back(driver: Driver, socket_path: Path) -> None:
    service = MemoryService(
        socket=str(socket_path), device="cpu:0", engine="a", instance="pod", timeout_seconds=DEADLINE_SECONDS
    )
    with contextlib.ExitStack() as stack:
        with serving(socket_path) as first:
            writer = driver.fork("restart-writer", service)
            stack.callback(writer.kill)
            writer.wake(1)
            tokens = writer.token_ids(TOKENS)
            pages = weights_files(writer.pid)
            before = status_of(socket_path)
            assert len(pages) == 1
            until_held(writer, restored=0)
            first.signal(signal.SIGKILL)
            first.wait()
            assert writer.token_ids(TOKENS) == tokens, "it goes on without the service"
        stack.enter_context(serving(socket_path))
        until_held(writer, restored=1)
        assert _pools(status_of(socket_path)) == _pools(before)
        reader = driver.fork("restart-reader", msgspec.structs.replace(service, engine="b"))
        stack.callback(reader.kill)
        assert reader.status()["memory"]["weights_role"] == "reader"
        assert weights_files(reader.pid) == weights_files(writer.pid) == pages, "the same pages, and no second copy"
        writer.kill()
        reader.wake(2)
        assert reader.token_ids(TOKENS) == tokens
        assert status_of(socket_path).total_bytes == before.total_bytes


def _pools(status: Status) -> set[tuple[str, int, int, int]]:
    return {(pool.name, pool.generation, pool.epoch, pool.bytes) for pool in status.pools}
