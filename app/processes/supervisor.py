"""``processes`` > 1: one process that listens, and children that serve from its socket.

The supervisor accepts nothing. Connections queue at the one socket, which outlives any child: one that crashes takes
the connections with it that it had accepted, and no other. Children are started as programs of their own, so that a
restart gets nothing of what its predecessor broke. The kernel kills them when the supervisor ends, however that
happens.

Signals, ends of children and their words (that they still serve, that they are drained) are all file descriptors of
one selector.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from app.exit_codes import DRAINED, OVERRAN
from app.processes.kernel import bury_strays
from app.processes.stop_signals import STOPS, heard, held
from app.processes.supervision import (
    DRAINED_WORD,
    END_WORD,
    OVERRUN_SECONDS,
    START_DRAIN_SECONDS,
    Hearing,
    Restarts,
    exit_code,
    hopeless,
)
from app.start_error import StartError

logger = logging.getLogger(__name__)

_MAX_SOCKET_PATH: Final = 107
_FOLDER: Final = "hotspare-processes-"
_OPEN_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(eq=False)
class _Child:
    index: int
    popen: subprocess.Popen[bytes]
    pidfd: int
    line: int
    """What it says, until it ends; and a word for it."""
    started_at: float
    hearing: Hearing
    drained: bool = False

    @property
    def serves(self) -> bool:
        return self.hearing.serves


@dataclass(eq=False)
class _Slot:
    restarts: Restarts = field(default_factory=Restarts)
    child: _Child | None = None
    due_at: float | None = 0.0
    """When the next child is to be started."""


class Supervisor:
    """``arguments`` are the gateway's own; children read them, and the environment, anew."""

    def __init__(
        self, listener: socket.socket, arguments: Sequence[str], *, count: int, folder: Path, drain_seconds: float
    ) -> None:
        self._listener = listener
        self._arguments = list(arguments)
        self._folder = folder
        self._drain_seconds = drain_seconds
        self._slots = [_Slot() for _ in range(count)]
        self._selector = selectors.DefaultSelector()
        self._codes: list[int] = []
        self._failed_starts = 0
        self._signal: int | None = None
        self._over_at: float | None = None
        self._starters_over_at: float | None = None
        """In a drain: when those are killed that never listened."""
        self._released = False
        self._forced = False

    def run(self) -> int:
        """Serve until drained; returns the exit code."""
        with contextlib.closing(self._selector), self._signals():
            try:
                while self._step():
                    pass
            finally:
                self._kill()
        return OVERRAN if self._forced else exit_code(self._codes)

    def _step(self) -> bool:
        """Wait for something and see to it; whether there is more to come."""
        now = time.monotonic()
        for index, slot in enumerate(self._slots):
            if slot.due_at is not None and slot.due_at <= now and not self._start(index):
                return False
        if self._over_at is not None and self._over_at <= now:
            logger.error("children did not end in time: killed")
            self._forced = True
            return False
        if self._starters_over_at is not None and self._starters_over_at <= now:
            self._kill_starters()
        self._release_if_drained()
        if all(slot.child is None and slot.due_at is None for slot in self._slots):
            return False
        moments = [moment for slot in self._slots if (moment := slot.due_at) is not None]
        if self._signal is None:
            moments += [child.hearing.due_at for child in self._children()]
        moments += [moment for moment in (self._over_at, self._starters_over_at) if moment is not None]
        now = time.monotonic()
        until = max(now, min(moments)) if moments else math.inf
        events = self._selector.select(until - now if moments else None)
        woken_late = time.monotonic() - until
        bury_strays([child.popen.pid for child in self._children()])
        return all(key.data() for key, _ in events) and self._look_for_silence(woken_late)

    # Children

    def _start(self, index: int) -> bool:
        """Start one; whether to go on. A machine that has no room for it (processes, memory, descriptors) is asked
        again later, and costs the others nothing."""
        slot = self._slots[index]
        slot.due_at = None
        try:
            slot.child = self._spawn(index)
        except OSError as error:
            return self._again(index, 1, f"cannot be started: {error}", serves=False, lived=0.0)
        return True

    def _spawn(self, index: int) -> _Child:
        with contextlib.ExitStack() as undo:
            own, other = _line()
            undo.callback(os.close, own)
            descriptor = self._listener.fileno()
            place = [descriptor, other, os.getpid(), index, len(self._slots), self._folder]
            try:
                with held():  # by the child, until it hears them
                    popen = subprocess.Popen(
                        [sys.executable, "-m", "app.child", *map(str, place), *self._arguments],
                        stdin=subprocess.DEVNULL,
                        pass_fds=(descriptor, other),
                        process_group=0,  # Ctrl-C is the supervisor's to pass on: twice would mean "at once"
                    )
            finally:
                os.close(other)
            undo.callback(popen.wait)
            undo.callback(popen.kill)
            now = time.monotonic()
            child = _Child(index, popen, os.pidfd_open(popen.pid), own, now, Hearing(now))
            undo.callback(os.close, child.pidfd)
            self._selector.register(child.pidfd, selectors.EVENT_READ, lambda: self._ended(child))
            undo.callback(self._selector.unregister, child.pidfd)
            self._selector.register(child.line, selectors.EVENT_READ, lambda: self._spoke(child))
            undo.pop_all()
        return child

    def _spoke(self, child: _Child) -> bool:
        if child.line < 0:
            return True  # its end came in the same turn
        try:
            said = os.read(child.line, 64)
        except ConnectionResetError:
            said = b""  # it ended without having read our word
        if said:
            self._failed_starts = 0
            child.hearing.heard(time.monotonic())
            child.drained = child.drained or DRAINED_WORD in said
            return True
        self._selector.unregister(child.line)
        os.close(child.line)
        child.line = -1
        return True

    def _release_if_drained(self) -> None:
        """Children that are drained answer probes until all are, and end together."""
        children = self._children()
        if self._signal is None or self._released or not all(child.drained for child in children):
            return
        self._released = True
        for child in children:
            if child.line >= 0:
                with contextlib.suppress(OSError):  # it is ending already
                    os.write(child.line, END_WORD)

    def _kill_starters(self) -> None:
        """They were started before the drain, and hang or are slow: there is nothing that they could lose."""
        self._starters_over_at = None
        for child in self._children():
            if not child.serves:
                logger.warning("process %d did not come to listen before the drain: killed", child.index)
                child.popen.kill()

    def _look_for_silence(self, woken_late: float) -> bool:
        """Kill those that hang; their end is seen like any other."""
        now = time.monotonic()
        for child in self._children() if self._signal is None else ():
            if child.hearing.hangs(now, woken_late=woken_late):
                logger.error("process %d has said nothing for %g s: killed", child.index, now - child.hearing.heard_at)
                child.popen.kill()
                child.hearing.heard_at = now
        return True

    def _ended(self, child: _Child) -> bool:
        """Reap it; whether to go on."""
        while child.line >= 0:
            self._spoke(child)
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        code = child.popen.wait()
        slot = self._slots[child.index]
        slot.child = None
        if self._signal is not None:
            self._codes.append(DRAINED if code < 0 and not child.serves else code)  # it had nothing to lose
            return True
        lived = time.monotonic() - child.started_at
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return self._again(child.index, code, f"ended ({how}) after {lived:.1f} s", serves=child.serves, lived=lived)

    def _again(self, index: int, code: int, what: str, *, serves: bool, lived: float) -> bool:
        """There is no child in this place any more, or not yet; whether to go on."""
        if not serves:
            self._failed_starts += 1
            serving = sum(other.child is not None and other.child.serves for other in self._slots)
            if hopeless(code, failed_starts=self._failed_starts, places=len(self._slots), serving=serving):
                logger.error("process %d %s, and none serves: giving up", index, what)
                self._codes.append(code or 1)
                return False
        slot = self._slots[index]
        delay = slot.restarts.delay(lived)
        slot.due_at = time.monotonic() + delay
        logger.error("process %d %s; the next one starts in %g s", index, what, delay)
        return True

    def _children(self) -> list[_Child]:
        return [slot.child for slot in self._slots if slot.child is not None]

    def _kill(self) -> None:
        for child in self._children():
            child.popen.kill()
            child.popen.wait()
            os.close(child.pidfd)
            if child.line >= 0:
                os.close(child.line)

    # Signals

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Handlers only enqueue: the number comes out of a socket."""
        receiver, sender = socket.socketpair()
        with receiver, sender:
            receiver.setblocking(False)
            sender.setblocking(False)
            before = {number: signal.signal(number, _enqueue) for number in STOPS}
            old = signal.set_wakeup_fd(sender.fileno())
            self._selector.register(receiver, selectors.EVENT_READ, lambda: self._signalled(receiver.recv(64)))
            try:
                with heard():
                    yield
            finally:
                signal.set_wakeup_fd(old)
                for number, handler in before.items():
                    signal.signal(number, handler)

    def _signalled(self, numbers: bytes) -> bool:
        """Pass the first one on; whether to go on."""
        for number in numbers:
            name = signal.Signals(number).name
            if self._signal is not None:
                logger.warning("%s again: leaving at once", name)
                self._forced = True
                return False
            logger.info("%s: passed on to %d processes", name, len(self._children()))
            self._signal = number
            now = time.monotonic()
            self._over_at = now + self._drain_seconds + OVERRUN_SECONDS
            self._starters_over_at = now + START_DRAIN_SECONDS
            for slot in self._slots:
                slot.due_at = None
            for child in self._children():
                child.popen.send_signal(number)
        return True


def _line() -> tuple[int, int]:
    """Both ends of a line to a child, which nobody waits at."""
    own, other = socket.socketpair()
    own.setblocking(False)
    other.setblocking(False)
    return own.detach(), other.detach()


def _enqueue(number: int, frame: object) -> None:
    """The wake-up descriptor has the number already."""


@contextlib.contextmanager
def meeting_place() -> Iterator[Path]:
    """A private folder for the children's sockets.

    Raises:
        StartError: there is no room for one.
    """
    try:
        _clear_away(Path(tempfile.gettempdir()))
        new = Path(tempfile.mkdtemp(prefix=f".{_FOLDER}"))  # 0700
    except OSError as error:
        raise StartError(f"several processes need a folder for temporary files: {error}; see TMPDIR") from None
    folder = new.with_name(new.name.removeprefix("."))
    lock = os.open(new, _OPEN_FOLDER)
    try:
        # Locked before it has the name under which others look for folders without an owner.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new = new.rename(folder)
        if len(os.fsencode(folder / "00.sock")) > _MAX_SOCKET_PATH:
            raise StartError(f"the folder for temporary files is too long for a socket's name: {folder}; see TMPDIR")
        yield folder
    finally:
        shutil.rmtree(new, ignore_errors=True)
        os.close(lock)


def _clear_away(temporary: Path) -> None:
    """Remove the folders of supervisors that were killed: nobody holds their locks."""
    for found in temporary.glob(f"{_FOLDER}*"):
        try:
            folder = os.open(found, _OPEN_FOLDER)
        except OSError:
            continue  # gone, or not for us
        try:
            if os.fstat(folder).st_uid == os.getuid():
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(found, ignore_errors=True)
        except BlockingIOError:
            pass  # in use
        finally:
            os.close(folder)
