"""The engine's side of the memory service: blocking calls over one connection, made from worker threads.

The connection is the lease: when it closes, or when the process dies, the service takes back what this client held.
One lock serialises a connection's calls; `close()` may come from any thread and ends a call that waits.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Final, NoReturn, Self, TypeVar

from gms import fdpass, protocol
from gms.protocol import (
    AllocationInfo,
    ErrorCode,
    FrameDecoder,
    GmsError,
    LeaseInfo,
    LeaseMode,
    PoolStatus,
    Status,
)

__all__ = [
    "Allocation",
    "AllocationInfo",
    "GmsClient",
    "GmsError",
    "Lease",
    "LeaseInfo",
    "LeaseMode",
    "PoolStatus",
    "Status",
]

REPLY_GRACE_SECONDS: Final = 30.0
"""Beyond the wait that a call itself asks for. A service that answers later than this is taken for stuck."""
POPULATE_BYTES_PER_SECOND: Final = 64 * 1024 * 1024
"""The slowest machine on which an allocation is waited for: the service fills pages before it hands them out."""
RETRY_SECONDS: Final = 0.01
RECEIVE_BYTES: Final = 65536

_R = TypeVar("_R", bound=protocol.Message)


class Allocation:
    """Pages of the service: `size_bytes` of them behind `fd`, which this object owns. `size_bytes` is what was asked
    for, rounded up to whole pages; `created` says that they are new, and zero."""

    def __init__(self, tag: str, size_bytes: int, fd: int, created: bool) -> None:
        self.tag = tag
        self.size_bytes = size_bytes
        self.created = created
        self._fd = fd

    @property
    def fd(self) -> int:
        if self._fd < 0:
            raise GmsError(
                ErrorCode.CLOSED, f"The descriptor of {self.tag!r} was closed by its owner; export it again."
            )
        return self._fd

    def close(self) -> None:
        """Closes the descriptor; mappings made from it stay."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Lease:
    """The right to read (RO) or write (RW) one pool. Made by `GmsClient.attach`."""

    def __init__(self, client: GmsClient, pool: str, granted: protocol.Granted) -> None:
        self.pool = pool
        self.mode = granted.mode
        self.generation = granted.generation
        self.fresh = granted.fresh
        self.manifest = granted.manifest
        self.allocations = tuple(granted.allocations)
        self._client = client

    def allocate(self, tag: str, size_bytes: int) -> Allocation:
        """Pages under `tag`, zeroed; in the kv pools the existing ones of the same tag and size, with their content.

        Raises GmsError: out_of_memory (names who holds what), size_mismatch, not_permitted on a read lease, fenced if
        a newer epoch took over, too_many.
        """
        wait = size_bytes / POPULATE_BYTES_PER_SECOND
        request = protocol.Allocate(pool=self.pool, tag=tag, size_bytes=size_bytes)
        pages, allocation = self._client._pages(request, wait)
        if pages.created:
            self.allocations += (AllocationInfo(pages.tag, pages.size_bytes),)
        return allocation

    def export(self, tag: str) -> Allocation:
        """The pages under `tag`: read-only on a read lease, writable for a writer. Raises GmsError(not_found)."""
        return self._client._pages(protocol.Export(pool=self.pool, tag=tag))[1]

    def commit(self, manifest: bytes) -> None:
        """Publishes what was written, with `manifest`, to readers; this lease is then a read lease.

        All writable mappings must be gone: GmsError(still_mapped) says so, keeps the lease and can be tried again.
        """
        granted = self._client._call(protocol.Commit(pool=self.pool, manifest=manifest), protocol.Granted)
        self.mode, self.fresh = granted.mode, granted.fresh
        self.generation, self.manifest = granted.generation, manifest

    def release(self, *, quiesced: bool = False) -> None:
        """Gives the lease back. With `quiesced` the caller vouches that no process of it has the pages mapped any more,
        and the next holder need not wait for this process to die."""
        self._client._call(protocol.Release(pool=self.pool, quiesced=quiesced), protocol.Done)


class GmsClient:
    """One connection to a memory service. See `connect`."""

    def __init__(self, connection: socket.socket, path: str) -> None:
        self._socket = connection
        self._path = path
        self._decoder = FrameDecoder()
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._closing = False
        self._broken = False

    @classmethod
    def connect(
        cls,
        socket_path: str | os.PathLike[str],
        *,
        engine: str,
        instance: str,
        device: str = "cpu:0",
        client: str = "engine",
        timeout_seconds: float = 10.0,
    ) -> GmsClient:
        """Connects and says hello with this process's own pidfd, by which the service learns of its death.

        A socket that is missing or refuses is tried again until `timeout_seconds`: the service may be restarting.
        Raises GmsError: service_gone (retryable), version_mismatch, wrong_device, too_many.
        """
        path = os.fspath(socket_path)
        self = cls(_dial(path, time.monotonic() + timeout_seconds), path)
        try:
            pidfd = os.pidfd_open(os.getpid())
            try:
                hello = protocol.Hello(
                    version=protocol.VERSION,
                    client=client,
                    engine=engine,
                    instance=instance,
                    device=device,
                    fds=1,
                )
                self._call(hello, protocol.Welcome, wait_seconds=timeout_seconds, grace_seconds=0.0, fds=[pidfd])
            finally:
                os.close(pidfd)
        except BaseException:
            self.close()
            raise
        return self

    def attach(self, pool: str, mode: LeaseMode, *, epoch: int = 0, timeout_seconds: float = 60.0) -> Lease:
        """Waits up to `timeout_seconds` for a lease on `pool`.

        `weights/<layout key>`: RW for one writer, RO once something is committed, RW_OR_RO for whichever comes first.
        `kv`, `kv_index`: RW only, by `epoch`; if the old holder's end is not proved in time, the lease comes with
        fresh pages (`lease.fresh`). Raises GmsError: timeout (retryable), stale_epoch, already_attached.
        """
        request = protocol.Attach(pool=pool, mode=mode, epoch=epoch, timeout_seconds=timeout_seconds)
        return Lease(self, pool, self._call(request, protocol.Granted, wait_seconds=timeout_seconds))

    def status(self, *, timeout_seconds: float = REPLY_GRACE_SECONDS) -> Status:
        """Pools, leases and bytes as they are now. Raises GmsError: no answer within `timeout_seconds`."""
        request = protocol.GetStatus()
        return self._call(request, protocol.StatusReply, grace_seconds=timeout_seconds).status

    def fileno(self) -> int:
        """The connection, to watch for EOF: the service is gone then. Read nothing from it."""
        return self._socket.fileno()

    def close(self) -> None:
        """Ends the connection, and with it every lease; a call that waits in another thread ends with `closed`."""
        self._closing = True
        if self._owner == os.getpid():  # in a forked child a shutdown would end the parent's connection
            with suppress(OSError):  # never connected, or gone already
                self._socket.shutdown(socket.SHUT_RDWR)
            with self._lock:
                self._socket.close()
        else:
            self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _pages(
        self, request: protocol.Allocate | protocol.Export, wait: float = 0.0
    ) -> tuple[protocol.Pages, Allocation]:
        fds: list[int] = []
        pages = self._call(request, protocol.Pages, wait_seconds=wait, received=fds)
        return pages, Allocation(pages.tag, pages.size_bytes, fds[0], pages.created)

    def _call(
        self,
        request: protocol.Request,
        reply_type: type[_R],
        *,
        wait_seconds: float = 0.0,
        grace_seconds: float = REPLY_GRACE_SECONDS,
        fds: list[int] | None = None,
        received: list[int] | None = None,
    ) -> _R:
        """One request, one reply. Failing in between leaves the stream in an unknown place: the connection is over."""
        frame = protocol.encode(request)
        got: list[int] = []
        with self._lock:
            self._usable()
            deadline = time.monotonic() + wait_seconds + grace_seconds
            try:
                self._send(frame, fds or [], deadline)
                reply = protocol.decode_reply(self._receive(got, deadline))
                expected = 1 if isinstance(reply, protocol.Pages) else 0
                if len(got) != reply.fds or reply.fds != expected:
                    raise GmsError(
                        ErrorCode.BAD_FDS,
                        f"The memory service announced {reply.fds} descriptors and sent {len(got)}, due were "
                        f"{expected}; this process may be out of file descriptors.",
                    )
            except BaseException as error:
                self._broken = True
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
        if received is not None:
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

    def _send(self, frame: bytes, fds: list[int], deadline: float) -> None:
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
                f"The memory service at {self._path} did not answer in time and is taken for stuck; restart it.",
                retryable=True,
            ) from error
        raise GmsError(
            ErrorCode.SERVICE_GONE,
            f"The memory service at {self._path} closed the connection ({error.strerror or error}): it died or refused "
            "this client; connect and attach anew.",
            retryable=True,
        ) from error


def _dial(path: str, deadline: float) -> socket.socket:
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
            if time.monotonic() + RETRY_SECONDS > deadline:
                raise GmsError(
                    ErrorCode.SERVICE_GONE,
                    f"No memory service answers at {path} ({error.strerror or error}); start it, or check the path.",
                    retryable=True,
                ) from error
            time.sleep(RETRY_SECONDS)
