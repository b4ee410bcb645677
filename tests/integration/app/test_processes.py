"""Several gateway processes behind one socket: real ones, killed for real."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import httpx
import psutil
import pytest

from tests.integration.app.conftest import until as until_true
from tests.integration.app.fake_worker import MODEL, FakeWorker, event, streams_then_waits
from tests.support.processes import Process, gone, running, until

Start = Callable[..., Process]
STARTED_SECONDS = 30.0


@pytest.fixture
def shell() -> None:
    """Not a matter of the shell."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts gateways of two processes. ``tidy``: nothing is left in the folder for temporary files at the end."""
    with contextlib.ExitStack() as stack:

        def begin(*arguments: str, tidy: bool = True) -> Process:
            temporary = stack.enter_context(
                tempfile.TemporaryDirectory(dir="/tmp", prefix="hs-")
            )  # socket names are short
            if tidy:
                stack.callback(lambda: check(temporary))
            own = ["--port", "0", "--processes", "2", "--run-dir", str(tmp_path / "run")]
            context = running("gateway", "app", *own, *arguments, log_dir=tmp_path, env={"TMPDIR": temporary})
            return stack.enter_context(context)

        yield begin


def check(temporary: str) -> None:
    assert os.listdir(temporary) == []


def children(process: Process) -> list[int]:
    return [child.pid for child in psutil.Process(process.pid).children()]


class HasPid(Protocol):
    @property
    def pid(self) -> int: ...


@asynccontextmanager
async def client(process: HasPid, tmp_path: Path, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Each request on a connection of its own, so that both processes get some."""
    path = tmp_path / "run" / "gateway.json"
    document = await asyncio.to_thread(
        until, lambda: json.loads(path.read_text()) if path.exists() else None, saying="it is announced"
    )
    assert document["pid"] == process.pid
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{document['port']}", limits=limits, timeout=30, trust_env=False
    ) as made:
        yield made


async def status(made: httpx.AsyncClient) -> dict[str, Any]:
    return dict((await made.get("/status")).json())


async def until_health(made: httpx.AsyncClient, status: str) -> httpx.Response:
    async with asyncio.timeout(STARTED_SECONDS):
        while (answer := await made.get("/health")).json()["status"] != status:  # noqa: ASYNC110  # asked, not told
            await asyncio.sleep(0.01)
    return answer


async def both_serve(made: httpx.AsyncClient, *, without: int = 0) -> dict[int, int]:
    """Process number → pid, once there are two of them."""
    async with asyncio.timeout(STARTED_SECONDS):
        while True:
            pids = {item["process"]: item["pid"] for item in (await status(made))["processes"]}
            if len(pids) == 2 and without not in pids.values() and (await made.get("/health")).status_code == 200:
                return pids
            await asyncio.sleep(0.05)


async def metrics(made: httpx.AsyncClient) -> list[str]:
    return (await made.get("/metrics")).text.splitlines()


async def statuses_of_both(made: httpx.AsyncClient) -> list[dict[str, Any]]:
    """Those of an answer for which both processes were asked in time."""
    async with asyncio.timeout(STARTED_SECONDS):
        while len(told := (await status(made))["processes"]) < 2:  # noqa: ASYNC110  # asked, not told
            await asyncio.sleep(0.05)
    return list(told)


async def metrics_of_both(made: httpx.AsyncClient) -> list[str]:
    """Those of an answer for which both processes were asked in time: one that was not is told of by its file."""
    up = {f'hotspare_process_up{{process="{number}"}} 1.0' for number in (0, 1)}
    async with asyncio.timeout(STARTED_SECONDS):
        while not up <= set(lines := await metrics(made)):  # noqa: ASYNC110  # asked, not told
            await asyncio.sleep(0.05)
    return lines


async def counted(made: httpx.AsyncClient) -> float:
    """Requests for tokens, of all processes together."""
    return counted_in(await metrics(made))


def counted_in(lines: list[str]) -> float:
    counts = [line for line in lines if line.startswith("hotspare_requests_total{") and "tokenize" in line]
    return sum(float(line.split()[-1]) for line in counts)


async def tokenize(made: httpx.AsyncClient) -> httpx.Response:
    return await made.post("/tokenize", json={"model": MODEL, "prompt": "x"})


class Load:
    """Requests, each on a connection of its own, from eight clients."""

    def __init__(self, made: httpx.AsyncClient) -> None:
        self._made = made
        self._over = False
        self.answered = self.broken = 0
        self.refused: list[httpx.ConnectError] = []
        self._tasks = [asyncio.create_task(self._run()) for _ in range(8)]

    async def _run(self) -> None:
        while not self._over:
            try:
                assert (await tokenize(self._made)).status_code == 200
                self.answered += 1
            except httpx.ConnectError as error:
                self.refused.append(error)
            except httpx.TransportError:
                self.broken += 1

    async def end(self) -> None:
        self._over = True
        await asyncio.gather(*self._tasks)


async def test_a_life(start: Start, tmp_path: Path) -> None:
    """One gateway through all of it: starting one takes longer than the rest."""
    async with FakeWorker() as worker:
        process = start("--workers", worker.address, "--drain-timeout-seconds", "20")
        async with client(process, tmp_path) as made:
            pids = await both_serve(made)
            assert set(pids.values()) == set(children(process))
            pids = await one_is_killed_under_load(made, pids)
            assert set(pids.values()) == set(children(process))
            await one_hangs(made, pids)
            worker.default = streams_then_waits(event("a"), then=event("b"))
            first = len(worker.calls)
            streams = await begin_streams(made, 12)
            assert sum(item["inflight"] for item in await statuses_of_both(made)) == 12
            process.signal(signal.SIGTERM)
            assert (await until_health(made, "draining")).status_code == 503
            for number in range(12):
                (await worker.call(first + number)).go.set()
            for text in await asyncio.gather(*streams):
                assert text.endswith("data: [DONE]\n\n")
                assert '"b"' in text
        assert await asyncio.to_thread(process.wait) == 0
    assert list((tmp_path / "run").iterdir()) == []
    assert "ended (SIGKILL)" in process.output()


async def one_is_killed_under_load(made: httpx.AsyncClient, pids: dict[int, int]) -> dict[int, int]:
    """Nobody is refused, only its own connections break, and counters never go backwards."""
    load = Load(made)
    await until_true(lambda: load.answered > 100)
    before = await counted(made)
    assert before > 0
    os.kill(pids[0], signal.SIGKILL)
    during = await counted(made)
    after = await both_serve(made, without=pids[0])
    assert after[1] == pids[1]
    await load.end()
    told = [await metrics_of_both(made) for _ in range(6)]
    totals = [counted_in(lines) for lines in told]
    assert load.refused == []
    assert load.broken <= 8
    assert before <= during <= totals[0] <= load.answered + load.broken
    assert len(set(totals)) == 1  # whichever process is asked
    assert all(lines.count("hotspare_inflight_requests 0.0") == 1 for lines in told)
    return after


async def one_hangs(made: httpx.AsyncClient, pids: dict[int, int]) -> None:
    """It is named, blocks nobody, and what it counted stays in the sum."""
    async with httpx.AsyncClient(base_url=made.base_url, timeout=30, trust_env=False) as kept:
        own = (await status(kept))["pid"]  # this connection is accepted: it stays with its process
        total = await counted(kept)
        number, other = next((number, pid) for number, pid in pids.items() if pid != own)
        os.kill(other, signal.SIGSTOP)
        try:
            lines = await metrics(kept)
            assert f'hotspare_process_up{{process="{number}"}} 0.0' in lines
            assert f'hotspare_process_up{{process="{1 - number}"}} 1.0' in lines
            assert await counted(kept) == total
        finally:
            os.kill(other, signal.SIGCONT)


async def begin_streams(made: httpx.AsyncClient, count: int) -> list[asyncio.Task[str]]:
    """Streams that have delivered something."""
    opened = asyncio.Semaphore(0)

    async def stream() -> str:
        pieces = []
        body = {"model": MODEL, "messages": [], "stream": True}
        async with made.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for piece in answer.aiter_text():
                pieces.append(piece)
                opened.release()
        return "".join(pieces)

    streams = [asyncio.create_task(stream()) for _ in range(count)]
    for _ in streams:
        await opened.acquire()
    return streams


async def test_a_second_signal_ends_all_at_once(start: Start, tmp_path: Path) -> None:
    async with FakeWorker() as worker:
        worker.default = streams_then_waits(event("a"))
        process = start("--workers", worker.address, "--drain-timeout-seconds", "60")
        async with client(process, tmp_path) as made:
            await both_serve(made)
            pids = children(process)
            body = {"model": MODEL, "messages": [], "stream": True}
            async with made.stream("POST", "/v1/chat/completions", json=body) as answer:
                assert answer.status_code == 200
                process.signal(signal.SIGINT)
                await until_health(made, "draining")
                process.signal(signal.SIGINT)
                assert await asyncio.to_thread(process.wait, seconds=20) == 70
    assert all(gone(pid) for pid in pids)
    assert list((tmp_path / "run").iterdir()) == []


async def test_who_asks_during_a_drain_is_answered(start: Start, tmp_path: Path) -> None:
    """Also by a process that has nothing left to do: it leaves with the last one."""
    async with FakeWorker() as worker:
        worker.default = streams_then_waits(event("a"))
        process = start("--workers", worker.address, "--drain-timeout-seconds", "60")
        async with client(process, tmp_path) as made:
            await both_serve(made)
            pids = set(children(process))
            (stream,) = await begin_streams(made, 1)
            process.signal(signal.SIGTERM)
            await until_true(lambda: said_by_both(process.output()))
            for _ in range(100):
                assert (await made.get("/health")).json()["status"] == "draining"
                assert (await tokenize(made)).status_code == 503
            assert set(children(process)) == pids
            (await worker.call(0)).go.set()
            assert (await stream).endswith("data: [DONE]\n\n")
        assert await asyncio.to_thread(process.wait) == 0


def said_by_both(output: str) -> bool:
    """Whether both drain and one is done. They are told one after the other."""
    return output.count("SIGTERM: draining ") == 2 and "drained in" in output


async def test_children_die_with_their_supervisor(start: Start, tmp_path: Path) -> None:
    process = start("--workers", "127.0.0.1:1", tidy=False)
    async with client(process, tmp_path) as made:
        await both_serve(made)
        pids = children(process)
    process.signal(signal.SIGKILL)
    assert all(gone(pid) for pid in pids)


async def test_one_that_hangs_is_replaced(tmp_path: Path) -> None:
    """With a shorter patience than usual."""
    code = (
        "import sys, app.processes.supervision as supervision; supervision.SILENCE_SECONDS = 6.0; "
        "from app.start import main; sys.exit(main())"
    )
    own = ["--port", "0", "--processes", "2", "--workers", "127.0.0.1:1", "--run-dir", str(tmp_path / "run")]
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="hs-") as temporary, (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(  # noqa: ASYNC220  # nothing else runs yet
            [sys.executable, "-c", code, *own], env=os.environ | {"TMPDIR": temporary}, stderr=log
        )
        try:
            async with client(process, tmp_path) as made:
                pids = await both_serve(made)
                os.kill(pids[0], signal.SIGSTOP)
                after = await both_serve(made, without=pids[0])
                assert after[1] == pids[1]
            assert "process 0 has said nothing for" in (tmp_path / "log").read_text()
            process.terminate()
            assert await asyncio.to_thread(process.wait, 20) == 0
        finally:
            process.kill()
            process.wait()


def test_what_no_child_can_use_ends_the_supervisor(start: Start, tmp_path: Path) -> None:
    process = start("--workers", "127.0.0.1:1", "--api-keys-file", str(tmp_path / "missing"))
    assert process.wait(seconds=STARTED_SECONDS) == 2
    assert "missing" in process.output()
