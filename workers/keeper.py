"""The keeper: a parent that has imported everything, forks the engine, watches it, and forks again when it dies.

Importing vLLM takes several times longer than starting an engine from its modules, so the keeper pays it once: after a
death the next engine is a fork, ready in seconds. That works because the keeper stays simple: one thread, no event
loop, no sockets, no CUDA, nothing that a fork would tear.

It also is the nearest one to notice an engine that hangs: beats come over a pipe, and silence ends with SIGKILL, which
works on a stopped process too and does not wait for anybody's grace period (``workers.heartbeat`` decides).

Signal handlers only enqueue: they write a byte to a pipe that the one loop polls, with the beats and the engine's
pidfd.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from workers import engine_folder, metrics
from workers.exit_codes import ExitCode
from workers.first_process import bury_strays
from workers.heartbeat import BEAT_BYTES, BeatDecoder, Stuck, Watchdog
from workers.lifeline import die_with_parent
from workers.probes import CrashLoop, Decision
from workers.process_state import is_stopped
from workers.role import READY_ROLES

logger = logging.getLogger(__name__)

EngineMain = Callable[[int, int], int]
"""Runs an engine to its end in the forked process: write end of the heartbeat pipe and how many engines this keeper
has forked before in, exit code out."""

_LOOK_MS: Final = 250
FORK_AGAIN_SECONDS: Final = 0.25
"""Before the second try to fork; twice as long before each further one, up to the next."""
MAX_FORK_AGAIN_SECONDS: Final = 8.0
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class KeeperTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of silence after which an engine is killed; see ``workers.heartbeat.Watchdog``."""

    beat: float
    init_beat: float
    step: float
    end: float
    """For one that was told to stop, from its last beat."""


class _Life(msgspec.Struct, frozen=True, kw_only=True):
    """How one engine's life ended."""

    status: int
    """Exit code, or minus the signal's number, as in subprocess."""
    reached_standby: bool
    stuck: Stuck | None
    began: float
    """``time.monotonic()``, as are the next two."""
    ended: float
    killed: float | None
    """When the keeper killed it, if it did."""


class _NotForked(Exception):
    """The machine did not let an engine begin: no process, descriptor or place on the disk is to be had now."""


class Keeper:
    """Forks one engine after another until it is told to stop or the engine cannot live."""

    def __init__(self, *, name: str, engine_main: EngineMain, runtime_dir: Path, timeouts: KeeperTimeouts) -> None:
        """``runtime_dir`` belongs to the engine: made empty before each life, removed after it."""
        self._name = name
        self._engine_main = engine_main
        self._runtime_dir = runtime_dir
        self._timeouts = timeouts
        self._stops = 0
        self._forks = 0

    def run(self) -> int:
        """Keep an engine alive; returns this process's exit code."""
        crash_loop = CrashLoop()
        gc.collect()
        gc.freeze()  # what is shared with every engine stays shared: a collection would touch, and so copy, the pages
        with self._signals() as (wakeup, inherited):
            while True:
                life = self._next_life(wakeup, inherited)
                if life is None:
                    return ExitCode.DRAINED
                metrics.record_end(
                    None if self._stops or life.status == ExitCode.DRAINED else _how(life),
                    at=life.ended,
                    teardown=None if life.killed is None else life.ended - life.killed,
                )
                if self._stops:
                    return self._stopped(life)
                if life.status == ExitCode.BAD_CONFIGURATION:
                    return ExitCode.BAD_CONFIGURATION
                verdict = crash_loop.died(
                    time.monotonic(), reached_standby=life.reached_standby, lived_seconds=life.ended - life.began
                )
                if verdict.decision is Decision.GIVE_UP:
                    logger.error(
                        "%s: giving up: it died again and again before it was ready even once (%s); "
                        "the lines above say why",
                        self._name,
                        _describe(life),
                    )
                    lost = life.status == ExitCode.MEMORY_SERVICE_LOST
                    return ExitCode.MEMORY_SERVICE_LOST if lost else ExitCode.ENGINE_DEAD
                logger.log(
                    # One that ends by itself and in order was asked to: it has changed places with its spare.
                    logging.INFO if life.status == ExitCode.DRAINED else logging.WARNING,
                    "%s: the engine is gone (%s); forking the next one%s",
                    self._name,
                    _describe(life),
                    f" in {verdict.delay_seconds:g} s" if verdict.delay_seconds else "",
                )
                if verdict.delay_seconds and self._wait(wakeup, verdict.delay_seconds):
                    return ExitCode.DRAINED

    def _stopped(self, life: _Life) -> int:
        if self._stops > 1 or life.status < 0:
            return ExitCode.FORCED
        return life.status

    @contextlib.contextmanager
    def _signals(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yields the end to poll, and both ends: a forked engine must have neither."""
        read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        old_wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        old = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
        try:
            yield read, (read, write)
        finally:
            signal.set_wakeup_fd(old_wakeup)
            for number, handler in old.items():
                signal.signal(number, handler)
            os.close(read)
            os.close(write)

    def _wait(self, wakeup: int, seconds: float) -> bool:
        """Wait; True if told to stop meanwhile."""
        poller = select.poll()
        poller.register(wakeup, select.POLLIN)
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if poller.poll(left * 1000) and self._take_signals(wakeup):
                return True
        return False

    def _take_signals(self, wakeup: int) -> int:
        """How many requests to stop have come since the last look."""
        try:
            came = sum(number in _SIGNALS for number in os.read(wakeup, 512))
        except BlockingIOError:
            return 0
        self._stops += came
        return came

    def _next_life(self, wakeup: int, signal_pipe: tuple[int, int]) -> _Life | None:
        """One life, as soon as the machine lets an engine begin; None: told to stop before it did."""
        delay = FORK_AGAIN_SECONDS
        while True:
            try:
                return self._one_life(wakeup, signal_pipe)
            except _NotForked as error:
                logger.error("%s: no engine can be forked, tried again in %g s: %s", self._name, delay, error)
            if self._wait(wakeup, delay):
                return None
            delay = min(2 * delay, MAX_FORK_AGAIN_SECONDS)

    def _one_life(self, wakeup: int, signal_pipe: tuple[int, int]) -> _Life:
        """Raises _NotForked: there was none."""
        beats = engine_end = pidfd = -1
        try:
            try:
                engine_folder.make_empty(self._runtime_dir)
                beats, engine_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
                pid, pidfd = self._fork(engine_end, inherited=(beats, *signal_pipe))
            except OSError as error:
                raise _NotForked(error.strerror or str(error)) from error
            os.close(engine_end)
            engine_end = -1
            return self._watch(pid, pidfd, beats, wakeup)
        finally:
            for fd in (beats, engine_end, pidfd):
                if fd >= 0:
                    os.close(fd)
            engine_folder.remove(self._runtime_dir)

    def _fork(self, engine_end: int, *, inherited: tuple[int, ...]) -> tuple[int, int]:
        """The engine's pid and pidfd.

        Raises:
            OSError: the system has no room for another process, or for a descriptor of it.
        """
        threads = len(os.listdir("/proc/self/task"))
        if threads != 1:
            raise RuntimeError(
                f"the keeper has {threads} threads and must have one: a fork would lose the others' locks"
            )
        sys.stdout.flush()
        sys.stderr.flush()
        keeper_pid = os.getpid()
        # Until it has handlers of its own the child would answer signals with the keeper's, into the keeper's pipe.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            pid = os.fork()
        except OSError:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            raise
        if pid:
            self._forks += 1
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            return pid, _pidfd_of(pid)
        code: int = ExitCode.FORCED
        try:
            # The engine's own process from here on. SIGINT of a terminal reaches the keeper too, which passes it on.
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            for fd in inherited:
                os.close(fd)
            die_with_parent(keeper_pid)
            code = self._engine_main(engine_end, self._forks)
        except BaseException:  # the process ends here in any case, and must say why
            traceback.print_exc()
            code = ExitCode.ENGINE_DEAD
        finally:
            # Not sys.exit: the parent's clean-up handlers and stack are not this process's to run.
            logging.shutdown()
            with contextlib.suppress(OSError):
                sys.stdout.flush()
            with contextlib.suppress(OSError):
                sys.stderr.flush()
            os._exit(code)

    def _watch(self, pid: int, pidfd: int, beats: int, wakeup: int) -> _Life:
        began = time.monotonic()
        watchdog = Watchdog(
            now=began,
            beat_timeout=self._timeouts.beat,
            init_beat_timeout=self._timeouts.init_beat,
            step_timeout=self._timeouts.step,
        )
        decoder = BeatDecoder()
        reached_standby, told, stuck = False, 0, None
        killed: float | None = None
        poller = select.poll()
        for fd in (pidfd, beats, wakeup):
            poller.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poller.poll(_LOOK_MS)}
            bury_strays((pid,))
            now = time.monotonic()
            if beats in ready:
                data = os.read(beats, 4096 * BEAT_BYTES)
                if not data:
                    poller.unregister(beats)
                elif beat := decoder.feed(data):
                    watchdog.beat(beat, now=now)
                    reached_standby = reached_standby or beat.role in READY_ROLES
            if pidfd in ready:
                _, status = os.waitpid(pid, 0)
                return _Life(
                    status=os.waitstatus_to_exitcode(status),
                    reached_standby=reached_standby,
                    stuck=stuck,
                    began=began,
                    ended=now,
                    killed=killed,
                )
            if wakeup in ready:
                self._take_signals(wakeup)
            if self._stops > told:
                told = self._stops
                watchdog.told_to_stop(now=now, end_timeout=self._timeouts.end)
                os.kill(pid, signal.SIGTERM if told == 1 else signal.SIGKILL)
            if stuck is None and (stuck := watchdog.look(now=now, stopped=told > 0 and is_stopped(pid))):
                logger.error("%s: killing the engine (pid %d): %s", self._name, pid, stuck.value)
                killed = time.monotonic()
                os.kill(pid, signal.SIGKILL)


def _pidfd_of(pid: int) -> int:
    """Of a child. Raises OSError: there is none to be had, and the child, which nobody could watch, is gone."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _describe(life: _Life) -> str:
    if life.stuck:
        return f"killed, since {life.stuck.value}"
    if life.status < 0:
        return f"killed by {signal.Signals(-life.status).name}"
    return f"exit code {life.status}"


def _how(life: _Life) -> str:
    """The same for a metric: few values."""
    if life.stuck:
        return life.stuck.name.lower()
    return f"signal_{-life.status}" if life.status < 0 else f"exit_{life.status}"
