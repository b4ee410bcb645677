"""Sources of worker addresses that are simply asked again and again: a list, a file, a name.

A source runs until it is cancelled and tells what it finds, also when it is the same as before.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from app.address import Address
from app.discovery.findings import Failed, Finding, Found, one_family
from app.discovery.hostfile import MAX_FILE_BYTES, read_addresses
from app.plain_file import read_regular

T = TypeVar("T")

FILE_LOOK_SECONDS = 0.25
"""A small file is read whole each time: unlike times and inodes, its content never lies about a change."""
LOOK_TIMEOUT_SECONDS = 5.0

Hear = Callable[[Finding], None]
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Host and port → IP addresses. Raises ``OSError``."""


class Source(Protocol):
    @property
    def name(self) -> str:
        """For people: ``file /etc/workers``."""
        ...

    async def run(self, hear: Hear) -> None: ...


class StaticSource:
    """The list of the settings."""

    name = "setting workers"

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._addresses = tuple(addresses)

    async def run(self, hear: Hear) -> None:
        hear(Found(self._addresses, certain=True))


class FileSource:
    """A file that others replace or rewrite.

    Whoever writes in place shows half of the new text for a moment, and half an address may be an address: what
    changed is believed once two looks saw the same.
    """

    def __init__(self, path: Path, *, look_seconds: float = FILE_LOOK_SECONDS) -> None:
        self.name = f"file {path}"
        self._path = path
        self._look_seconds = look_seconds

    async def run(self, hear: Hear) -> None:
        look = _Lookup(lambda: asyncio.to_thread(_read, self._path))
        seen = await look.ask()
        believed, finding = seen, _understand(seen)
        while True:
            hear(finding)
            await asyncio.sleep(self._look_seconds)
            before, seen = seen, await look.ask()
            if seen == before and seen != believed:
                believed, finding = seen, _understand(seen)


class DnsSource:
    """The records of a name, as those of a headless Service."""

    def __init__(self, name: Address, *, interval_seconds: float, resolve: Resolve | None = None) -> None:
        self.name = f"name {name.host}"
        self._host, self._port = name
        self._interval = interval_seconds
        self._resolve = resolve or _resolve

    async def run(self, hear: Hear) -> None:
        look = _Lookup(self._look)
        while True:
            answer = await look.ask()
            hear(answer if isinstance(answer, Found) else Failed(str(answer)))
            await asyncio.sleep(self._interval)

    async def _look(self) -> Found | str:
        try:
            hosts = await self._resolve(self._host, self._port)
        except OSError as error:
            return f"cannot be resolved: {error.strerror or error}"
        except UnicodeError as error:
            return f"is no host name: {error}"
        return Found(tuple(Address(host, self._port) for host in one_family(hosts)))


class _Lookup(Generic[T]):
    """Asks with a deadline, in a thread that cannot be interrupted: a question that hangs is waited for further, and
    not asked a second time beside it."""

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._ask = ask
        self._running: asyncio.Task[T] | None = None

    async def ask(self) -> T | str:
        """The answer, or that there was none in time."""
        task = self._running or asyncio.create_task(self._ask())
        self._running = task
        try:
            done, _ = await asyncio.wait((task,), timeout=LOOK_TIMEOUT_SECONDS)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not done:
            return f"gave no answer within {LOOK_TIMEOUT_SECONDS:g} s"
        self._running = None
        return task.result()


def _read(path: Path) -> bytes | str:
    """The file's content, or why it cannot be had."""
    try:
        return read_regular(path, MAX_FILE_BYTES)
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _understand(seen: bytes | str) -> Finding:
    return Failed(seen) if isinstance(seen, str) else read_addresses(seen)


async def _resolve(host: str, port: int) -> Sequence[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for _, _, _, _, address in found]
