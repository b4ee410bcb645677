"""Further ranks of an engine that is spread over several devices: processes that die with it and are fenced with it.

Rank 0 is the engine's own process: it has the lock, the port and the scheduler, and tells the others what to do, one
request and one reply at a time over a socket of their own. Each rank has one device's share of the weights and of the
KV pages, from that device's memory service.

They are promoted as one, and fenced as one:

- Ranks are forked before anything else is there (threads, sockets, the loop), by the main thread, and the kernel kills
  them when rank 0 dies. A rank that dies is the engine's death: rank 0 watches its pidfd.
- Each has the lock's open file too, so that the lock is free only when none of them lives.
- Each shows the pidfds of all of them to its memory service, which hands pages on only when all are readable.
- A promotion maps the pages of all ranks for one epoch, or of none.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Final, NamedTuple, NoReturn, Protocol

import msgspec

from gms.client import GmsError
from workers.engine import EngineDeadError
from workers.lifeline import die_with_parent
from workers.waits import Waits

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
"""Far above what a step of an engine is told in: of each new request its prompt's tokens."""
ANSWER_SECONDS: Final = 2.0
"""What a rank may take for what costs it nothing."""
STOP_SECONDS: Final = 10.0
"""What a rank may take to give everything back and end, on a busy machine. Nobody waits for its memory then."""
FAULTS: Final = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
"""Whoever dies of one of these may have written anywhere before."""

_LENGTH: Final = struct.Struct("<I")


class RankFaultError(EngineDeadError):
    """A rank died of a memory fault: what is in the KV pages is not to be believed."""


class Members(msgspec.Struct, frozen=True, tag=True):
    """The first message: the pids of all ranks, rank 0's first."""

    pids: tuple[int, ...]


class Attach(msgspec.Struct, frozen=True, tag=True):
    """Attach the weights, and reserve the KV range."""


class Map(msgspec.Struct, frozen=True, tag=True):
    epoch: int


class Unmap(msgspec.Struct, frozen=True, tag=True):
    """Harmless if nothing is mapped."""


class Step(msgspec.Struct, frozen=True, tag=True):
    """This rank's part of a step; what is in it is the engine's own."""

    work: bytes


class Check(msgspec.Struct, frozen=True, tag=True):
    pass


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Give everything back and end."""


class Done(msgspec.Struct, frozen=True, tag=True):
    result: bytes = b""


class Waiting(msgspec.Struct, frozen=True, tag=True):
    """Before the reply: the rank waits for its memory service, or, if not ``begins``, does so no longer."""

    begins: bool


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The memory service said no; the rank is as it was."""

    code: str
    message: str
    retryable: bool


class Broken(msgspec.Struct, frozen=True, tag=True):
    """The rank cannot go on; nothing is known of what it has mapped."""

    message: str


Request = Members | Attach | Map | Unmap | Step | Check | Stop
Reply = Done | Refused | Broken | Waiting

_requests: Final = msgspec.msgpack.Decoder(Request)
_replies: Final = msgspec.msgpack.Decoder(Reply)
_encode: Final = msgspec.msgpack.Encoder().encode


class RankWorker(Protocol):
    """What one further rank does, in its own process; every call may block. GmsError leaves it as it was."""

    @property
    def waits(self) -> Waits | None:
        """Its waits for the memory service, which rank 0 allows for; None as long as it can have none."""

    def attach(self) -> None:
        """See ``Attach``."""

    def map(self, *, epoch: int) -> None:
        """Put this device's KV pages behind the range."""

    def unmap(self) -> None:
        """Take them away and give the lease back quiesced."""

    def step(self, work: bytes) -> bytes:
        """See ``Step``."""

    def check(self) -> None:
        """Raises EngineDeadError: this rank must not go on."""

    def close(self) -> None:
        """Give everything back."""


MakeWorker = Callable[[int, Sequence[int]], RankWorker]
"""From the rank and the pids of all other ranks."""


class _Member(NamedTuple):
    rank: int
    pid: int
    pidfd: int
    link: socket.socket

    def end(self) -> int | None:
        """The signal it died of, 0 if it ended by itself; None: it lives. It is not reaped by this."""
        ended = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return 0 if ended.si_code == os.CLD_EXITED else ended.si_status


class Ranks:
    """Rank 0's end of the others. ``fork`` makes it; calls block, and one runs at a time."""

    def __init__(self, members: Sequence[_Member]) -> None:
        self._members = tuple(members)
        self._asking = threading.Lock()
        self._broken: str | None = None

    @classmethod
    def fork(cls, make: MakeWorker, *, size: int, lock_fd: int, close: Sequence[int]) -> Ranks:
        """Fork ranks 1 to ``size`` - 1 in a process that has one thread. ``lock_fd`` is kept by all of them, ``close``
        by none."""
        if len(os.listdir("/proc/self/task")) != 1:
            raise RuntimeError("ranks are forked before there is a second thread")
        parent = os.getpid()
        members: list[_Member] = []
        kept = os.dup(lock_fd)  # the lock itself closes its own descriptor in every fork
        try:
            for rank in range(1, size):
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                sys.stdout.flush()
                sys.stderr.flush()
                pid = os.fork()
                if not pid:
                    _be_rank(make, rank, theirs, parent, [ours.fileno(), *(m.link.fileno() for m in members), *close])
                theirs.close()
                members.append(_Member(rank, pid, os.pidfd_open(pid), ours))
        finally:
            os.close(kept)
        made = cls(members)
        made.ask(Members((parent, *made.pids)), timeout_seconds=ANSWER_SECONDS)
        return made

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(member.pid for member in self._members)

    @property
    def pidfds(self) -> tuple[int, ...]:
        """Readable once the rank is gone."""
        return tuple(member.pidfd for member in self._members)

    @property
    def lost(self) -> str | None:
        """Why the engine is dead: a rank is, or does not answer. None: all live."""
        if self._broken is None:
            gone, _, _ = select.select(self.pidfds, [], [], 0)
            dead = [member for member in self._members if member.pidfd in gone]
            if dead:
                self._broken = _gone(dead[0])
        return self._broken

    def death(self) -> EngineDeadError | None:
        """``lost`` as an error, RankFaultError if a rank died of that; None: all live."""
        if (reason := self.lost) is None:
            return None
        faulty = any(member.end() in FAULTS for member in self._members)
        return RankFaultError(reason) if faulty else EngineDeadError(reason)

    def ask(
        self,
        request: Request,
        *,
        timeout_seconds: float,
        wait_seconds: float = 0.0,
        waits: Waits | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> list[bytes]:
        """Have all ranks do it at the same time, and rank 0 its own part ``meanwhile``; their results. A rank has
        ``timeout_seconds``, and up to ``wait_seconds`` while it says that it waits for its memory service, of which
        ``waits`` is told.

        Raises:
            Exception: what ``meanwhile`` raised; the others may have succeeded. If it is not a GmsError, they may be
                waiting for rank 0 in the middle of something, and are not waited for.
            EngineDeadError: a rank is gone, broken, or did not answer in time; from then on each call raises it.
            GmsError: a rank was refused; others may have succeeded.
        """
        with self._asking:
            if self._broken is not None:
                raise EngineDeadError(self._broken)
            message = _encode(request)
            deadline = time.monotonic() + timeout_seconds
            for member in self._members:
                self._reach(member, partial(_send, member.link, message, deadline))
            try:
                if meanwhile is not None:
                    meanwhile()
            except GmsError:
                for member in self._members:
                    self._receive(member, timeout_seconds, wait_seconds, waits)
                raise
            except Exception as error:
                self._broken = f"rank 0 failed: {type(error).__name__}: {error}"
                raise
            replies = [self._receive(member, timeout_seconds, wait_seconds, waits) for member in self._members]
        for reply in replies:
            if isinstance(reply, Refused):
                raise GmsError(reply.code, reply.message, retryable=reply.retryable)
        return [reply.result for reply in replies if isinstance(reply, Done)]

    def close(self) -> None:
        """End them, in order if they answer soon, and reap. Twice is fine."""
        members, self._members = self._members, ()
        deadline = time.monotonic() + (STOP_SECONDS if self._broken is None else 0.0)
        for member in members:
            try:
                _send(member.link, _encode(Stop()), deadline)
            except OSError as error:
                logger.debug("rank %d cannot be told to stop: %s", member.rank, error)
        for member in members:
            if not select.select([member.pidfd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                logger.warning("rank %d (process %d) did not stop and is killed", member.rank, member.pid)
                signal.pidfd_send_signal(member.pidfd, signal.SIGKILL)
            os.waitpid(member.pid, 0)
            os.close(member.pidfd)
            member.link.close()

    def _receive(self, member: _Member, own_seconds: float, wait_seconds: float, waits: Waits | None) -> Done | Refused:
        """A member's reply. It has ``own_seconds``, and ``wait_seconds`` more while it waits for its service."""
        waiting = False
        while True:
            began = time.monotonic()
            deadline = began + own_seconds + (wait_seconds if waiting else 0.0)
            with waits.waiting() if waiting and waits is not None else nullcontext():
                reply = _replies.decode(self._reach(member, partial(_receive, member.link, deadline)))
            if not isinstance(reply, Waiting):
                break
            took = time.monotonic() - began
            allowed = min(took, wait_seconds) if waiting else 0.0
            own_seconds, wait_seconds, waiting = own_seconds - (took - allowed), wait_seconds - allowed, reply.begins
        if isinstance(reply, Broken):
            self._broken = f"rank {member.rank} (process {member.pid}) cannot go on: {reply.message}"
            raise EngineDeadError(self._broken)
        return reply

    def _reach(self, member: _Member, call: Callable[[], bytes | None]) -> bytes:
        try:
            return call() or b""
        except TimeoutError:
            self._broken = f"rank {member.rank} (process {member.pid}) does not answer"
        except OSError as error:
            select.select([member.pidfd], [], [], ANSWER_SECONDS)  # its end comes after that of its descriptors
            if (death := self.death()) is not None:
                raise death from error
            self._broken = f"rank {member.rank} (process {member.pid}) does not listen: {error.strerror}"
        raise EngineDeadError(self._broken)


def _gone(member: _Member) -> str:
    how = member.end()
    by = f": {signal.Signals(how).name}" if how else ""
    return f"rank {member.rank} (process {member.pid}) is gone{by}"


def _send(link: socket.socket, message: bytes, deadline: float | None) -> None:
    """A message behind its length.

    Raises:
        OSError: the other side is gone, or takes nothing (TimeoutError).
        ValueError: it is longer than any may be.
    """
    if len(message) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message between ranks has {len(message)} bytes, and {MAX_MESSAGE_BYTES} is the most")
    link.settimeout(None if deadline is None else max(0.001, deadline - time.monotonic()))
    link.sendall(_LENGTH.pack(len(message)) + message)


def _receive(link: socket.socket, deadline: float | None) -> bytes:
    """The next message.

    Raises:
        OSError: the other side is gone, or says nothing (TimeoutError).
    """
    (length,) = _LENGTH.unpack(_receive_exactly(link, _LENGTH.size, deadline))
    if length > MAX_MESSAGE_BYTES:
        raise OSError(errno.EMSGSIZE, f"it sent a message of {length} bytes")
    return _receive_exactly(link, length, deadline)


def _receive_exactly(link: socket.socket, length: int, deadline: float | None) -> bytes:
    data = bytearray(length)
    view, have = memoryview(data), 0
    while have < length:
        link.settimeout(None if deadline is None else max(0.001, deadline - time.monotonic()))
        count = link.recv_into(view[have:])
        if not count:
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        have += count
    return bytes(data)


def _be_rank(make: MakeWorker, rank: int, link: socket.socket, parent: int, close: Sequence[int]) -> NoReturn:
    """The forked process, from its first instruction to its last."""
    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # rank 0 is told, and tells
        for fd in close:
            os.close(fd)
        die_with_parent(parent)
        gc.freeze()
        serve_rank(make, rank, link)
        code = 0
    except BaseException:  # the process ends here in any case, and must say why
        traceback.print_exc()
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve_rank(make: MakeWorker, rank: int, link: socket.socket) -> None:
    """Answer requests until told to stop, or rank 0 is gone."""
    worker: RankWorker | None = None
    while True:
        try:
            data = _receive(link, None)
        except ConnectionResetError:
            return
        request = _requests.decode(data)
        if isinstance(request, Members):
            worker = make(rank, [pid for pid in request.pids if pid != os.getpid()])
            _send(link, _encode(Done()), None)
            continue
        if worker is None:
            raise RuntimeError(f"rank {rank} was asked for {request} before it knew the others")
        if isinstance(request, Stop):
            worker.close()
            return
        if (waits := worker.waits) is not None:
            waits.tell = partial(_tell_of_wait, link)
        _send(link, _encode(_answer(worker, request)), None)


def _tell_of_wait(link: socket.socket, begins: bool) -> None:
    _send(link, _encode(Waiting(begins)), None)


def _answer(worker: RankWorker, request: Request) -> Reply:
    result = b""
    try:
        match request:
            case Attach():
                worker.attach()
            case Map(epoch):
                worker.map(epoch=epoch)
            case Unmap():
                worker.unmap()
            case Step(work):
                result = worker.step(work)
            case Check():
                worker.check()
    except GmsError as error:
        return Refused(error.code, str(error), error.retryable)
    except Exception as error:
        if not isinstance(error, EngineDeadError):
            logger.exception("a rank failed")
        return Broken(str(error) or type(error).__name__)
    return Done(result)
