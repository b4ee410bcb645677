"""The load generator's own client against servers that behave, and servers that do not."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from app.cli.bench.chaos.plan import Manner, Question
from app.cli.bench.loadtest.generator.client import Base, Client, Response, base_of
from app.cli.bench.loadtest.generator.session import converse
from app.cli.bench.loadtest.hearing import Hearing
from tests.support.processes import MS

pytestmark = pytest.mark.integration

EVENT = b'data: {"choices":[{"text":"a"}]}\n\n'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"

Talk = Callable[[socket.socket, int], None]
"""(connection, its number)"""


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def whole(body: bytes = b"{}", more: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n%s\r\n%s" % (len(body), more, body)


def take(connection: socket.socket) -> bytes:
    """One request; b"", if the client has hung up."""
    data = b""
    while True:
        head, found, rest = data.partition(b"\r\n\r\n")
        length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
        if found and len(rest) >= length:
            return data
        if not (more := connection.recv(65536)):
            return b""
        data += more


@contextmanager
def serving(talk: Talk) -> Iterator[str]:
    """Its URL; each connection is talked to in a thread of its own."""
    threads: list[threading.Thread] = []

    def one(connection: socket.socket, number: int) -> None:
        with connection, contextlib.suppress(OSError):
            talk(connection, number)

    def accept() -> None:
        for number in range(100):
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=one, args=(connection, number)))
            threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            for thread in (accepting, *threads):
                thread.join()


@contextmanager
def client_of(talk: Talk) -> Iterator[Client]:
    with serving(talk) as url, contextlib.closing(Client(base_of(url), {})) as client:
        yield client


def ask(client: Client, manner: Manner = Manner.STREAM, *, leave_after: int = 0, seconds: float = 20) -> Response:
    question = Question(path="/v1/completions", manner=manner, prompts=("a",), tokens=3, leave_after=leave_after)
    return client.ask(question, b"{}", Hearing(0.0), seconds=seconds)


def test_requests_share_a_connection() -> None:
    connections = set()

    def talk(connection: socket.socket, number: int) -> None:
        connections.add(number)
        while request := take(connection):
            assert request.startswith(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:")
            connection.sendall(HEAD + chunk(EVENT + EVENT) + chunk(b"data: [DONE]\n\n") + chunk(b""))

    with client_of(talk) as client:
        for _ in range(3):
            answer = ask(client)
            assert (answer.status, answer.broken, answer.body) == (200, "", EVENT + EVENT + b"data: [DONE]\n\n")
    assert connections == {0}


def test_a_connection_that_the_server_closed_is_not_used_again() -> None:
    closed = threading.Event()

    def talk(connection: socket.socket, number: int) -> None:
        take(connection)
        connection.sendall(whole())
        connection.shutdown(socket.SHUT_RDWR)
        closed.set()

    with client_of(talk) as client:
        for _ in range(3):
            closed.clear()
            assert ask(client, Manner.WHOLE).broken == ""
            assert closed.wait(20)


def test_a_request_that_was_not_read_is_sent_again_and_one_on_a_new_connection_is_not() -> None:
    def talk(connection: socket.socket, number: int) -> None:
        take(connection)
        if number in (0, 1):
            connection.sendall(whole())
            take(connection)  # and closes instead of an answer

    with client_of(talk) as client:
        assert [ask(client, Manner.WHOLE).broken for _ in range(2)] == ["", ""]
        assert ask(client, Manner.WHOLE).broken == "the server closed the connection"


def test_an_answer_with_connection_close() -> None:
    connections = set()

    def talk(connection: socket.socket, number: int) -> None:
        connections.add(number)
        take(connection)
        connection.sendall(whole(more=b"connection: close\r\n"))
        take(connection)

    with client_of(talk) as client:
        assert [ask(client, Manner.WHOLE).broken for _ in range(2)] == ["", ""]
    assert connections == {0, 1}


def test_a_stream_that_is_cut() -> None:
    def talk(connection: socket.socket, number: int) -> None:
        take(connection)
        connection.sendall(HEAD + chunk(EVENT))

    with client_of(talk) as client:
        answer = ask(client)
    assert (answer.broken, answer.body, answer.complete) == ("the server closed the connection", EVENT, False)


def test_a_client_that_leaves() -> None:
    left = threading.Event()

    def talk(connection: socket.socket, number: int) -> None:
        take(connection)
        connection.sendall(HEAD)
        with contextlib.suppress(OSError):
            while True:
                connection.sendall(chunk(EVENT))
        left.set()

    with client_of(talk) as client:
        answer = ask(client, Manner.CANCEL, leave_after=2)
        assert (answer.left, answer.status, answer.body[: len(EVENT)]) == (True, 200, EVENT)
        assert left.wait(20)


def test_a_server_that_says_nothing() -> None:
    over = threading.Event()

    def talk(connection: socket.socket, number: int) -> None:
        take(connection)
        over.wait(20)

    with client_of(talk) as client:
        answer = ask(client, seconds=50 * MS)
        over.set()
    assert (answer.broken, answer.status) == ("TimeoutError: not within 0.05 s", 0)


def test_a_server_that_speaks_something_else() -> None:
    def talk(connection: socket.socket, number: int) -> None:
        take(connection)
        connection.sendall(b"220 hello\r\n\r\n")

    with client_of(talk) as client:
        assert ask(client).broken.startswith("HttpParser")


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert ask(Client(Base("127.0.0.1", port, False, ""), {})).broken.startswith("ConnectionRefusedError")


def test_a_refusal_says_when_to_come_back() -> None:
    def talk(connection: socket.socket, number: int) -> None:
        take(connection)
        connection.sendall(b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\ncontent-length: 2\r\n\r\n{}")

    with client_of(talk) as client:
        answer = ask(client)
    assert (answer.status, answer.retry_after, answer.broken, answer.body) == (429, True, "", b"{}")


@pytest.mark.parametrize(
    ("reply", "broken", "status"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 2\r\n\r\n{}", "InvalidStatus", 503),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", "InvalidStatus", 200),
        (b"", "InvalidMessage", 0),
    ],
)
def test_a_session_that_is_refused(reply: bytes, broken: str, status: int) -> None:
    def talk(connection: socket.socket, number: int) -> None:
        take(connection)
        connection.sendall(reply)

    question = Question(path="/v1/realtime", manner=Manner.REALTIME, prompts=("a", "b"), tokens=3)
    with serving(talk) as url, contextlib.closing(Client(base_of(url), {})) as client:
        said = converse(client, base_of(url), {}, question, "m", Hearing(0.0), seconds=20)
    assert (said.broken.partition(":")[0], said.status, said.texts) == (broken, status, [])


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host?x=1"])
def test_what_is_no_server(url: str) -> None:
    with pytest.raises(ValueError, match="is no URL of a server"):
        base_of(url)


def test_what_is_one() -> None:
    assert base_of("https://host/prefix/") == Base("host", 443, True, "/prefix")
    assert base_of("http://[::1]:8000").authority == "[::1]:8000"
    assert base_of("http://host").authority == "host"
