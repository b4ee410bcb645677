"""A whole Hotspare of its own for a measurement: started with ``hotspare up``, asked, hurt, and taken down again."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx
import msgspec

from app.cli.door import client_key, key_headers
from app.cli.launch import module_command, safe_environment
from workers.contract import HEADER_WORKER_TOKEN

T = TypeVar("T")

POLL_SECONDS: Final = 0.02
STOP_SECONDS: Final = 60.0


class BenchError(Exception):
    """The measurement cannot be made; the message says why."""


class System:
    """A running ``hotspare up`` with one pod, in a run folder of its own."""

    def __init__(
        self, run_dir: Path, process: asyncio.subprocess.Process, client: httpx.AsyncClient, *, worker_token: str
    ) -> None:
        self._run_dir = run_dir
        self._process = process
        self._client = client
        self.gateway_url = ""
        self.headers = key_headers(client_key(os.environ))
        """For requests to the gateway, which has the keys of this environment, too."""
        self.worker_headers = {HEADER_WORKER_TOKEN: worker_token}
        """For requests to the pod's serving port."""
        self.pod: dict[str, Any] = {}

    @property
    def serving(self) -> tuple[str, int]:
        """Host and port of the pod's active engine."""
        return str(self.pod["host"]), int(self.pod["serving_port"])

    async def find(self, *, timeout_seconds: float) -> None:
        """Wait until the gateway routes to the pod.

        Raises:
            BenchError: the system ended, or was not ready in time.
        """

        async def routable() -> bool:
            try:
                gateway = msgspec.json.decode((self._run_dir / "gateway.json").read_bytes())
                self.pod = msgspec.json.decode((self._run_dir / "pod-0" / "pod.json").read_bytes())
            except (FileNotFoundError, msgspec.DecodeError):
                return False
            self.gateway_url = f"http://{gateway['host']}:{gateway['port']}"
            status = await self.get(f"{self.gateway_url}/status")
            return bool(status) and any(worker["routable"] for worker in status["workers"])

        await self.until(routable, saying="the gateway routes to the pod", timeout_seconds=timeout_seconds)

    async def until(self, what: Callable[[], Any], *, saying: str, timeout_seconds: float) -> Any:
        """The first true answer of ``what``, asked every 20 ms.

        Raises:
            BenchError: not in time, or the system ended meanwhile.
        """
        deadline = time.monotonic() + timeout_seconds
        while not (answer := await what()):
            if self._process.returncode is not None:
                raise BenchError(f"hotspare up ended with {self._process.returncode} before {saying}:\n{self.log()}")
            if time.monotonic() > deadline:
                raise BenchError(f"not within {timeout_seconds:g} s: {saying}\n{self.log()}")
            await asyncio.sleep(POLL_SECONDS)
        return answer

    def log(self) -> str:
        """The last lines that ``up`` printed."""
        path = self._run_dir / "up.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-20:]) if path.exists() else ""

    async def get(self, url: str) -> dict[str, Any]:
        """A JSON document, or {} while nobody answers."""
        try:
            headers = self.headers if self.gateway_url and url.startswith(self.gateway_url) else {}
            return dict((await self._client.get(url, headers=headers)).json())
        except (httpx.TransportError, ValueError):
            return {}

    async def engines(self) -> list[dict[str, Any]]:
        """``/state`` of every engine that answers."""
        host = self.pod["host"]
        ports = [engine["admin_port"] for engine in self.pod["engines"].values()]
        states = await asyncio.gather(*(self.get(f"http://{host}:{port}/state") for port in ports))
        return [state for state in states if state]

    async def engine(self, role: str) -> dict[str, Any]:
        """The engine with this role, or {}."""
        return next((state for state in await self.engines() if state["role"] == role), {})

    async def history(self) -> list[dict[str, Any]]:
        """The gateway's transitions of the pod, oldest first."""
        status = await self.get(f"{self.gateway_url}/status")
        return [entry for worker in status.get("workers", ()) for entry in worker["history"]]

    async def kill(self, pid: int) -> float:
        """SIGKILL, and the moment of it."""
        os.kill(pid, signal.SIGKILL)
        return time.monotonic()


def plain_http(environment: Mapping[str, str]) -> dict[str, str]:
    """Without TLS settings: what is measured here is not the handshake."""
    return {name: value for name, value in environment.items() if not name.upper().startswith("HOTSPARE_TLS_")}


async def _start(run_dir: Path, *, flags: Sequence[str], env: Mapping[str, str]) -> asyncio.subprocess.Process:
    os.makedirs(run_dir, mode=0o700)
    log = os.open(run_dir / "up.log", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        return await asyncio.create_subprocess_exec(
            *module_command("app.cli.main", "up"),
            *("--run-dir", str(run_dir), "--port", "0", "--base-port", "0", *flags),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**plain_http(safe_environment(os.environ)), **env, "HOTSPARE_PARENT_PID": str(os.getpid())},
            start_new_session=True,
        )
    finally:
        os.close(log)


@asynccontextmanager
async def running_system(
    run_dir: Path, *, flags: Sequence[str], env: Mapping[str, str], timeout_seconds: float
) -> AsyncIterator[System]:
    """``hotspare up`` with one pod on free ports; stopped with SIGTERM, or SIGKILL if that does not help."""
    token = secrets.token_urlsafe(32)
    process = await _start(run_dir, flags=flags, env={**env, "HOTSPARE_WORKER_TOKEN": token})
    try:
        async with httpx.AsyncClient(timeout=5, trust_env=False) as client:
            system = System(run_dir, process, client, worker_token=token)
            await system.find(timeout_seconds=timeout_seconds)
            yield system
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
