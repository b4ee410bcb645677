"""A connection to the service without a client's manners: any bytes, any descriptors."""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from gms import protocol

DEADLINE_SECONDS = 10.0
HELLO = protocol.Hello(
    version=protocol.VERSION, client="raw", engine="r", instance="test", device="cpu:0", device_id="cpu:0", fds=1
)


class Raw:
    """Descriptors that come are dropped."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self._decoder = protocol.FrameDecoder()
        try:
            self.socket.connect(str(path))  # with a timeout it would not wait for a place in the backlog
            self.socket.settimeout(DEADLINE_SECONDS)
        except BaseException:
            self.socket.close()
            raise

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        sent = self.socket.sendmsg([data], rights)
        if sent < len(data):
            self.socket.sendall(data[sent:])

    def greet(self, hello: protocol.Hello = HELLO) -> Self:
        with pidfds(1) as fds:
            self.send(protocol.encode(hello), fds)
        answer = self.reply()
        assert isinstance(answer, protocol.Welcome), answer
        return self

    def ask(self, request: protocol.Request, fds: Sequence[int] = ()) -> protocol.Reply:
        self.send(protocol.encode(request), fds)
        return self.reply()

    def reply(self) -> protocol.Reply:
        """Raises ConnectionResetError at the end of the stream."""
        while (frame := self._decoder.next_frame()) is None:
            data = self.socket.recv(65536)
            if not data:
                raise ConnectionResetError("the service hung up")
            self._decoder.feed(data)
        return protocol.decode_reply(frame)

    def hung_up(self) -> bool:
        """Waits for it; False if something is still said."""
        try:
            return not self.socket.recv(65536)
        except ConnectionResetError:
            return True

    def last_word(self) -> protocol.Failure:
        """What the service says before it hangs up."""
        answer = self.reply()
        assert isinstance(answer, protocol.Failure), answer
        assert self.hung_up()
        return answer

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


@contextmanager
def pidfds(count: int) -> Iterator[list[int]]:
    """This process's, so many times."""
    fds: list[int] = []
    try:
        for _ in range(count):
            fds.append(os.pidfd_open(os.getpid()))
        yield fds
    finally:
        for fd in fds:
            os.close(fd)
