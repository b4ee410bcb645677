"""Python processes that are there at once: forked from one that has imported already what they need.

Most of the time of these tests was imports. What is forked runs `python -m MODULE` as if started anew: the module that
is run is none of those that were imported for it, and no thread, no descriptor and no driver is inherited. It is no
child of the test's: the fork server reaps it and says how it ended, and signals go by its pidfd.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import IO, Self

_STANDARD = (0, 1, 2)
_REQUEST_BYTES = 1 << 20


class Forked:
    """Like a `subprocess.Popen`, as far as these tests use one."""

    def __init__(self, pid: int, pidfd: int, ended: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self.stderr: IO[bytes] | None = None
        self._fds = [pidfd, ended]

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._fds[1]], [], [], 0)[0]:
            self._read()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._fds[1]], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self._read()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            try:
                signal.pidfd_send_signal(self._fds[0], number)
            except ProcessLookupError:  # it has just ended by itself
                self.wait()

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Once it has ended."""
        self.wait()
        while self._fds:
            os.close(self._fds.pop())

    def _read(self) -> None:
        said = os.read(self._fds[1], 64)
        assert said, "the fork server is gone"
        self.returncode = int(said)


class ForkServer:
    """A process that has imported `modules`; `environment` is what must stand when a program starts (LD_LIBRARY_PATH),
    the rest is given with each fork."""

    def __init__(self, modules: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.process.gms.forkserver", str(theirs.fileno()), *modules],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(environment or {})},
                pass_fds=[theirs.fileno()],
            )

    def fork(
        self, arguments: Sequence[str], environment: dict[str, str], *, stdin: int, stdout: int, stderr: int
    ) -> Forked:
        """Runs `python -m` with the arguments, the first of which is the module. The descriptors stay the caller's."""
        request = json.dumps([list(arguments), environment]).encode()
        assert len(request) < _REQUEST_BYTES
        socket.send_fds(self._connection, [request], [stdin, stdout, stderr])
        said, fds, _, _ = socket.recv_fds(self._connection, 64, 2)
        assert len(fds) == 2, "the fork server is gone"
        return Forked(int(said), *fds)

    def close(self) -> None:
        self._connection.close()
        assert self._process.wait(10) == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class _Server:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._poller = select.poll()
        self._poller.register(connection, select.POLLIN)
        self._children: dict[int, tuple[int, int]] = {}  # pidfd -> pid, and where its end is to be said

    def serve(self) -> list[str] | None:
        """Until the other side closes. Returns in every forked process, too, with what it is to run."""
        while True:
            for fd, _ in self._poller.poll():
                if fd in self._children:
                    self._reap(fd)
                    continue
                request, fds, _, _ = socket.recv_fds(self._connection, _REQUEST_BYTES, 3)
                if not request:
                    return None
                arguments, environment = json.loads(request)
                if self._fork(fds):
                    _become(fds, environment)
                    return [str(argument) for argument in arguments]

    def _fork(self, fds: list[int]) -> bool:
        """True in the child."""
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            return True
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = pid, writing
        self._poller.register(pidfd, select.POLLIN)
        socket.send_fds(self._connection, [str(pid).encode()], [pidfd, reading])
        for fd in (*fds, reading):
            os.close(fd)
        return False

    def _reap(self, pidfd: int) -> None:
        pid, writing = self._children.pop(pidfd)
        self._poller.unregister(pidfd)
        _, status = os.waitpid(pid, 0)
        with open(writing, "wb") as said:
            try:
                said.write(str(os.waitstatus_to_exitcode(status)).encode())
                said.flush()
            except BrokenPipeError:  # nobody asks any more
                pass
        os.close(pidfd)


def _become(fds: list[int], environment: dict[str, str]) -> None:
    """A process with these standard descriptors, no others, and this environment."""
    for fd, standard in zip(fds, _STANDARD, strict=True):
        os.dup2(fd, standard)
    os.closerange(len(_STANDARD), os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(environment)


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.freeze()  # what stays need not be looked through again in each process
    arguments = _Server(connection).serve()
    if arguments is not None:
        connection.detach()  # closed with all others
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
