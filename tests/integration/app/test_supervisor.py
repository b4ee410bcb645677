"""The supervisor on a machine that has no room for another process: with real children, small ones."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.processes import supervisor as module
from app.processes.supervision import STARTS_LIMIT
from app.processes.supervisor import Supervisor
from tests.support.processes import until

CHILD = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
os.write(int(sys.argv[1]), b".")
while True:
    signal.pause()
"""


@pytest.fixture
def shell() -> None:
    """Not a matter of the shell."""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """All that were started. In the place of a gateway's process each is one that only says that it listens."""
    real = subprocess.Popen
    started: list[subprocess.Popen[bytes]] = []

    def start(arguments: list[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(real([sys.executable, "-S", "-c", CHILD, arguments[4]], **options))
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
    monkeypatch.setattr(module.os, "pipe2", failing(os.pipe2, 0, 0, 0, errno.ENFILE))
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
