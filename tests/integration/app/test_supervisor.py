"""The supervisor on a machine that has no room for another process: with real children, small ones."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.processes import supervision
from app.processes import supervisor as module
from app.processes.supervision import STARTS_LIMIT
from app.processes.supervisor import Supervisor
from tests.support.processes import until

CHILD = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
signal.pthread_sigmask(signal.SIG_SETMASK, ())
os.write(int(sys.argv[1]), b".")
while True:
    signal.pause()
"""

SILENT = "import time; time.sleep(60)"
DRAINS_AT_ONCE = """
import os, signal, socket, sys
line = int(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: os.write(line, b".d"))
signal.pthread_sigmask(signal.SIG_SETMASK, ())
os.write(line, b".")
os.set_blocking(line, True)
word = os.read(line, 1)
os._exit(0 if word == b"e" else 9)
"""
DRAINS_WHEN_TOLD = DRAINS_AT_ONCE.replace('lambda *_: os.write(line, b".d")', "lambda *_: None").replace(
    "signal.pthread", 'signal.signal(signal.SIGUSR1, lambda *_: os.write(line, b"d"))\nsignal.pthread'
)


@pytest.fixture
def shell() -> None:
    """Not a matter of the shell."""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


@pytest.fixture
def children(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """All that were started. In the place of a gateway's process each is one that only says that it listens, or what
    the test has instead, one after the other."""
    real = subprocess.Popen
    started: list[subprocess.Popen[bytes]] = []
    programs: list[str] = list(getattr(request, "param", ()))

    def start(arguments: list[str], **options: Any) -> subprocess.Popen[bytes]:
        program = programs.pop(0) if programs else CHILD
        started.append(real([sys.executable, "-S", "-c", program, arguments[4]], **options))
        return started[-1]

    monkeypatch.setattr(module.subprocess, "Popen", start)
    yield started
    for child in started:
        assert child.poll() is not None


def failing(real: Callable[..., Any], *errors: int) -> Callable[..., Any]:
    """As ``real``, but that its first calls fail so; 0: that one does not."""
    left = list(errors)

    def call(*given: Any, **options: Any) -> Any:
        number = left.pop(0) if left else 0
        if number:
            raise OSError(number, os.strerror(number))
        return real(*given, **options)

    return call


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_a_start_that_the_machine_refuses_is_tried_again_and_costs_no_other_child(
    listener: socket.socket,
    children: list[subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(module.subprocess, "Popen", failing(subprocess.Popen, 0, errno.EAGAIN))
    monkeypatch.setattr(module.os, "pidfd_open", failing(os.pidfd_open, 0, errno.EMFILE))
    monkeypatch.setattr(module.socket, "socketpair", failing(socket.socketpair, 0, 0, 0, 0, errno.ENFILE))
    supervisor = Supervisor(listener, [], count=2, folder=tmp_path, drain_seconds=5)
    before = descriptors()

    def end_once_both_serve() -> None:
        try:
            until(lambda: sum(child.serves for child in supervisor._children()) == 2, saying="both serve")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    ending = threading.Thread(target=end_once_both_serve)
    ending.start()
    try:
        assert supervisor.run() == 0
    finally:
        ending.join()
    # The first one served all along; the one that could not be watched was killed and waited for.
    assert [child.returncode for child in children] == [0, -signal.SIGKILL, 0]
    assert len([said for said in caplog.messages if "process 1 cannot be started" in said]) == 3
    supervisor._selector.close()
    assert descriptors() <= before


def test_when_none_can_be_started_the_supervisor_gives_up(
    listener: socket.socket,
    children: list[subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(module.subprocess, "Popen", failing(subprocess.Popen, *[errno.ENOMEM] * 100))
    before = descriptors()
    supervisor = Supervisor(listener, [], count=2, folder=tmp_path, drain_seconds=5)
    assert supervisor.run() == 1
    assert children == []
    assert len(caplog.messages) == 2 * STARTS_LIMIT
    assert "and none serves: giving up" in caplog.messages[-1]
    assert descriptors() <= before


@contextlib.contextmanager
def beside(what: Callable[[], None]) -> Iterator[None]:
    """``what`` runs in another thread meanwhile; the supervisor needs this one."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        done = pool.submit(what)
        yield
        done.result()


@pytest.mark.parametrize("children", [[SILENT]], indirect=True)
def test_a_child_that_never_comes_to_listen_is_replaced(
    listener: socket.socket,
    children: list[subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(supervision, "START_SECONDS", 5.0)
    supervisor = Supervisor(listener, [], count=2, folder=tmp_path, drain_seconds=5)

    def end_once_both_serve() -> None:
        try:
            until(lambda: sum(child.serves for child in supervisor._children()) == 2, saying="both serve")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    with beside(end_once_both_serve):
        assert supervisor.run() == 0
    assert [child.returncode for child in children] == [-signal.SIGKILL, 0, 0]
    assert "process 0 has said nothing for" in caplog.text


@pytest.mark.parametrize("children", [[SILENT]], indirect=True)
def test_a_drain_does_not_wait_for_a_child_that_never_listened(
    listener: socket.socket,
    children: list[subprocess.Popen[bytes]],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    supervisor = Supervisor(listener, [], count=2, folder=tmp_path, drain_seconds=60)

    def end_once_one_serves() -> None:
        try:
            until(lambda: any(child.serves for child in supervisor._children()), saying="one serves")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    started = time.monotonic()
    with beside(end_once_one_serves):
        assert supervisor.run() == 0
    assert time.monotonic() - started < 30
    assert [child.returncode for child in children] == [-signal.SIGKILL, 0]
    assert "process 0 did not come to listen before the drain: killed" in caplog.text


@pytest.mark.parametrize("children", [[DRAINS_AT_ONCE, DRAINS_WHEN_TOLD]], indirect=True)
@pytest.mark.parametrize("ends", ["drained", "killed"])
def test_children_end_together(
    listener: socket.socket, children: list[subprocess.Popen[bytes]], ends: str, tmp_path: Path
) -> None:
    supervisor = Supervisor(listener, [], count=2, folder=tmp_path, drain_seconds=60)
    early: list[int | None] = []

    def drain() -> None:
        try:
            until(lambda: sum(child.serves for child in supervisor._children()) == 2, saying="both serve")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: any(child.drained for child in supervisor._children()), saying="one is drained")
        early.extend(child.returncode for child in children)
        children[1].send_signal(signal.SIGUSR1 if ends == "drained" else signal.SIGKILL)

    with beside(drain):
        assert supervisor.run() == (0 if ends == "drained" else 1)
    assert early == [None, None]
    assert [child.returncode for child in children] == [0, 0 if ends == "drained" else -signal.SIGKILL]
