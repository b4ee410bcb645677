"""Engines for tests: a preloaded parent that forks them, and what a test asks of one."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec

from tests.engine.vllm.driver import SOCKET_NAME, Forked, Line, Order, Ready, Report
from workers.memory import MemoryService

DEADLINE_SECONDS = 60.0


class EngineProcess:
    """One forked engine, asked over its Unix socket."""

    def __init__(self, pid: int, report: Report, runtime_dir: Path) -> None:
        self.pid = pid
        self.report = report
        self.client = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(runtime_dir / SOCKET_NAME)),
            base_url="http://engine",
            timeout=DEADLINE_SECONDS,
        )

    def control(self, what: str, argument: str = "") -> httpx.Response:
        return self.client.post(f"/control/{what}?{argument}")

    def wake(self, epoch: int) -> float:
        """Seconds it took inside the engine."""
        answer = self.control("wake", str(epoch))
        assert answer.status_code == 200, answer.text
        return float(answer.json()["seconds"])

    def park(self) -> float:
        answer = self.control("park")
        assert answer.status_code == 200, answer.text
        return float(answer.json()["seconds"])

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.control("status").json()["answer"]
        return answer

    def token_ids(self, count: int) -> list[int]:
        """Greedy tokens of a fixed prompt."""
        body = {
            "model": "smollm2",
            "prompt": "Once upon a time, in a small village by the sea,",
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = self.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return ids

    def ask(self, question: str) -> str:
        body = {
            "model": "smollm2",
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 16,
            "temperature": 0,
        }
        answer = self.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["message"]["content"]
        return text

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        self.client.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.wait_gone()

    @property
    def lives(self) -> bool:
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            return not select.select([pidfd], [], [], 0)[0]
        finally:
            os.close(pidfd)

    def wait_gone(self) -> None:
        """Until the process is no more."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            readable, _, _ = select.select([pidfd], [], [], DEADLINE_SECONDS)
            assert readable, f"process {self.pid} lives on"
        finally:
            os.close(pidfd)


class Driver:
    """The preloaded parent (``driver.py``, or another ``module`` like it)."""

    def __init__(
        self,
        settings: dict[str, Any],
        folder: Path,
        *,
        module: str = "tests.engine.vllm.driver",
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._settings = settings
        self._folder = folder
        self.log = folder / "driver.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, msgspec.json.encode(settings).decode()],
                env={**os.environ, **(env or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,  # a line that a buffer holds is not readable for select
                start_new_session=True,
            )
        ready = self._line()
        assert isinstance(ready, Ready)
        self.ready = ready

    def try_fork(
        self, name: str, service: MemoryService | None = None, *, scheduler: str = "", **settings: Any
    ) -> tuple[int, Report, Path]:
        """An engine that is parked or has failed to start."""
        runtime_dir = self._folder / name
        runtime_dir.mkdir()
        order = Order(
            name=name,
            runtime_dir=str(runtime_dir),
            settings={**self._settings, **settings},
            service=service,
            scheduler=scheduler,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")
        self._process.stdin.flush()
        forked = self._line()
        assert isinstance(forked, Forked)
        report = self._line()
        assert isinstance(report, Report)
        assert report.name == name
        return forked.pid, report, runtime_dir

    def fork(self, name: str, service: MemoryService | None = None, **settings: Any) -> EngineProcess:
        """An engine that is parked."""
        pid, report, runtime_dir = self.try_fork(name, service, **settings)
        assert not report.error, f"{report.error}: {report.message}"
        return EngineProcess(pid, report, runtime_dir)

    def end(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _line(self) -> Line:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], DEADLINE_SECONDS)
        raw = self._process.stdout.readline() if readable else b""
        assert raw, f"the driver says nothing:\n{self.log.read_text()[-4000:]}"
        line: Line = msgspec.json.decode(raw, type=Ready | Forked | Report)
        return line
