"""Keeps watch over one address: dials, reads the worker's lines, dials again.

Usually there is one watch connection. During a hand-over there are two: the old engine's stays open, saying
``HANDOVER``, while the new one binds the same port; so whenever no connection says ``ACTIVE``, another one is dialled.
Whoever listens (the registry) is called synchronously, in the loop turn in which the bytes or the EOF came.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import Protocol

import msgspec

from app.address import Address
from app.fleet.liveness import SILENT_WATCH_FACTOR, ReplicaKey, reconnect_delay
from app.fleet.worker_token import WorkerToken
from app.openai.errors import Header
from app.upstream.connection import UpstreamConnection, UpstreamError
from app.upstream.pool import UpstreamPool
from workers.contract import MAX_WATCH_LINE_BYTES, WATCH_PATH, Role, WatchLine, decode_watch_line

logger = logging.getLogger(__name__)


class WatchListener(Protocol):
    """Hears what one address says."""

    def watch_line(self, session: WatchSession, key: ReplicaKey, line: WatchLine) -> bool:
        """A line came. The first one of a session may be refused (``False``): another one watches that replica."""
        ...

    def watch_gone(self, session: WatchSession) -> None:
        """A session that had been accepted ended."""
        ...


class WatchSession:
    """One watch connection, from its request to its end. A sink of ``upstream``."""

    def __init__(
        self, address: Address, connection: UpstreamConnection, listener: WatchListener, token: WorkerToken
    ) -> None:
        self.address = address
        self._token = token
        self.key: ReplicaKey | None = None
        self.line: WatchLine | None = None
        self.line_at = 0.0
        self.problem = ""
        loop = asyncio.get_running_loop()
        self.first_line: asyncio.Future[bool] = loop.create_future()
        """Resolves to whether the session is in use."""
        self.ended: asyncio.Future[None] = loop.create_future()
        self._connection = connection
        self._listener = listener
        self._rest = b""

    def start(self) -> None:
        """Raises:
        UpstreamError: the connection is gone already.
        """
        request = f"GET {WATCH_PATH} HTTP/1.1\r\nhost: {self.address}\r\naccept-encoding: identity\r\n"
        self._connection.send(request.encode("ascii", "replace") + self._token.last_lines, self)

    @property
    def over(self) -> bool:
        return self.ended.done()

    def close(self, problem: str = "") -> None:
        """Drop the connection. Idempotent."""
        if problem and not self.problem:
            self.problem = problem
        self._connection.abort()
        self._end()

    # UpstreamSink

    def head(self, status: int, headers: list[Header]) -> None:
        if status == 401:
            self.close(self._token.refused)
        elif status != 200:
            self.close(f"it answered {status} to {WATCH_PATH}; is it a Hotspare worker?")

    def read(self, data: bytes, done: bool) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for raw in lines:
            if raw.strip() and not self._line(raw):
                return
        if len(self._rest) > MAX_WATCH_LINE_BYTES:
            self.close(f"its watch line is longer than {MAX_WATCH_LINE_BYTES} bytes")
        elif done:
            self._end()

    def lost(self, error: UpstreamError) -> None:
        self._end()

    def _line(self, raw: bytes) -> bool:
        try:
            line = decode_watch_line(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self.close(f"its watch line cannot be read: {error}")
            return False
        key = ReplicaKey(line.worker, line.instance, line.epoch)
        first = self.key is None
        if not first and key != self.key:
            self.close("its watch changed from one promotion to another; that needs a new connection")
            return False
        self.key, self.line, self.line_at = key, line, time.monotonic()
        accepted = self._listener.watch_line(self, key, line)
        if first:
            if not accepted:
                self.key = None
                self.close()
                return False
            self.first_line.set_result(True)
        return True

    def _end(self) -> None:
        if self.ended.done():
            return
        self.ended.set_result(None)
        if not self.first_line.done():
            self.first_line.set_result(False)
        if self.key is not None:
            self._listener.watch_gone(self)


class AddressWatch:
    """The task that keeps one address watched. ``tried`` is done once the address was tried."""

    def __init__(
        self,
        address: Address,
        listener: WatchListener,
        *,
        connect_timeout: float,
        heartbeat_timeout: float,
        token: WorkerToken,
    ) -> None:
        self.address = address
        self._token = token
        self._listener = listener
        self._heartbeat_timeout = heartbeat_timeout
        self._pool = UpstreamPool(address, connect_timeout=connect_timeout, on_break=lambda: None)
        self._sessions: set[WatchSession] = set()
        self._changed = asyncio.Event()
        self._complained = ""
        self._leaving = False
        self.problem = ""
        """What is wrong with the worker that was last heard of there; empty while it is used, or nobody is there."""
        self.tried: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Watch until cancelled."""
        try:
            while True:
                away_since = time.monotonic()
                while not self._watched():
                    await self._dial_guarded()
                    if not self.tried.done():
                        self.tried.set_result(None)
                    if self._watched():
                        break
                    await asyncio.sleep(reconnect_delay(time.monotonic() - away_since, random.random()))  # noqa: S311
                self._changed.clear()
                silence = SILENT_WATCH_FACTOR * self._heartbeat_timeout
                try:
                    async with asyncio.timeout(silence):
                        await self._changed.wait()
                except TimeoutError:
                    self._drop_silent(silence)
        finally:
            self._pool.close()
            for session in list(self._sessions):
                session.close()

    def poke(self) -> None:
        """Something about this address changed: look whether another dial is needed."""
        self._changed.set()

    @property
    def wanted(self) -> bool:
        """Whether the address is still one of a worker."""
        return not self._leaving

    def leave(self) -> None:
        """Dial no more: what is open stays open until it ends, or the task is cancelled."""
        self._leaving = True
        if not self.tried.done():
            self.tried.set_result(None)
        for session in list(self._sessions):
            if session.key is None:
                session.close()
        self.poke()

    def _watched(self) -> bool:
        """Whether no dial is needed."""
        return self._leaving or any(s.line is not None and s.line.state is Role.ACTIVE for s in self._sessions)

    def _drop_silent(self, silence: float) -> None:
        oldest = time.monotonic() - silence
        for session in list(self._sessions):
            if session.line_at < oldest:
                session.close(f"its watch was silent for {silence:g} s")
                self._complain(session.problem)

    async def _dial_guarded(self) -> None:
        try:
            await self._dial()
        except Exception:  # a bug here must not end the watch for good
            logger.exception("watching %s failed", self.address)

    async def _dial(self) -> None:
        try:
            connection = await self._pool.open()
            if self._leaving:
                connection.abort()
                return
            session = WatchSession(self.address, connection, self._listener, self._token)
            session.start()
        except UpstreamError:
            self.problem = ""
            return  # nobody listens there at the moment: normal during a promotion
        session.ended.add_done_callback(lambda _: self._over(session))
        self._sessions.add(session)
        try:
            async with asyncio.timeout(self._heartbeat_timeout):
                used = await session.first_line
        except TimeoutError:
            session.close(f"it said nothing on {WATCH_PATH} within {self._heartbeat_timeout:g} s")
            used = False
        if not used:
            self._complain(session.problem)
        else:
            self._complained = self.problem = ""

    def _over(self, session: WatchSession) -> None:
        self._sessions.discard(session)
        if session.key is not None and session.problem:
            self._complain(session.problem)
        self._changed.set()

    def _complain(self, problem: str) -> None:
        """Say what is wrong with this worker, once until it changes: dials come every few milliseconds."""
        self.problem = problem
        if problem and problem != self._complained:
            self._complained = problem
            logger.warning("worker %s is not usable: %s", self.address, problem)
