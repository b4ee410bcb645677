"""The programs behind ``hotspare bench gateway``: the mock worker says what contracts promise, the generator sees what
is wrong with an answer."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import socketserver
import subprocess
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from app.cli.bench.gateway.children import Child, Cores
from app.cli.bench.gateway.figures import Failed, Load, parse_load
from app.cli.bench.gateway.measures import mock_workers, read_line
from app.cli.bench.gateway.native import Tools, build
from tests.support.processes import gone
from workers.contract import Role, decode_watch_line

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="needs a C compiler"),
]

NOTE = re.compile(rb": t e=(\d+) n=(\d+) c=([0-9a-f]{8}) g=(\S+)( t=1700000000 p=0)?")
CORES = Cores(frozenset(os.sched_getaffinity(0)), frozenset(os.sched_getaffinity(0)))


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Tools:
    return build(tmp_path_factory.mktemp("tools"))


@pytest.fixture
def worker(tools: Tools, tmp_path: Path) -> Iterator[int]:
    with mock_workers(tools, CORES, tmp_path) as (port, _):
        yield port


def exchange(port: int, request: bytes) -> bytes:
    """The body of one answer."""
    with closing(socket.create_connection(("127.0.0.1", port), timeout=10)) as connection:
        connection.sendall(request)
        came = b""
        while data := connection.recv(65536):
            came += data
    head, _, body = came.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" not in head:
        return body
    joined = b""
    while size := int(body[: body.index(b"\r\n")], 16):
        start = body.index(b"\r\n") + 2
        joined += body[start : start + size]
        body = body[start + size + 2 :]
    return joined


def chat(*headers: str, pace: str = "", **fields: object) -> bytes:
    messages = [{"role": "user", "content": f"Hello. {pace}"}]
    body = json.dumps({"model": "mock-model", "messages": messages, **fields}).encode()
    head = ["POST /v1/chat/completions HTTP/1.1", "host: x", "connection: close", *headers]
    return "\r\n".join([*head, f"content-length: {len(body)}", "", ""]).encode() + body


def test_token_notes_count_and_sum_the_event_bytes(worker: int) -> None:
    noted = exchange(worker, chat("x-hotspare-stream: 1", stream=True, max_tokens=300, pace="burst=300"))
    plain = exchange(worker, chat("x-hotspare-worker-token: any", stream=True, max_tokens=300, pace="burst=300"))
    crc = events = 0
    choices = []
    position = 0
    while position < len(noted):
        end = noted.index(b"\n", position)
        note = NOTE.fullmatch(noted[position:end])
        assert note, noted[position:end]
        position = end + 1
        unit_at = position
        for _ in range(int(note[2])):
            position = noted.index(b"\n\n", position) + 2
        unit = noted[unit_at:position]
        assert unit.startswith(b"data: ")
        crc = zlib.crc32(unit, crc)
        events += int(note[2])
        assert (int(note[1]), int(note[3], 16)) == (events, crc)
        assert bool(note[5]) == (not choices)
        choices.append(note[4])
    assert events == 301
    assert len(set(choices)) == 300
    assert re.sub(rb"(?m)^: t .*\n", b"", noted) == plain
    assert plain.endswith(b'"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n')
    assert zlib.crc32(plain) == crc


def test_a_request_in_chunks_is_understood(worker: int) -> None:
    parts = [b'{"stream"', b': true, "max_', b'tokens": 4}']
    body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    head = b"POST /v1/chat/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    assert exchange(worker, head + body).count(b"data: ") == 5


def test_the_pace_is_the_requests(worker: int) -> None:
    request = chat(stream=True, max_tokens=50, pace="burst=20 interval_us=60000000")
    with closing(socket.create_connection(("127.0.0.1", worker), timeout=10)) as connection:
        connection.sendall(request)
        came = b""
        while came.count(b"\n\n") < 20:
            came += connection.recv(65536)
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(10)
        stats = json.loads(exchange(worker, b"GET /mock/stats HTTP/1.1\r\nConnection: close\r\n\r\n"))
        assert stats == {"requests": 1, "active": 1, "finished": 0, "cancelled": 0}
        exchange(worker, b"POST /mock/finish HTTP/1.1\r\nConnection: close\r\n\r\n")
        while data := connection.recv(65536):
            came += data
    assert came.count(b"data: ") == 51
    assert came.endswith(b"\r\n0\r\n\r\n")


def test_a_client_that_leaves_is_counted(worker: int) -> None:
    with closing(socket.create_connection(("127.0.0.1", worker), timeout=10)) as connection:
        connection.sendall(chat(stream=True, max_tokens=50, pace="burst=2 interval_us=60000000"))
        connection.recv(65536)
    stats = json.loads(exchange(worker, b"GET /mock/stats HTTP/1.1\r\nConnection: close\r\n\r\n"))
    assert stats == {"requests": 1, "active": 0, "finished": 0, "cancelled": 1}


def test_the_watch_is_the_contracts(worker: int) -> None:
    with closing(socket.create_connection(("127.0.0.1", worker), timeout=10)) as connection:
        connection.sendall(b"GET /internal/watch HTTP/1.1\r\n\r\n")
        reader = connection.makefile("rb")
        assert b"200 OK" in reader.readline()
        lines = []
        while len(lines) < 2:
            if (line := reader.readline()).startswith(b"{"):
                lines.append(decode_watch_line(line))
    assert [line.seq for line in lines] == [0, 1]
    assert (lines[0].state, lines[0].models) == (Role.ACTIVE, ("mock-model",))


def test_the_programs_end_with_whoever_started_them(tools: Tools, tmp_path: Path) -> None:
    script = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.argv[1], str(os.getpid()), '0', sys.argv[2]], stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    core = str(min(os.sched_getaffinity(0)))
    command = ["python3", "-c", script.replace("'0'", repr(core)), str(tools.launch), str(tools.worker)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    assert gone(pid)


# The generator


EVENT = b'data: {"choices":[{"delta":{"content":" t%07d"}}]}\n\n'


def stream(*events: bytes) -> bytes:
    body = b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in events)
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + body


END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"
THREE = (EVENT % 1, EVENT % 2, EVENT % 3)
WRONG: dict[str, tuple[bytes, Failed]] = {
    "an event is missing": (stream(EVENT % 1, EVENT % 3, DONE) + END, Failed(content=1)),
    "an event comes twice": (stream(EVENT % 1, EVENT % 1, EVENT % 2, EVENT % 3, DONE) + END, Failed(content=1)),
    "an event is in two": (stream(*THREE[:2], (EVENT % 3)[:-1], DONE) + END, Failed(content=1)),
    "one too few": (stream(*THREE[:2], DONE) + END, Failed(short=1)),
    "one too many": (stream(*THREE, EVENT % 4, DONE) + END, Failed(short=1)),
    "no end marker": (stream(*THREE) + END, Failed(short=1)),
    "an error event": (stream(*THREE, b'data: {"error":{}}\n\n', DONE) + END, Failed(content=1)),
    "cut": (stream(*THREE, DONE), Failed(closed=1)),
    "a status": (b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 2\r\n\r\n{}", Failed(status=1)),
    "not HTTP": (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", Failed(content=1)),
    "a bad chunk": (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", Failed(content=1)),
    "nothing": (b"", Failed(closed=1)),
}


@contextmanager
def answering(answer: bytes) -> Iterator[int]:
    """A server that answers every request with these bytes, in pieces of seven, and closes."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            while not self.request.recv(65536).endswith(b"}"):
                pass
            self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for start in range(0, len(answer), 7):
                self.request.sendall(answer[start : start + 7])

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def load(tools: Tools, tmp_path: Path) -> Callable[..., Load]:
    def run(port: int, *options: str) -> Load:
        command = [str(tools.load), "--port", str(port), *options]
        environment = dict(os.environ)
        with Child(
            tools.launch, command, cores=CORES.others, log=tmp_path / "log", env=environment, stdout=subprocess.PIPE
        ) as child:
            line = read_line(child, 20)
            assert child.wait(10) == 0
            return parse_load(line)

    return run


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_a_stream_is_seen(case: str, load: Callable[..., Load]) -> None:
    answer, failed = WRONG[case]
    with answering(answer) as port:
        result = load(port, "--requests", "1", "--tokens", "3")
    assert (result.completed, result.failed) == (0, failed)
    assert result.last_status == (503 if failed.status else 0)


@pytest.mark.parametrize("extra", [b"", b": keep-alive\n\n", b": t e=2 n=1 c=00000000 g=0:1\n"])
def test_a_whole_stream_counts_comments_or_not(extra: bytes, load: Callable[..., Load]) -> None:
    with answering(stream(EVENT % 1, extra + EVENT % 2, EVENT % 3 + DONE) + END) as port:
        result = load(port, "--requests", "1", "--tokens", "3")
    assert (result.completed, result.events, result.failed) == (1, 3, Failed())


@pytest.mark.parametrize(
    ("answer", "failed"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", Failed(content=1)),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 40\r\n\r\n{}", Failed(closed=1)),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", Failed(content=1)),
    ],
)
def test_what_is_wrong_with_an_answer_is_seen(answer: bytes, failed: Failed, load: Callable[..., Load]) -> None:
    with answering(answer) as port:
        assert load(port, "--requests", "1").failed == failed


def test_silence_and_a_closed_port_are_failures(worker: int, load: Callable[..., Load]) -> None:
    options = ["--requests", "2", "--connections", "2", "--tokens", "3", "--interval-us", "60000000"]
    assert load(worker, *options, "--timeout", "0.3").failed == Failed(timeout=2)
    with closing(socket.socket()) as nobody:
        nobody.bind(("127.0.0.1", 0))
        assert load(nobody.getsockname()[1], *options).failed == Failed(connect=2)


def test_many_kept_connections_and_paced_streams(worker: int, load: Callable[..., Load]) -> None:
    result = load(worker, "--connections", "16", "--requests", "400", "--header", "authorization: Bearer x")
    assert (result.completed, result.sound) == (400, True)
    options = ["--connections", "20", "--requests", "60", "--tokens", "10", "--body-bytes", "8192"]
    result = load(worker, *options, "--burst", "8", "--interval-us", "10000")
    assert (result.completed, result.events, result.sound) == (60, 600, True)
    assert result.seconds > 0.04
    assert result.first_event_us is not None


def test_held_streams_are_one_a_connection_and_are_announced(tools: Tools, worker: int, tmp_path: Path) -> None:
    options = ["--connections", "40", "--requests", "40", "--ramp", "400", "--tokens", "6", "--announce", "3"]
    command = [str(tools.load), "--port", str(worker), *options, "--burst", "5", "--interval-us", "1000"]
    output = subprocess.PIPE
    with Child(tools.launch, command, cores=CORES.others, log=tmp_path / "log", env=os.environ, stdout=output) as child:
        assert json.loads(read_line(child, 20)) == {"held": 40}
        assert parse_load(read_line(child, 20)).completed == 40
