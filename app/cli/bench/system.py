"""A whole Hotspare of its own for a measurement: started with ``hotspare up``, asked, hurt, and taken down again."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx
import msgspec

from app.cli.bench.pods import active_of
from app.cli.door import client_key, key_headers
from app.cli.launch import module_command, safe_environment
from app.cli.plan import LOOPBACK
from app.cli.run_dir import read_pod
from workers.contract import HEADER_WORKER_TOKEN
from workers.hosts import authority
from workers.ports import PortReservation
from workers.state import EngineState

T = TypeVar("T")

POLL_SECONDS: Final = 0.02
_TOKEN: Final = "HOTSPARE_WORKER_TOKEN"  # noqa: S105 - a name
STOP_SECONDS: Final = 60.0


class BenchError(Exception):
    """The measurement cannot be made; the message says why."""


class System:
    """A running ``hotspare up``, or a pod alone, in a run folder of its own; ``pod`` is the first one."""

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
            except (FileNotFoundError, msgspec.DecodeError):
                return False
            if not self._pod_is_there():
                return False
            self.gateway_url = f"http://{authority(gateway['host'], gateway['port'])}"
            status = await self.get(f"{self.gateway_url}/status")
            return bool(status) and any(worker["routable"] for worker in status["workers"])

        await self.until(routable, saying="the gateway routes to the pod", timeout_seconds=timeout_seconds)

    async def find_pod(self, *, timeout_seconds: float) -> None:
        """Wait until the pod serves.

        Raises:
            BenchError: it ended, or was not ready in time.
        """

        async def serves() -> bool:
            return self._pod_is_there() and bool(await self.engine("ACTIVE"))

        await self.until(serves, saying="the pod serves", timeout_seconds=timeout_seconds)

    def _pod_is_there(self) -> bool:
        try:
            self.pod = msgspec.json.decode((self._run_dir / "pod-0" / "pod.json").read_bytes())
        except (FileNotFoundError, msgspec.DecodeError):
            return False
        return True

    async def until(self, what: Callable[[], Any], *, saying: str, timeout_seconds: float) -> Any:
        """The first true answer of ``what``, asked every 20 ms.

        Raises:
            BenchError: not in time, or the system ended meanwhile.
        """
        deadline = time.monotonic() + timeout_seconds
        while not (answer := await what()):
            if self._process.returncode is not None:
                raise BenchError(f"the system ended with {self._process.returncode} before {saying}:\n{self.log()}")
            if time.monotonic() > deadline:
                raise BenchError(f"not within {timeout_seconds:g} s: {saying}\n{self.log()}")
            await asyncio.sleep(POLL_SECONDS)
        return answer

    async def run_on(self) -> None:
        """For ever, as long as the system does.

        Raises:
            BenchError: it ended.
        """
        code = await self._process.wait()
        raise BenchError(f"the system ended with {code}:\n{self.log()}")

    def log(self) -> str:
        """The last lines that it printed."""
        path = self._run_dir / "up.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-20:]) if path.exists() else ""

    async def get(self, url: str) -> dict[str, Any]:
        """A JSON document, or {} while nobody answers."""
        return await self._get(url, self.headers if self.gateway_url and url.startswith(self.gateway_url) else {})

    async def get_from_worker(self, url: str) -> dict[str, Any]:
        """The same of a pod's serving port."""
        return await self._get(url, self.worker_headers)

    async def _get(self, url: str, headers: Mapping[str, str]) -> dict[str, Any]:
        try:
            return dict((await self._client.get(url, headers=headers)).json())
        except (httpx.TransportError, ValueError):
            return {}

    async def engines(self) -> list[dict[str, Any]]:
        """``/state`` of every engine that answers."""
        host = self.pod["host"]
        ports = [engine["admin_port"] for engine in self.pod["engines"].values()]
        states = await asyncio.gather(*(self.get(f"http://{authority(host, port)}/state") for port in ports))
        return [state for state in states if state]

    async def engine(self, role: str) -> dict[str, Any]:
        """The engine with this role, or {}."""
        return next((state for state in await self.engines() if state["role"] == role), {})

    async def pair(self) -> EngineState | None:
        """The active engine, if there is one and a spare; else None."""
        record = read_pod(self._run_dir / "pod-0")
        return None if record is None else await active_of(record)

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


async def _start(run_dir: Path, *command: str, env: Mapping[str, str]) -> asyncio.subprocess.Process:
    os.makedirs(run_dir, mode=0o700)
    log = os.open(run_dir / "up.log", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        return await asyncio.create_subprocess_exec(
            *module_command("app.cli.main", *command),
            *("--run-dir", str(run_dir)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**env, "HOTSPARE_PARENT_PID": str(os.getpid())},
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
    env = {**plain_http(safe_environment(os.environ)), **env, "HOTSPARE_WORKER_TOKEN": token}
    process = await _start(run_dir, "up", "--port", "0", "--base-port", "0", *flags, env=env)
    async with ended(process), httpx.AsyncClient(timeout=5, trust_env=False) as client:
        system = System(run_dir, process, client, worker_token=token)
        await system.find(timeout_seconds=timeout_seconds)
        yield system


@asynccontextmanager
async def running_pod(run_dir: Path, *, engine: str, timeout_seconds: float) -> AsyncIterator[System]:
    """``hotspare pod`` on free ports, whose serving port answers whoever comes to this machine's loopback."""
    inherited = plain_http(safe_environment(os.environ))
    env = {name: value for name, value in inherited.items() if not name.upper().startswith(_TOKEN)}
    with ExitStack() as stack:
        ports = [stack.enter_context(PortReservation(LOOPBACK)).port for _ in range(4)]
        serving, metrics, *admin = map(str, ports)
        flags = ("--engine", engine, "--host", LOOPBACK, "--serving-port", serving, "--gms-metrics-port", metrics)
        process = await _start(run_dir, "pod", *flags, "--admin-ports", ",".join(admin), env=env)
        async with ended(process), httpx.AsyncClient(timeout=5, trust_env=False) as client:
            system = System(run_dir, process, client, worker_token="")
            await system.find_pod(timeout_seconds=timeout_seconds)
            yield system


@asynccontextmanager
async def ended(process: asyncio.subprocess.Process, *, stop_seconds: float = STOP_SECONDS) -> AsyncIterator[None]:
    """On leaving, and the processes that it has with it: SIGTERM, and SIGKILL if it is not gone in time."""
    try:
        yield
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(stop_seconds):
                    await process.wait()
            except TimeoutError:
                pass
            finally:  # in a task that is cancelled, Python 3.11 ends the timeout with CancelledError
                if process.returncode is None:
                    process.kill()
                    await process.wait()
