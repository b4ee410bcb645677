"""Real processes for tests: started with a log of their own, asked over HTTP, and gone at the end whatever happened."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import httpx

T = TypeVar("T")

MS = 0.001
"""Every deadline of a process test is a multiple of this; slow machines scale it."""
DEADLINE_SECONDS = 40_000 * MS
RESTART_SECONDS = "0.5"
"""``HOTSPARE_SIM_RESTART_SECONDS``: real engines take longer. A sim that is forked again at once may ask for the lock
before the spare, which a death has woken, has run."""


class Process:
    """One child in a session of its own, its output in a file."""

    def __init__(self, name: str, arguments: list[str], *, env: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as output:
            self.popen = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**_clean_environment(), **env, "HOTSPARE_PARENT_PID": str(os.getpid())},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.popen.pid

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def wait(self, *, seconds: float = DEADLINE_SECONDS) -> int:
        try:
            return self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end within {seconds:g} s:\n{self.output()}") from None

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def until_said(self, text: str, *, times: int = 1) -> None:
        """Wait until its output holds ``text`` so often. What a pod's engine says goes through its supervisor, and may
        come later than what others see of that engine."""
        until(lambda: self.output().count(text) >= times, saying=f"{self.name} says {text!r}")

    def end(self) -> None:
        """SIGKILL the whole session and reap."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()


@contextlib.contextmanager
def running(
    name: str, module: str, *arguments: str, log_dir: Path, env: Mapping[str, str] | None = None
) -> Iterator[Process]:
    """``python -m module arguments``, killed with its whole session at the end."""
    process = Process(name, [sys.executable, "-m", module, *arguments], env=env or {}, log=log_dir / f"{name}.log")
    try:
        yield process
    finally:
        process.end()


def until(what: Callable[[], T | None], *, saying: str, seconds: float = DEADLINE_SECONDS) -> T:
    """The first answer of ``what`` that is not None or False."""
    deadline = time.monotonic() + seconds
    while True:
        answer = what()
        if answer is not None and answer is not False:
            return answer
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {saying}"
        time.sleep(5 * MS)


def get_json(url: str) -> dict[str, Any] | None:
    """The JSON document at ``url``, or None if nobody answers now."""
    try:
        return dict(httpx.get(url, timeout=2, trust_env=False).json())
    except httpx.TransportError:
        return None


def state_of(admin_port: int) -> dict[str, Any] | None:
    return get_json(f"http://127.0.0.1:{admin_port}/state")


def until_role(admin_port: int, role: str, *, seconds: float = DEADLINE_SECONDS) -> dict[str, Any]:
    """The engine's state once it has this role."""

    def ask() -> dict[str, Any] | None:
        state = state_of(admin_port)
        return state if state and state["role"] == role else None

    return until(ask, saying=f"the engine at {admin_port} is {role}", seconds=seconds)


def waiters() -> set[int]:
    """Processes that are blocked in ``flock`` (proc(5), locks: their lines have an arrow)."""
    fields = (line.split() for line in Path("/proc/locks").read_text().splitlines())
    return {int(field[field.index("FLOCK") + 3]) for field in fields if "->" in field and "FLOCK" in field}


def until_in_line(admin_port: int) -> dict[str, Any]:
    """The engine's state once it is parked, and its thread waits in the kernel for the lock: only then has it its
    place."""

    def look() -> dict[str, Any] | None:
        state = state_of(admin_port)
        return state if state and state["role"] == "STANDBY" and state["pid"] in waiters() else None

    return until(look, saying=f"the engine at {admin_port} stands in line")


def gone(pid: int, *, within: float = 5_000 * MS) -> bool:
    """Whether the process ends in time. It need not be a child."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOENT):
            raise
        return True  # the number is a thread's by now
    try:
        return bool(select.select([pidfd], [], [], within)[0])
    finally:
        os.close(pidfd)


def _clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("HOTSPARE_")}
