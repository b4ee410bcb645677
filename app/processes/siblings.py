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
from typing import Final, NamedTuple, Self

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
    """The metrics of one process. ``answered``: it told them itself, just now."""

    families: tuple[Family, ...]
    answered: bool = True


_METRICS: Final = b"m"
_STATUS: Final = b"s"
"""What is asked for: one byte."""


class Siblings:
    """Use as ``async with``. ``look`` brings this process's metrics up to date, ``families`` returns them (in a thread:
    with many series that takes longer than a loop turn should), ``status`` its status document, as JSON."""

    def __init__(
        self,
        place: Place,
        *,
        look: Callable[[], None],
        families: Callable[[], tuple[Family, ...]],
        status: Callable[[], bytes],
    ) -> None:
        self.place = place
        self._look = look
        self._families = families
        self._status = status
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

    async def metrics(self) -> dict[int, Telling]:
        """What each process counted, this one too. Of one that does not answer in time: what it told last."""
        own, told = await asyncio.gather(self._own(), self._ask_others(_METRICS))
        found = {self.place.number: own}
        for index, answer in told.items():
            try:
                found[index] = msgspec.msgpack.decode(answer, type=Telling)
            except msgspec.DecodeError:
                found[index] = Telling(await asyncio.to_thread(self._read, index), answered=False)
        return dict(sorted(found.items()))

    async def statuses(self) -> dict[int, bytes]:
        """The status document of each process that answers, this one too."""
        told = await self._ask_others(_STATUS)
        return dict(
            sorted({self.place.number: self._status(), **{i: said for i, said in told.items() if said}}.items())
        )

    async def _ask_others(self, what: bytes) -> dict[int, bytes]:
        others = [index for index in range(self.place.processes) if index != self.place.number]
        return dict(zip(others, await asyncio.gather(*(self._ask(index, what) for index in others)), strict=True))

    async def _own(self) -> Telling:
        async with self._lock:  # the file must not lag behind what was told
            self._look()
            return Telling(await asyncio.to_thread(self._keep))

    def _keep(self) -> tuple[Family, ...]:
        families = merge((self._families(), self._before), {})
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

    async def _ask(self, index: int, what: bytes) -> bytes:
        """The whole answer; nothing of one that does not give it in time."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                reader, writer = await asyncio.open_unix_connection(self._socket(index), limit=1 << 20)
                try:
                    writer.write(what)
                    answer = bytearray()
                    while piece := await reader.read(1 << 20):
                        answer += piece
                        if len(answer) > MAX_ANSWER_BYTES:
                            return b""
                finally:
                    writer.transport.abort()
            return bytes(answer)
        except (OSError, TimeoutError):
            return b""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
                async with asyncio.timeout(ANSWER_SECONDS):
                    what = await reader.readexactly(1)
                    writer.write(self._status() if what == _STATUS else msgspec.msgpack.encode(await self._own()))
                    await writer.drain()
                    writer.write_eof()
                    await reader.read(1)  # the end of whoever asked
        finally:
            writer.transport.abort()

    def _socket(self, index: int) -> Path:
        return self.place.folder / f"{index}.sock"

    def _counters(self, index: int) -> Path:
        return self.place.folder / f"{index}.counters"
