"""One client's socket on the event loop: frames and descriptors in, frames and descriptors out, everything bounded.

The socket is read even while a request is under way, because the end of the stream must be noticed then: a killed
engine that waits for a pool leaves its place in the queue at once.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from gms import fdpass
from gms.protocol import HEADER_BYTES, MAX_FDS, MAX_FIRST_FRAME, MAX_FRAME, ErrorCode, FrameDecoder, GmsError

RECEIVE_BYTES: Final = 65536
SEND_SECONDS: Final = 10.0
"""How long a reply may wait for its reader."""
FRAME_SECONDS: Final = 10.0
"""How long a frame may take from its first byte to its last."""
MAX_UNREAD: Final = 32 * 1024 * 1024
"""Bytes of frames not taken yet, of all clients together. Most frames are of some hundred bytes."""
FREE_BYTES: Final = 64 * 1024
"""What each may hold whatever the others do."""


class Unread:
    """What all channels of a service hold together, in bytes."""

    def __init__(self, limit: int = MAX_UNREAD) -> None:
        self.limit = limit
        self.total = 0


class Channel:
    """`on_lost` is called once, from the loop, when the peer is gone or broke the protocol while a request ran."""

    def __init__(
        self,
        connection: socket.socket,
        on_lost: Callable[[], object],
        *,
        unread: Unread | None = None,
        send_seconds: float = SEND_SECONDS,
        frame_seconds: float = FRAME_SECONDS,
    ) -> None:
        connection.setblocking(False)
        self._send_seconds = send_seconds
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self._on_lost = on_lost
        self._decoder = FrameDecoder(MAX_FIRST_FRAME)
        self._unread = Unread() if unread is None else unread
        self._counted = 0
        self._frame_seconds = frame_seconds
        self._frame_timer: asyncio.TimerHandle | None = None
        self._fds: list[int] = []
        self._error: GmsError | None = None
        self._reader: asyncio.Future[None] | None = None
        self._closed = False
        self._loop.add_reader(connection, self._readable)

    def accept_full_frames(self) -> None:
        """After the hello: until then a stranger may make the service hold no more than a small frame."""
        self._decoder.max_frame = MAX_FRAME

    async def receive(self) -> tuple[bytes, list[int]]:
        """The next frame, and the descriptors that came so far; they are the caller's then. Raises GmsError for a
        stream that cannot be read on."""
        while (frame := self._decoder.next_frame()) is None:
            if self._error is not None:
                raise self._error
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        self._count()
        fds, self._fds = self._fds, []
        return frame, fds

    async def send(self, frame: bytes, fds: list[int]) -> None:
        """Raises OSError if the peer is gone, TimeoutError (an OSError) if it does not read within `send_seconds`."""
        rest, rights = memoryview(frame), fdpass.rights(fds)
        async with asyncio.timeout(self._send_seconds):
            while rest:
                try:
                    rest = rest[self._socket.sendmsg([rest], rights) :]
                    rights = []
                except BlockingIOError:
                    await self._writable()

    def send_now(self, frame: bytes) -> None:
        """A last word before closing, if there is room for it."""
        with suppress(OSError):
            self._socket.sendmsg([frame])

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._forget()
            if self._frame_timer is not None:
                self._frame_timer.cancel()
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            fdpass.close_all(self._fds)
            self._socket.close()

    async def _writable(self) -> None:
        ready: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_writer(self._socket, _resolve, ready)
        try:
            await ready
        finally:
            if not self._closed:
                self._loop.remove_writer(self._socket)

    def _readable(self) -> None:
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(
                RECEIVE_BYTES, fdpass.ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._end(None)
            return
        came = fdpass.received(ancillary)
        self._fds += came
        if not data:
            self._end(None)
        elif flags & socket.MSG_CTRUNC and len(came) < MAX_FDS:
            message = "This service can hold no more descriptors for now; try again on a new connection."
            self._end(GmsError(ErrorCode.BUSY, message, retryable=True))
        elif flags & socket.MSG_CTRUNC or len(self._fds) > MAX_FDS:
            message = f"More than {MAX_FDS} descriptors came in one message; send fewer."
            self._end(GmsError(ErrorCode.BAD_FDS, message))
        else:
            self._decoder.feed(data)
            self._count()
            if self._unread.total > self._unread.limit and self._counted > FREE_BYTES:
                message = "All clients together send more than this service holds; try again on a new connection."
                self._end(GmsError(ErrorCode.BUSY, message, retryable=True))
            elif self._reader is None and self._counted > FREE_BYTES:
                message = "A large frame was sent ahead; wait for each reply."
                self._end(GmsError(ErrorCode.BAD_MESSAGE, message))
            elif self._decoder.buffered > HEADER_BYTES + self._decoder.max_frame:
                message = "More than one frame was sent ahead; wait for each reply."
                self._end(GmsError(ErrorCode.BAD_MESSAGE, message))
            elif self._reader is not None:
                _resolve(self._reader)

    def _forget(self) -> None:
        """What is held goes at once: a closed channel may live on for a while, in the traceback of its session."""
        self._decoder = FrameDecoder(0)
        self._unread.total -= self._counted
        self._counted = 0

    def _count(self) -> None:
        """After each change of what is held; a frame's time begins with its first byte."""
        held = self._decoder.buffered
        self._unread.total += held - self._counted
        self._counted = held
        if not held and self._frame_timer is not None:
            self._frame_timer.cancel()
            self._frame_timer = None
        elif held and self._frame_timer is None:
            self._frame_timer = self._loop.call_later(self._frame_seconds, self._late)

    def _late(self) -> None:
        self._frame_timer = None
        if self._decoder.complete:  # it is we who have not taken it
            self._count()
        else:
            message = f"A frame took more than {self._frame_seconds:g} s to arrive; the client hangs, or is broken."
            self._end(GmsError(ErrorCode.BAD_MESSAGE, message))

    def _end(self, error: GmsError | None) -> None:
        """No more is read. A broken protocol is answered if the session is listening; otherwise it just ends."""
        self._loop.remove_reader(self._socket)
        self._forget()
        self._error = error
        if error is not None and self._reader is not None and not self._reader.done():
            _resolve(self._reader)
        else:
            self._on_lost()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
