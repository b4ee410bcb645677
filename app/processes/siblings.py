"""What the processes of one gateway tell each other: metrics and status, over Unix sockets in a private folder.

Whichever process is asked for ``/metrics`` or ``/status`` asks the others and adds up. Each writes its counters to a
file before it tells them, and carries on from that file when it is started again: what anybody was ever told stays in
the sum, whichever process is asked next. What a process counted after it was asked last goes with it if it is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from app.processes.families import Family, counting, merge

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 1.0
MAX_ANSWER_BYTES = 32 << 20


class Place(NamedTuple):
    """Which of a gateway's processes this one is, from 0, and where they meet."""

    number: int
    processes: int
    folder: Path


class Telling(msgspec.Struct):
    """``status`` is the process's own ``/status`` document, as JSON; empty of one that did not answer."""

    families: tuple[Family, ...]
    status: bytes = b""


class Siblings:
    """Use as ``async with``. ``look`` returns this process's families and its status document."""

    def __init__(self, place: Place, look: Callable[[], tuple[tuple[Family, ...], bytes]]) -> None:
        self.place = place
        self._look = look
        self._before: tuple[Family, ...] = ()
        """What this process's predecessors counted."""
        self._lock = asyncio.Lock()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._before = await asyncio.to_thread(self._read, self.place.number)
        path = self._socket(self.place.number)
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, path)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
        await self._own()

    async def tell(self) -> dict[int, Telling]:
        """What each process says of itself, this one too. Of one that does not answer in time: what it counted."""
        others = [index for index in range(self.place.processes) if index != self.place.number]
        own, *told = await asyncio.gather(self._own(), *(self._ask(index) for index in others))
        return dict(sorted({self.place.number: own, **dict(zip(others, told, strict=True))}.items()))

    async def _own(self) -> Telling:
        async with self._lock:  # the file must not lag behind what was told
            families, status = self._look()
            families = await asyncio.to_thread(self._keep, families)
            return Telling(families, status)

    def _keep(self, families: tuple[Family, ...]) -> tuple[Family, ...]:
        families = merge((families, self._before), {})
        path = self._counters(self.place.number)
        partial = path.with_suffix(".new")
        try:
            partial.write_bytes(msgspec.msgpack.encode(counting(families)))
            partial.replace(path)
        except OSError as error:
            logger.warning("cannot write %s: %s; a restart of this process will set its counters back", path, error)
        return families

    def _read(self, index: int) -> tuple[Family, ...]:
        try:
            return msgspec.msgpack.decode(self._counters(index).read_bytes(), type=tuple[Family, ...])
        except FileNotFoundError:
            return ()

    async def _ask(self, index: int) -> Telling:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                reader, writer = await asyncio.open_unix_connection(self._socket(index), limit=1 << 20)
                try:
                    answer = bytearray()
                    while piece := await reader.read(1 << 20):
                        answer += piece
                        if len(answer) > MAX_ANSWER_BYTES:
                            break
                finally:
                    writer.transport.abort()
            return msgspec.msgpack.decode(answer, type=Telling)
        except (OSError, TimeoutError, msgspec.DecodeError):
            return Telling(await asyncio.to_thread(self._read, index))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(ANSWER_SECONDS):
                    writer.write(msgspec.msgpack.encode(await self._own()))
                    await writer.drain()
                    writer.write_eof()
                    await reader.read(1)  # the end of whoever asked
        finally:
            writer.transport.abort()

    def _socket(self, index: int) -> Path:
        return self.place.folder / f"{index}.sock"

    def _counters(self, index: int) -> Path:
        return self.place.folder / f"{index}.counters"
