"""vLLM's own server without anything of ours, started again by the benchmark the moment it is killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib import metadata
from pathlib import Path
from typing import Final

import httpx

from app.cli.bench.recovery import leavings
from app.cli.bench.system import STOP_SECONDS, BenchError
from app.cli.plan import LOOPBACK
from workers.engine import EngineConfigError
from workers.ports import PortReservation

READY_SECONDS: Final = 300.0
_POLL_SECONDS: Final = 0.02
_TIED: Final = (
    "import os, sys; from workers.lifeline import die_with_parent; "
    "die_with_parent(int(sys.argv[1])); os.execv(sys.argv[2], sys.argv[2:])"
)
"""A process that becomes the server, and ends if this one does."""


class Stock:
    """``vllm serve`` on one port. Killed, it is started anew at once: nothing is quicker without help of its own."""

    def __init__(self, folder: Path, port: int, arguments: list[str], env: Mapping[str, str]) -> None:
        self._log = folder / "vllm.log"
        self._temporary = folder / "tmp"
        served = [os.path.join(os.path.dirname(sys.executable), "vllm"), "serve", *arguments]
        served += ["--host", LOOPBACK, "--port", str(port)]
        self._command = [sys.executable, "-c", _TIED, str(os.getpid()), *served]
        self._env = {**env, "TMPDIR": str(self._temporary)}
        """A killed server leaves its sockets there: they go with the folder."""
        self._process: asyncio.subprocess.Process | None = None
        self._killed: list[tuple[int, frozenset[Path]]] = []
        """Sessions whose end is to be waited for, and what of /dev/shm they had."""
        self.url = f"http://{LOOPBACK}:{port}"

    async def start(self) -> float:
        """Returns the moment."""
        self._temporary.mkdir(exist_ok=True)
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env,
                start_new_session=True,
            )
        finally:
            os.close(log)
        return time.monotonic()

    async def kill(self) -> float:
        """SIGKILL to the server and its engine process, and the moment of it."""
        process = self._process
        if process is None or process.returncode is not None:
            raise BenchError(f"vllm serve has ended by itself:\n{self.log()}")
        shared = await asyncio.to_thread(leavings.mapped_by, process.pid)
        os.killpg(process.pid, signal.SIGKILL)
        killed = time.monotonic()
        await process.wait()
        self._killed.append((process.pid, shared))
        return killed

    async def clear_up(self) -> None:
        """Remove what killed servers have left in /dev/shm. Not a part of ``kill``: a recovery does not wait for it.

        Raises:
            BenchError: one of their processes does not end.
        """
        while self._killed:
            session, shared = self._killed[-1]
            if not await asyncio.to_thread(leavings.ended, session, timeout_seconds=STOP_SECONDS):
                raise BenchError(f"processes of vllm serve (session {session}) do not end even on SIGKILL")
            await asyncio.to_thread(leavings.remove, shared)
            self._killed.pop()

    async def until_ready(self) -> None:
        """Raises:
        BenchError: it ended, or was not ready in time.
        """
        deadline = time.monotonic() + READY_SECONDS
        async with httpx.AsyncClient(timeout=5, trust_env=False) as client:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if (await client.get(f"{self.url}/health")).status_code == 200:
                        return
                if self._process is None or self._process.returncode is not None:
                    raise BenchError(f"vllm serve ended before it was ready:\n{self.log()}")
                if time.monotonic() > deadline:
                    raise BenchError(f"vllm serve was not ready within {READY_SECONDS:g} s:\n{self.log()}")
                await asyncio.sleep(_POLL_SECONDS)

    def log(self) -> str:
        """Its last lines."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-20:]) if self._log.exists() else ""

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL for whatever is left of its session after a while."""
        process = self._process
        if process is None:
            return
        shared = await asyncio.to_thread(leavings.mapped_by, process.pid)
        try:
            if process.returncode is None:
                process.terminate()
                async with asyncio.timeout(STOP_SECONDS):
                    await process.wait()
        except TimeoutError:
            pass
        finally:  # in a task that is cancelled, Python 3.11 ends the timeout with CancelledError
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            self._killed.append((process.pid, shared))
            await self.clear_up()


@asynccontextmanager
async def running_stock(folder: Path) -> AsyncIterator[tuple[Stock, str]]:
    """The server, ready, with the settings that an engine of ours has here; and the name of its model.

    Raises:
        BenchError: it did not come up.
    """
    arguments, model = await asyncio.to_thread(_arguments)
    os.makedirs(folder, mode=0o700)
    env = {name: value for name, value in os.environ.items() if not name.upper().startswith("HOTSPARE_")}
    env |= {"VLLM_PLUGINS": "", "PYTHONPATH": str(_with_its_name(folder / "name"))}
    with PortReservation(LOOPBACK) as reserved:
        stock = Stock(folder, reserved.port, arguments, env)
        try:
            await stock.start()
            await stock.until_ready()
            yield stock, model
        finally:
            await stock.stop()


def _arguments() -> tuple[list[str], str]:
    from workers.engines.vllm.arguments import model_folder, served_model_name, shared_arguments
    from workers.settings import EngineSettings, SettingsError, load_settings

    try:
        settings = load_settings(EngineSettings, {})
        return [str(model_folder(settings)), *shared_arguments(settings)], served_model_name(settings)
    except (SettingsError, EngineConfigError) as error:
        raise BenchError(str(error)) from error


def _with_its_name(folder: Path) -> Path:
    """A folder for PYTHONPATH where the CPU build's wheel has the name and version by which vLLM looks for itself: its
    own command does not start without."""
    from workers.engines.vllm.build import CPU_DISTRIBUTION, DISTRIBUTION

    with contextlib.suppress(metadata.PackageNotFoundError):
        version = f"{metadata.version(CPU_DISTRIBUTION)}+cpu"
        info = folder / f"{DISTRIBUTION}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {version}\n")
    return folder
