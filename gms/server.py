"""The socket side of the memory service: who may connect, who is alive, and one session per connection.

A connection ends when its client closes it, dies, breaks the protocol or does not read; whatever it held goes back to
the arbiter in the same moment. Whether the *process* is gone is told by pidfds (its own and its ranks'), never by the
connection and never by a pid: containers of a pod have separate PID namespaces, and pids are used again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
from dataclasses import dataclass, field
from typing import Any, Final, cast

from gms import fdpass, protocol
from gms.channel import SEND_SECONDS, Channel, Unread
from gms.clients import Client
from gms.peers import check_peer, pid_of, prefer_peer_pidfd, processes_of
from gms.protocol import ErrorCode, GmsError
from gms.service import MemoryService

log: Final = logging.getLogger("gms")

HELLO_SECONDS: Final = 5.0
MAX_CLIENTS: Final = 128
"""Connections, and gone clients whose processes still have to end, together."""
ACCEPT_PAUSE_SECONDS: Final = 0.1


@dataclass(slots=True, eq=False)
class Session:
    """One client, from hello until nothing waits for its processes' end any more. `alive` are pidfds."""

    client: Client
    task: asyncio.Task[None]
    alive: set[int] = field(default_factory=set)
    connected: bool = True
    answering: bool = False
    expelled: bool = False


class Server:
    """Serves one MemoryService to the clients of a listening socket, which it owns from `start` on. `start`, then
    `close`; both from the event loop."""

    def __init__(
        self,
        service: MemoryService[Any],
        *,
        hello_seconds: float = HELLO_SECONDS,
        send_seconds: float = SEND_SECONDS,
    ) -> None:
        self._service = service
        self._hello_seconds = hello_seconds
        self._send_seconds = send_seconds
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._sessions: dict[int, Session] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._unread = Unread()
        self._listener: socket.socket | None = None
        service.expel_with(self._expel)

    def start(self, listener: socket.socket) -> None:
        """Listens there, and nowhere else; may be called again, with another one. Sessions go on."""
        self._stop_listening()
        self._listener = listener
        self._loop.add_reader(listener, self._acceptable)

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            self._loop.remove_reader(listener)
            listener.close()

    async def close(self) -> None:
        """Stops listening and ends all sessions. May be called again, and without a start."""
        self._stop_listening()
        for task in list(self._tasks):
            task.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)
        for session in list(self._sessions.values()):
            self._forget(session)

    def _acceptable(self) -> None:
        if (listener := self._listener) is None:
            return
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            log.error("cannot accept a connection (%s); trying again in %g s", error.strerror, ACCEPT_PAUSE_SECONDS)
            self._loop.remove_reader(listener)
            self._loop.call_later(ACCEPT_PAUSE_SECONDS, self._resume_accepting)
            return
        task = self._loop.create_task(self._serve(connection))
        self._tasks.add(task)
        task.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("what a client held may not have been given back: its connection's end failed", exc_info=error)

    def _resume_accepting(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener, self._acceptable)

    async def _serve(self, connection: socket.socket) -> None:
        """A connection's life. Every way out, cancellation included, gives back what the client held."""
        task = cast("asyncio.Task[None]", asyncio.current_task())
        channel = Channel(connection, task.cancel, unread=self._unread, send_seconds=self._send_seconds)
        session: Session | None = None
        try:
            async with asyncio.timeout(self._hello_seconds):
                session = await self._greet(channel, connection, task)
            while not session.expelled:
                await self._answer(channel, session)
        except GmsError as error:
            log.warning("a connection is ended: %s", error)
            channel.send_now(_failure(error))
        except TimeoutError:
            log.warning("a connection is ended: its client was silent, or did not read its reply")
        except OSError as error:
            log.debug("a connection is gone: %s", error)
        except Exception:
            log.exception("a connection is ended by a mistake of this service")
            channel.send_now(_failure(GmsError(ErrorCode.INTERNAL, "The memory service made a mistake; see its log.")))
        finally:
            channel.close()
            if session is not None:
                session.connected = False
                self._left(session)

    async def _greet(self, channel: Channel, connection: socket.socket, task: asyncio.Task[None]) -> Session:
        check_peer(connection)
        self._sweep()
        if len(self._tasks) + sum(not s.connected for s in self._sessions.values()) > MAX_CLIENTS:
            raise GmsError(
                ErrorCode.TOO_MANY,
                f"{MAX_CLIENTS} clients are connected; close some and try again.",
                retryable=True,
            )
        frame, fds = await channel.receive()
        try:
            hello = protocol.decode_request(frame)
            if not isinstance(hello, protocol.Hello):
                raise GmsError(ErrorCode.BAD_MESSAGE, "The first message must be a hello; this client is broken.")
            self._check_hello(hello, fds)
            pids = [pid_of(fd) for fd in fds]
            prefer_peer_pidfd(connection, fds)
            pid = pids[0] if pids[0] > 0 else None
            processes = processes_of(fds, pids)
            client = Client(next(self._ids), hello.client, hello.engine, hello.instance, pid, processes, len(fds))
            session = Session(client, task, set(fds))
            fds.clear()
        finally:
            fdpass.close_all(fds)
        for fd in session.alive:
            self._loop.add_reader(fd, self._exited, session, fd)
        self._sessions[client.id] = session
        self._service.join(client)
        try:
            await channel.send(
                protocol.encode(protocol.Welcome(version=protocol.VERSION, device=self._service.device)), []
            )
        except BaseException:
            session.connected = False
            self._left(session)
            raise
        channel.accept_full_frames()
        return session

    def _check_hello(self, hello: protocol.Hello, fds: list[int]) -> None:
        if hello.version != protocol.VERSION:
            raise GmsError(
                ErrorCode.VERSION_MISMATCH,
                f"The client speaks version {hello.version}, the service {protocol.VERSION}; use one release for both.",
            )
        if hello.device_id != self._service.device_id:
            raise GmsError(
                ErrorCode.WRONG_DEVICE,
                f"The client wants {hello.device} ({hello.device_id}), this service has {self._service.device} "
                f"({self._service.device_id}); use that device's socket.",
            )
        if hello.fds < 1 or len(fds) != hello.fds:
            raise GmsError(
                ErrorCode.BAD_FDS,
                f"A hello announced {hello.fds} pidfds and {len(fds)} came; at least the client's own is due.",
            )

    async def _answer(self, channel: Channel, session: Session) -> None:
        """One request, one reply. What the service refuses is a reply; what breaks the protocol is raised."""
        client = session.client
        frame, received = await channel.receive()
        session.answering = True
        fds: list[int] = []
        try:
            try:
                reply = protocol.encode(await self._handle(client, protocol.decode_request(frame), received, fds))
            except GmsError as error:
                if error.code in (ErrorCode.BAD_MESSAGE, ErrorCode.BAD_FDS):
                    raise
                log.info("%s: %s", client.label, error)
                reply = _failure(error)
            except OSError as error:
                log.exception("a request of %s failed", client.label)
                reply = _failure(GmsError(ErrorCode.INTERNAL, f"The memory service failed: {error}; see its log."))
            await channel.send(reply, fds)
        finally:
            session.answering = False
            fdpass.close_all(received)
            fdpass.close_all(fds)

    async def _handle(
        self, client: Client, request: protocol.Request, received: list[int], fds: list[int]
    ) -> protocol.Reply:
        """`fds` is filled with what goes out beside the reply."""
        due = len(received) if isinstance(request, protocol.Adopt) else 0
        if request.fds != len(received) or len(received) != due:
            raise GmsError(
                ErrorCode.BAD_FDS,
                f"{request.fds} descriptors were announced, {len(received)} came, {due} are due: the client is broken.",
            )
        outgoing: list[int] = []
        reply: protocol.Reply
        match request:
            case protocol.Attach():
                reply, outgoing = await self._service.attach(client, request)
            case protocol.Allocate():
                reply, outgoing = await self._service.allocate(client, request)
            case protocol.Export():
                reply, outgoing = self._service.export(client, request)
            case protocol.PutManifest():
                reply = self._service.put_manifest(client, request)
            case protocol.GetManifest():
                reply = self._service.get_manifest(request)
            case protocol.Commit():
                reply = await self._service.commit(client, request)
            case protocol.Release():
                reply = self._service.release(client, request)
            case protocol.Adopt():
                reply, outgoing = await self._service.adopt(client, request, received)
            case protocol.Verify():
                reply = await self._service.verify(client, request)
            case protocol.GetStatus():
                reply = protocol.StatusReply(status=self._service.status())
            case protocol.GetEvents():
                reply = await self._service.get_events(request)
            case protocol.Hello():
                raise GmsError(ErrorCode.BAD_MESSAGE, "A second hello came on one connection; this client is broken.")
        fds += outgoing
        return reply

    def _exited(self, session: Session, pidfd: int) -> None:
        """One of the client's processes is gone, and with it its mappings."""
        self._loop.remove_reader(pidfd)
        session.alive.discard(pidfd)
        os.close(pidfd)
        if not session.alive:
            if session.connected:
                session.task.cancel()  # a forked child may still hold the connection; the lease dies all the same
            else:
                self._left(session)

    def _expel(self, client: int) -> None:
        """Ends a client's connection, after the reply that it waits for if there is one."""
        session = self._sessions.get(client)
        if session is not None and session.connected:
            session.expelled = True
            if not session.answering:
                session.task.cancel()

    def _left(self, session: Session) -> None:
        wanted = self._service.leave(session.client.id, proof=not session.alive)
        log.debug("%s %s", session.client.label, "is disconnected, its end is awaited" if wanted else "is gone")
        if not wanted:
            self._forget(session)

    def _sweep(self) -> None:
        """Nothing waits for the end of a process any more that has come back on another connection."""
        for session in [session for session in self._sessions.values() if not session.connected]:
            self._left(session)

    def _forget(self, session: Session) -> None:
        for pidfd in session.alive:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
        session.alive.clear()
        self._sessions.pop(session.client.id, None)


def _failure(error: GmsError) -> bytes:
    return protocol.encode(protocol.Failure(code=error.code, message=str(error), retryable=error.retryable))
