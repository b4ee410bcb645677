"""One connection to the memory service: a request, its reply and their descriptors over a blocking socket.

Nothing here knows what the messages mean. One lock serialises calls; `close()` may come from any thread and ends a call
that waits. A call that fails in between leaves the stream in an unknown place: the connection is over then, and is shut
down at once, so that both ends know.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NoReturn, TypeVar

from gms import fdpass, protocol
from gms.protocol import ErrorCode, FrameDecoder, GmsError

REPLY_GRACE_SECONDS: Final = 30.0
"""Beyond the wait that a call itself asks for. A service that answers later than this is taken for stuck."""
MOST_SECONDS: Final = 14 * 86400.0
"""A longer timeout does not fit into a socket's."""
RETRY_SECONDS: Final = 0.01
RECEIVE_BYTES: Final = 65536

_R = TypeVar("_R", bound=protocol.Message)


class Connection:
    """Owns its socket. It belongs to the process that made it: a forked child may only close its copy."""

    def __init__(self, connection: socket.socket, path: str) -> None:
        self.path = path
        self._socket = connection
        self._decoder = FrameDecoder()
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._closing = False
        self._broken = False

    @classmethod
    def dial(cls, path: str, *, retry_seconds: float, timeout_seconds: float) -> Connection:
        """A socket that is missing or refuses is tried again for `retry_seconds`: the service may be restarting. The
        whole takes at most `timeout_seconds`.

        Raises GmsError(service_gone), retryable unless the path cannot be one.
        """
        now = time.monotonic()
        return cls(_dial(path, now + min(retry_seconds, timeout_seconds), now + timeout_seconds), path)

    def fileno(self) -> int:
        """-1 once closed."""
        return self._socket.fileno()

    def close(self) -> None:
        """A call that waits in another thread ends with `closed`. Twice is fine."""
        self._closing = True
        if self._owner == os.getpid():  # in a forked child a shutdown would end the parent's connection
            self._shut_down()
            with self._lock:
                self._socket.close()
        else:
            self._socket.close()

    def call(
        self,
        request: protocol.Request,
        reply_type: type[_R],
        *,
        wait_seconds: float = 0.0,
        grace_seconds: float = REPLY_GRACE_SECONDS,
        fds: Sequence[int] = (),
        received: list[int] | None = None,
    ) -> _R:
        """Sends `request` with `fds`, which stay the caller's, and returns the reply; the descriptors beside it are
        added to `received` and are the caller's then.

        Raises GmsError: what the service refused; service_gone, closed, bad_fds or bad_message end the connection.
        """
        frame = protocol.encode(request)
        got: list[int] = []
        with self._lock:
            self._usable()
            deadline = time.monotonic() + min(wait_seconds + grace_seconds, MOST_SECONDS)
            try:
                self._send(frame, fds, deadline)
                reply = protocol.decode_reply(self._receive(got, deadline))
                if len(got) != reply.fds or len(got) > _most_fds(reply):
                    raise GmsError(
                        ErrorCode.BAD_FDS,
                        f"The memory service announced {reply.fds} descriptors with {type(reply).__name__} and sent "
                        f"{len(got)}; this process may be out of file descriptors.",
                    )
            except BaseException as error:
                self._broken = True
                self._shut_down()
                fdpass.close_all(got)
                if isinstance(error, OSError):
                    self._lost(error)
                raise
        if isinstance(reply, protocol.Failure):
            raise GmsError(reply.code, reply.message, retryable=reply.retryable)
        if not isinstance(reply, reply_type):
            fdpass.close_all(got)
            raise GmsError(
                ErrorCode.BAD_MESSAGE,
                f"The memory service answered {type(reply).__name__} to {type(request).__name__}.",
            )
        if received is None:
            fdpass.close_all(got)
        else:
            received += got
        return reply

    def _usable(self) -> None:
        if self._owner != os.getpid():
            raise GmsError(
                ErrorCode.NOT_PERMITTED,
                f"This connection belongs to process {self._owner}; this one, {os.getpid()}, must make its own.",
            )
        if self._closing:
            raise GmsError(ErrorCode.CLOSED, "This connection was closed by its owner; connect anew.")
        if self._broken:
            raise GmsError(
                ErrorCode.SERVICE_GONE,
                "An earlier call broke this connection; connect and attach anew.",
                retryable=True,
            )

    def _shut_down(self) -> None:
        with suppress(OSError):  # never connected, or gone already
            self._socket.shutdown(socket.SHUT_RDWR)

    def _send(self, frame: bytes, fds: Sequence[int], deadline: float) -> None:
        self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            sent = self._socket.sendmsg([frame], fdpass.rights(fds))
            self._socket.sendall(memoryview(frame)[sent:])
        except (BrokenPipeError, ConnectionResetError):
            pass  # it hung up; what it said before that, if anything, is still to be read

    def _receive(self, got: list[int], deadline: float) -> bytes:
        while (frame := self._decoder.next_frame()) is None:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            data, ancillary, flags, _ = self._socket.recvmsg(
                RECEIVE_BYTES, fdpass.ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
            got += fdpass.received(ancillary)
            if flags & socket.MSG_CTRUNC:
                raise GmsError(
                    ErrorCode.BAD_FDS,
                    "Descriptors of the memory service were cut off; this process has too many files open.",
                )
            if not data:
                raise ConnectionResetError("end of stream")
            self._decoder.feed(data)
        return frame

    def _lost(self, error: OSError) -> NoReturn:
        if self._closing:
            raise GmsError(ErrorCode.CLOSED, "This connection was closed by its owner during the call.") from error
        if isinstance(error, TimeoutError):
            raise GmsError(
                ErrorCode.SERVICE_GONE,
                f"The memory service at {self.path} did not answer in time and is taken for stuck; restart it.",
                retryable=True,
            ) from error
        raise GmsError(
            ErrorCode.SERVICE_GONE,
            f"The memory service at {self.path} closed the connection ({error.strerror or error}): it died or refused "
            "this client; connect and attach anew.",
            retryable=True,
        ) from error


def _most_fds(reply: protocol.Message) -> int:
    if isinstance(reply, protocol.Pages):
        return protocol.MAX_FDS
    return 1 if isinstance(reply, protocol.Granted) else 0


def _dial(path: str, retry_until: float, deadline: float) -> socket.socket:
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            connection.connect(path)
            return connection
        except OSError as error:
            connection.close()
            if not isinstance(error, FileNotFoundError | ConnectionRefusedError | BlockingIOError | TimeoutError):
                raise GmsError(
                    ErrorCode.SERVICE_GONE,
                    f"Cannot reach the memory service at {path}: {error.strerror or error}.",
                ) from error
            if time.monotonic() + RETRY_SECONDS > retry_until:
                raise GmsError(
                    ErrorCode.SERVICE_GONE,
                    f"No memory service answers at {path} ({error.strerror or error}); start it, or check the path.",
                    retryable=True,
                ) from error
            time.sleep(RETRY_SECONDS)
