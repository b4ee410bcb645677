"""One service and its clients, on host memory or on a fake GPU; and, in `Device`, all that differs between the two."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gms.client import GmsClient, GmsError, PoolStatus
from tests.process.gms.forkserver import ForkServer
from tests.process.gms.processes import Process, until
from tests.support.fakecuda import UUID, FakeGpus

Wrap = Callable[[list[str]], list[str]]
"""Makes other arguments for Python of those that start a process."""


@dataclass(frozen=True)
class Device:
    """What a test of both devices must know of one. Everything else is the same."""

    name: str
    id: str
    unit: int
    """Sizes are multiples of it."""
    zeroed: bool
    """Whether new pages are zero. On a GPU their content is undefined; the fake one poisons it."""
    sealed: bool
    """Whether nobody can write what is committed, so that a commit is refused while a writable mapping stands. Memory
    of a GPU cannot be sealed."""
    hashed: bool
    """Whether the service hashes and compares by itself. On a GPU clients do it, and it compares what they say."""
    driver: Path | None = None
    """The folder with the fake driver."""
    pages: str = r"/memfd:gms\S*"
    """What the kernel calls a file with the service's pages, as a pattern. A real GPU's are no files."""
    server: ForkServer | None = None
    """Forks its services and clients. Without it they are started anew."""

    @contextmanager
    def with_server(self) -> Iterator[Device]:
        """The same device, whose processes are there at once, as long as the block runs."""
        modules = ["gms.settings", "gms.logs", "gms.factory", "gms.custody", "hashlib", "json"]
        environment = {}
        if self.driver is None:
            modules += ["gms.backends.host"]
        else:
            modules += ["gms.backends.cuda", "gms.cuda_mapping", "cuda.bindings.driver"]
            environment = {"LD_LIBRARY_PATH": library_path(self.driver)}
        with ForkServer(modules, environment) as server:
            yield replace(self, server=server)


def host() -> Device:
    return Device("cpu:0", "cpu:0", 4096, zeroed=True, sealed=True, hashed=True)


def cuda(driver: Path) -> Device:
    return Device(
        "cuda:0",
        UUID.format(0),
        2 << 20,
        zeroed=False,
        sealed=False,
        hashed=False,
        driver=driver,
        pages=r"/\S+/mem-\d\S*",
    )


def library_path(driver: Path) -> str:
    """For the loader: the fake driver before all else."""
    return ":".join([str(driver), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])


class Agent:
    """A client in a process of its own; `tests.process.gms.agent` has the calls."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.pid = process.pid
        self._unanswered = 0

    def ask(self, call: str, **arguments: Any) -> None:
        """Only says it; `answer` waits for what comes of it."""
        self.process.tell(json.dumps([call, arguments]))
        self._unanswered += 1

    def answered(self) -> bool:
        """Whether the answer is there."""
        return self.process.said()

    def answer(self) -> Any:
        """Raises GmsError if that is what the call raised there."""
        answer = json.loads(self.process.line())
        self._unanswered -= 1
        if isinstance(answer, dict):
            raise GmsError(answer["code"], answer["message"], retryable=answer["retryable"])
        return answer[0]

    def do(self, call: str, **arguments: Any) -> Any:
        self.ask(call, **arguments)
        return self.answer()

    def write_weights(self, pool: str, text: str, *, tag: str = "w", size_bytes: int = 1, manifest: str = "m") -> int:
        """Attaches as a writer, writes and commits; returns the generation."""
        self.do("attach", pool=pool, mode="rw")
        self.do("allocate", pool=pool, tag=tag, size_bytes=size_bytes)
        self.do("map", pool=pool, tag=tag, writable=True)
        self.do("write", pool=pool, tag=tag, offset=0, text=text)
        return int(self.do("commit", pool=pool, manifest=manifest)["generation"])

    def read_weights(self, pool: str, length: int, *, tag: str = "w", offset: int = 0) -> str:
        """With a lease: what the pages hold, which are mapped then."""
        self.do("export", pool=pool, tag=tag)
        self.do("map", pool=pool, tag=tag, writable=False)
        return str(self.do("read", pool=pool, tag=tag, offset=offset, length=length))

    def hold_kv(self, epoch: int, *, size_bytes: int = 1, timeout_seconds: float = 60.0) -> tuple[dict[str, Any], bool]:
        """The lease, and whether its pages are new; they are mapped then."""
        lease = self.do("attach", pool="kv", mode="rw", epoch=epoch, timeout_seconds=timeout_seconds)
        pages = self.do("allocate", pool="kv", tag="pages", size_bytes=size_bytes)
        self.do("map", pool="kv", tag="pages", writable=True)
        return lease, pages["created"]

    def kv(self, length: int) -> str:
        return str(self.do("read", pool="kv", tag="pages", offset=0, length=length))

    def write_kv(self, text: str) -> None:
        self.do("write", pool="kv", tag="pages", offset=0, text=text)

    def keep_weights(self, pool: str, text: str, *, units: int = 1, unit: int = 1) -> dict[str, Any]:
        """Writes them, at the beginning and at the end, or attaches to what another wrote, and keeps them mapped beyond
        the service's death. Returns the lease that stands then."""
        lease: dict[str, Any] = self.do("attach", pool=pool, mode="rw_or_ro")
        if lease["mode"] == "rw":
            size = self.do("allocate", pool=pool, tag="w", size_bytes=units * unit)["size_bytes"]
            self.do("map", pool=pool, tag="w", writable=True)
            for offset in (0, size - len(text)):
                self.do("write", pool=pool, tag="w", offset=offset, text=text)
            lease |= self.do("commit", pool=pool, manifest="manifest")
        else:
            self.do("export", pool=pool, tag="w")
        self.do("map", pool=pool, tag="w", writable=False)
        self.do("keep", pool=pool)
        return lease

    def phase(self, pool: str) -> str:
        """Of what it keeps; see `gms.custody`."""
        return str(self.do("custody", pool=pool)["phase"])

    def until_restored(self, *pools: str, times: int = 1) -> None:
        """Until it has what it keeps back, for the so many-th time."""
        back = {"phase": "HELD", "restored": times, "reason": ""}
        for pool in pools:
            until(lambda pool=pool: self.do("custody", pool=pool) == back, f"{pool} is handed back")  # type: ignore[misc]

    def kill(self) -> None:
        self.process.kill()

    def end(self) -> None:
        """In the ordinary way if it can hear; a GPU's process that then leaves something behind is told of."""
        if self.process.process.poll() is None and not self._unanswered:
            self.process.signal(signal.SIGCONT)
            assert self.process.process.stdin is not None
            self.process.process.stdin.close()
            assert self.process.wait() == 0
        self.process.close()


class Bench:
    """`settings` are the fake driver's in the service (see tests/support/fakecuda). Everything is gone after it."""

    def __init__(self, device: Device, *flags: str, memory_bytes: int = 1 << 30, **settings: Any) -> None:
        self.device = device
        self.flags = flags
        self.agents: list[Agent] = []
        self.gpus: FakeGpus | None = None
        self._services: list[Process] = []
        with ExitStack() as stack:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gms-")))
            self.path = self.folder / "gms.sock"
            if device.driver is not None:
                self.gpus = stack.enter_context(FakeGpus(device.driver, devices=2, memory_bytes=memory_bytes))
            stack.callback(self._close_processes)
            self.service = self.start(*flags, **settings)
            self._stack = stack.pop_all()

    def start(self, *flags: str, wrap: Wrap = list, **settings: object) -> Process:
        """Another service on the same path, once the one before it is dead. It logs errors only: nobody reads it."""
        arguments = wrap(["-m", "gms", "--socket", str(self.path), "--device", self.device.name, *flags])
        environment = {"HOTSPARE_GMS_LOG_LEVEL": "error"} | self._environment("service", no_context=1, **settings)
        self.service = self._process(arguments, environment, "stderr", wrap)
        self._services.append(self.service)
        self.connect("start").close()
        return self.service

    def restart(self, *flags: str) -> None:
        """SIGKILL, and another service with the flags of the first one and these."""
        self.service.kill()
        self.start(*self.flags, *flags)

    def rival(self) -> Process:
        """Another service on the same path while the first one lives. Nobody waits for it, and what it says is kept."""
        arguments = ["-m", "gms", "--socket", str(self.path), "--device", self.device.name]
        self._services.append(self._process(arguments, self._environment("rival", no_context=1), "stderr"))
        return self._services[-1]

    def agent(
        self,
        engine: str = "a",
        *,
        pids: Sequence[int] = (),
        connect: bool = True,
        wrap: Wrap = list,
        device: str = "",
        path: Path | None = None,
        **settings: object,
    ) -> Agent:
        """`device` and `path` where they are not the service's."""
        where = [str(path or self.path), device or self.device.name]
        arguments = wrap(["-m", "tests.process.gms.agent", *where, engine])
        agent = Agent(self._process(arguments, self._environment("agent", **settings), "stdout", wrap))
        self.agents.append(agent)
        if connect:
            agent.do("connect", pids=list(pids))
        return agent

    def connect(self, engine: str = "test") -> GmsClient:
        """From this process, which maps nothing and must not load the fake driver."""
        return GmsClient.connect(
            self.path, engine=engine, instance="test", device=self.device.name, device_id=self.device.id
        )

    def pool(self, name: str) -> PoolStatus | None:
        with self.connect("status") as client:
            return next((pool for pool in client.status().pools if pool.name == name), None)

    def until_pool(self, name: str, fits: Callable[[PoolStatus], object]) -> PoolStatus:
        found: list[PoolStatus] = []

        def look() -> bool:
            pool = self.pool(name)
            found[:] = [pool] if pool is not None else []
            return pool is not None and bool(fits(pool))

        until(look, f"{name} is as expected")
        return found[0]

    def start_other(self, device: str) -> Path:
        """A service of another device beside the first one; its socket."""
        path = self.folder / f"{device}.sock"
        environment = {"HOTSPARE_GMS_LOG_LEVEL": "error"} | self._environment("service", no_context=1)
        arguments = ["-m", "gms", "--socket", str(path), "--device", device]
        self._services.append(self._process(arguments, environment, "stderr"))
        return path

    def mapped_by(self, agent: Agent) -> set[int]:
        """Inodes of the service's pages that an agent has mapped: the same ones are the same memory."""
        maps = Path(f"/proc/{agent.pid}/maps").read_text()
        return {int(inode) for inode in re.findall(rf" (\d+) +{self.device.pages}", maps)}

    def held_by_service(self) -> set[int]:
        """Inodes of the pages that the service has descriptors of."""
        folder = f"/proc/{self.service.pid}/fd"
        found = set()
        for fd in os.listdir(folder):
            with suppress(FileNotFoundError):  # it was closed meanwhile
                if re.match(self.device.pages, os.readlink(f"{folder}/{fd}")):
                    found.add(os.stat(f"{folder}/{fd}").st_ino)
        return found

    def in_use_on_gpu(self) -> set[int]:
        """Inodes of all memory of the fake GPU that anybody keeps: each has the file locked."""
        assert self.gpus is not None
        found = set()
        for path in (self.gpus.folder / "state").glob("mem-*"):
            with path.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    found.add(os.fstat(file.fileno()).st_ino)
        return found

    def signal_service(self, number: signal.Signals) -> None:
        self.service.signal(number)

    def end_agents(self) -> None:
        while self.agents:
            self.agents[-1].end()
            self.agents.pop()

    def close(self) -> None:
        with self._stack:
            self.end_agents()
            if self.service.process.poll() is None:
                self.signal_service(signal.SIGTERM)
                assert self.service.wait() == 0, self.service.rest()
            if self.gpus is not None:
                assert not self.gpus.complaints("agent")
                assert not self.gpus.complaints("rival")
                if not any(process.process.poll() == 1 for process in self._services):  # a failing driver keeps things
                    assert not self.gpus.complaints("service")

    def _process(self, arguments: list[str], environment: dict[str, str], stream: str, wrap: Wrap = list) -> Process:
        """Of arguments that are wrapped already; a wrapper is a program of its own, which nobody forks."""
        return Process(arguments, environment, stream, server=self.device.server if wrap is list else None)

    def _close_processes(self) -> None:
        for process in [*(agent.process for agent in self.agents), *self._services]:
            process.close()

    def _environment(self, log: str, **settings: object) -> dict[str, str]:
        return {} if self.gpus is None else self.gpus.environment(log, **settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
