"""Where log lines leave the process, without ever making it wait.

Whoever reads standard error may be slow, or stopped, and a full pipe would then stop the event loop and every stream
with it. So lines are queued, up to a limit, and written as far as the descriptor takes them; what is over the limit is
dropped and counted. A disk that is full is tried again. Access lines wait a few milliseconds for company, so that many
cost one system call; all other lines take the queue with them at once, so that the last words before a crash are there.

Standard error may be shared with other processes, so its own flags stay as they are: a pipe or a terminal is opened a
second time for writing without blocking. Where that cannot be (a socket; a pipe of another user) it is asked for room
first, and given no more than that leaves for certain.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import select
import stat
import threading
import time
from collections import deque
from typing import Final

logger = logging.getLogger(__name__)

LIMIT_BYTES: Final = 1024 * 1024
COMPANY_SECONDS: Final = 0.01
RETRY_SECONDS: Final = 0.05
LONGEST_RETRY_SECONDS: Final = 2.0
"""Errors that may pass, a full disk above all, are tried again less and less often."""
LAST_LINES_SECONDS: Final = 1.0
"""How long the end of the process waits for a reader of what is still queued."""
_FILE_BYTES: Final = 64 * 1024
_READER_GONE: Final = frozenset((errno.EPIPE, errno.EBADF, errno.ECONNRESET, errno.ENOTCONN))


class LogSink:
    """Lines in, bytes out on ``descriptor``. Threads may write; the timers run on the loop of who writes from one."""

    def __init__(self, descriptor: int = 2, *, limit_bytes: int = LIMIT_BYTES) -> None:
        self._lock = threading.Lock()
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        self._limit = limit_bytes
        self._timer_loop: asyncio.AbstractEventLoop | None = None
        """Whose timer will flush, while one is set."""
        self._gone = False
        self._pause = 0.0
        """How long nothing is written after an error; 0 while all is well."""
        self._pause_ends = 0.0
        self.dropped = 0
        """Lines that nobody will read."""
        self._told = 0
        self._descriptor, self._owned, self._asks = _open(descriptor)
        self._piece = _FILE_BYTES if stat.S_ISREG(os.fstat(descriptor).st_mode) else select.PIPE_BUF

    def access(self, line: bytes) -> None:
        """A line that may wait for others. It ends in a line feed, as all lines do."""
        if self._bytes + len(line) > self._limit or self._gone:
            self.dropped += 1
            return
        with self._lock:
            self._lines.append(line)
            self._bytes += len(line)
        if self._timer_loop is None:
            self._flush_later(COMPANY_SECONDS)

    def write(self, line: bytes) -> None:
        """A line that goes out at once, after all that came before it."""
        if self._bytes + len(line) > self._limit or self._gone:
            self.dropped += 1
            return
        with self._lock:
            self._lines.append(line)
            self._bytes += len(line)
        if not self._flush():
            self._flush_later(self._pause or RETRY_SECONDS)

    def close(self, patience: float = LAST_LINES_SECONDS) -> None:
        """Write what is left, waiting a little for a reader. Later lines are still taken. Idempotent."""
        deadline = time.monotonic() + patience
        while not self._flush():
            left = deadline - time.monotonic()
            if left <= 0:
                return
            if self._pause:  # such a descriptor says that it has room
                time.sleep(min(left, self._pause))
                continue
            poller = select.poll()
            poller.register(self._descriptor, select.POLLOUT)
            poller.poll(left * 1000)

    def release(self) -> None:
        """Close the descriptor, if it is our own."""
        self.close(0)
        self._gone = True
        if self._owned:
            os.close(self._descriptor)
            self._owned = False

    def _flush_later(self, seconds: float) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # before the loop, after it, or a thread: nobody would come back to it
            self._flush()
            return
        if self._timer_loop is not loop:
            self._timer_loop = loop
            loop.call_later(seconds, self._due)

    def _due(self) -> None:
        self._timer_loop = None
        if not self._flush():
            self._flush_later(self._pause or RETRY_SECONDS)
        elif self.dropped > self._told:
            told, self._told = self._told, self.dropped
            logger.warning("nobody took log lines for a while: %d were dropped", self._told - told)

    def _flush(self) -> bool:
        """Write what can be written; returns whether nothing is left."""
        with self._lock:
            if self._pause and time.monotonic() < self._pause_ends:
                return not self._lines
            while self._lines:
                piece = self._take()
                allowed = min(len(piece), self._piece)
                try:
                    written = os.write(self._descriptor, piece[:allowed]) if self._has_room() else 0
                    self._pause = 0.0
                except (BlockingIOError, InterruptedError):
                    written = 0
                except OSError as error:
                    if error.errno in _READER_GONE:
                        self._gone = True
                        self.dropped += sum(left.count(b"\n") for left in (piece, *self._lines))
                        self._lines.clear()
                        self._bytes = 0
                        return True
                    written = 0
                    self._pause = min(2 * self._pause or RETRY_SECONDS, LONGEST_RETRY_SECONDS)
                    self._pause_ends = time.monotonic() + self._pause
                self._bytes -= written
                if written < len(piece):
                    self._lines.appendleft(piece[written:])
                if written < allowed:
                    return False
            return True

    def _take(self) -> bytes:
        """The next lines, as many as may be written at once; a pipe takes those whole or not at all."""
        lines = self._lines
        taken = [lines.popleft()]
        size = len(taken[0])
        while lines and size + len(lines[0]) <= self._piece:
            size += len(lines[0])
            taken.append(lines.popleft())
        return taken[0] if len(taken) == 1 else b"".join(taken)

    def _has_room(self) -> bool:
        if not self._asks:
            return True
        poller = select.poll()
        poller.register(self._descriptor, select.POLLOUT)
        return bool(poller.poll(0))


def _open(descriptor: int) -> tuple[int, bool, bool]:
    """The descriptor to write to, whether it is our own, and whether to ask for room before each write."""
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        return descriptor, False, False
    if stat.S_ISFIFO(kind) or stat.S_ISCHR(kind):
        try:
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
            return os.open(f"/proc/self/fd/{descriptor}", flags), True, False
        except OSError:  # a pipe that another user made
            pass
    return descriptor, False, True
