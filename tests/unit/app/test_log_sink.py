from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.telemetry.log_sink import LogSink
from app.telemetry.logs import SinkHandler


class Pipe:
    """A pipe of one page, as small as they come, so that it is full soon."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, 4096)
        os.set_blocking(self.reader, False)

    def read(self) -> bytes:
        try:
            return os.read(self.reader, 1 << 20)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        os.close(self.reader)
        os.close(self.writer)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    before = set(os.listdir("/proc/self/fd"))
    made = Pipe()
    yield made
    made.close()
    assert set(os.listdir("/proc/self/fd")) <= before


LINE = b"x" * 99 + b"\n"


async def test_access_lines_wait_for_company_and_others_take_them_along(pipe: Pipe) -> None:
    sink = LogSink(pipe.writer)
    sink.access(b"1\n")
    assert pipe.read() == b""
    sink.write(b"2\n")
    assert pipe.read() == b"1\n2\n"
    sink.access(b"3\n")
    async with asyncio.timeout(5):
        await readable(pipe.reader)
    assert pipe.read() == b"3\n"
    sink.release()


async def readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(descriptor, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)


def test_without_a_loop_lines_go_out_at_once(pipe: Pipe) -> None:
    sink = LogSink(pipe.writer)
    sink.access(b"1\n")
    assert pipe.read() == b"1\n"
    thread = threading.Thread(target=sink.write, args=(b"2\n",))
    thread.start()
    thread.join()
    assert pipe.read() == b"2\n"
    sink.release()


@pytest.mark.parametrize("lines", [1, 39, 41, 1000])
async def test_a_full_pipe_makes_nobody_wait_and_nothing_is_lost(pipe: Pipe, lines: int) -> None:
    sink = LogSink(pipe.writer)
    expected = b"".join(b"%04d %b" % (number, LINE) for number in range(lines))
    for line in expected.splitlines(keepends=True):
        sink.access(line)
    sink.write(b"the end\n")
    got = b""
    async with asyncio.timeout(20):
        while not got.endswith(b"the end\n"):
            await readable(pipe.reader)
            got += pipe.read()
    assert got == expected + b"the end\n"
    assert sink.dropped == 0
    assert not os.get_blocking(pipe.reader)
    assert os.get_blocking(pipe.writer)  # its own description is as it was
    sink.release()


async def test_what_is_too_much_is_dropped_counted_and_said(pipe: Pipe, caplog: pytest.LogCaptureFixture) -> None:
    sink = LogSink(pipe.writer, limit_bytes=6000)
    for _ in range(200):
        sink.write(LINE)
    assert sink.dropped > 80
    kept = 200 - sink.dropped
    got = b""
    async with asyncio.timeout(5):
        while "dropped" not in caplog.text:
            await readable(pipe.reader)
            got += pipe.read()
            await asyncio.sleep(0.01)
    assert got == LINE * kept
    assert f"{sink.dropped} were dropped" in caplog.text
    sink.release()


async def test_a_line_longer_than_a_pipe(pipe: Pipe) -> None:
    sink = LogSink(pipe.writer)
    long = b"y" * 50_000 + b"\n"
    sink.write(long)
    got = b""
    async with asyncio.timeout(5):
        while len(got) < len(long):
            await readable(pipe.reader)
            got += pipe.read()
    assert got == long
    sink.release()


async def test_a_reader_that_is_gone(pipe: Pipe) -> None:
    sink = LogSink(pipe.writer)
    os.close(pipe.reader)
    sink.access(b"1\n")
    sink.write(b"2\n")
    sink.write(b"3\n")
    assert sink.dropped == 3
    sink.release()
    pipe.reader = os.dup(pipe.writer)  # for the fixture to close


def test_the_end_waits_for_a_reader_but_not_for_long(pipe: Pipe) -> None:
    sink = LogSink(pipe.writer)
    for _ in range(100):
        sink.write(LINE)
    sink.close(0.02)  # nobody reads
    got: list[bytes] = []

    def read() -> None:
        while b"".join(got) != LINE * 100:
            os.set_blocking(pipe.reader, True)
            got.append(os.read(pipe.reader, 4096))

    thread = threading.Thread(target=read)
    thread.start()
    sink.close(10)
    thread.join(10)
    assert b"".join(got) == LINE * 100
    sink.release()


def test_sockets_are_asked_for_room() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        sink = LogSink(ours.fileno(), limit_bytes=100_000)
        for _ in range(2000):
            sink.write(LINE)  # would block for ever on a socket that is full
        assert sink.dropped > 0
        theirs.setblocking(False)
        assert theirs.recv(1 << 20).startswith(LINE)
        sink.release()


def test_a_file_is_appended_to_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"before\n")
    with path.open("ab") as file:
        sink = LogSink(file.fileno())
        sink.write(LINE * 2000)
        sink.release()
    assert path.read_bytes() == b"before\n" + LINE * 2000


def test_logging_goes_through_it(pipe: Pipe) -> None:
    sink = LogSink(pipe.writer)
    handler = SinkHandler(sink)
    logger = logging.Logger("x")
    logger.addHandler(handler)
    logger.warning("caf\u00e9 \udc80")
    handler.flush()
    assert pipe.read() == "café \\udc80\n".encode()
    sink.release()


class Disk:
    """A file, and the same descriptor on a disk that is full."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._full = os.open("/dev/full", os.O_WRONLY)
        self.descriptor = os.dup(self._file)

    def fill(self) -> None:
        os.dup2(self._full, self.descriptor)

    def clear(self) -> None:
        os.dup2(self._file, self.descriptor)

    def close(self) -> None:
        for descriptor in (self._file, self._full, self.descriptor):
            os.close(descriptor)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path / "log")
    yield made
    made.close()


async def test_a_disk_that_was_full_gets_what_waited(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    sink = LogSink(disk.descriptor, limit_bytes=6000)
    sink.write(b"before\n")
    disk.fill()
    for _ in range(200):
        sink.write(LINE)
    sink.access(LINE)
    await asyncio.sleep(0.2)  # a few tries
    dropped = sink.dropped
    assert 100 < dropped < 200
    disk.clear()
    async with asyncio.timeout(5):
        while "dropped" not in caplog.text:  # noqa: ASYNC110  # asked, not told
            await asyncio.sleep(0.01)
    assert disk.path.read_bytes() == b"before\n" + LINE * (201 - dropped)
    sink.write(b"after\n")
    assert disk.path.read_bytes().endswith(b"after\n")
    sink.release()


def test_the_end_on_a_full_disk_does_not_run_in_circles(disk: Disk) -> None:
    sink = LogSink(disk.descriptor)
    disk.fill()
    sink.write(LINE)
    began = time.process_time()
    sink.close(0.4)
    assert time.process_time() - began < 0.2
    disk.clear()
    sink.close(10)
    assert disk.path.read_bytes() == LINE
    sink.release()
