"""A worker as a process, light enough for thousands of streams: ``python light_worker.py``; prints its port.

It speaks the watch, and answers any POST from the fields of its body:

    {"id": "a", "stream": true, "events": 5, "seconds": 0.02}

with so many events, so many seconds apart, or with one JSON document after ``seconds``. ``"barrier": 100``: after the
first event of a stream nothing comes until that many streams have begun; ``"pad": 1000`` makes each event so many bytes
longer. What it sends is a function of the body alone
(:func:`expected`), so that whoever asks can tell whether a byte is missing.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from typing import Any, cast

import uvloop

from workers.contract import WATCH_PATH, Role, WatchLine, encode_watch_line

MODEL = "light"
_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
_WATCH = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n"


def event(name: str, number: int, pad: int = 0) -> bytes:
    choice = {"index": 0, "delta": {"content": f"{name}-{number} {'.' * pad}"}, "finish_reason": None}
    return b"data: " + json.dumps({"id": name, "model": MODEL, "choices": [choice]}).encode() + b"\n\n"


def document(name: str) -> bytes:
    return json.dumps({"id": name, "model": MODEL, "choices": [{"message": {"content": f"all of {name}"}}]}).encode()


def expected(body: dict[str, Any]) -> bytes:
    if not body.get("stream"):
        return document(body["id"])
    events = [event(body["id"], number, body.get("pad", 0)) for number in range(body["events"])]
    return b"".join(events) + b"data: [DONE]\n\n"


class Worker:
    def __init__(self) -> None:
        self.begun = 0
        self.held: list[Connection] = []

    def hold(self, connection: Connection, barrier: int) -> None:
        self.begun += 1
        self.held.append(connection)
        if self.begun >= barrier:
            held, self.held = self.held, []
            for each in held:
                each.go_on()


class Connection(asyncio.Protocol):
    """Requests one after the other, each in one piece or several, with a content-length."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._data = b""
        self._body: dict[str, Any] = {}
        self._sent = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._loop = asyncio.get_running_loop()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, rest = self._data.partition(b"\r\n\r\n")
        if not found:
            return
        first, *lines = head.split(b"\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in lines)
        length = int(fields.get(b"content-length", b"0"))
        if len(rest) < length:
            return
        self._data = rest[length:]
        if first.split(b" ")[1] == WATCH_PATH.encode():
            self._transport.write(_WATCH)
            self._watch(0)
            return
        self._body = json.loads(rest[:length])
        self._sent = 0
        if self._body.get("stream"):
            self._transport.write(_STREAM)
            self._next()
        else:
            self._timer = self._loop.call_later(self._body.get("seconds", 0), self._answer)

    def go_on(self) -> None:
        self._timer = self._loop.call_later(self._body["seconds"], self._next)

    def _next(self) -> None:
        if self._sent == self._body["events"]:
            self._chunk(b"data: [DONE]\n\n")
            self._transport.write(b"0\r\n\r\n")
            return
        self._chunk(event(self._body["id"], self._sent, self._body.get("pad", 0)))
        self._sent += 1
        if self._sent == 1 and "barrier" in self._body:
            self._worker.hold(self, self._body["barrier"])
        else:
            self.go_on()

    def _answer(self) -> None:
        body = document(self._body["id"])
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self._transport.write(head + body)

    def _watch(self, number: int) -> None:
        line = WatchLine(
            worker="pod-0",
            instance="life",
            epoch=1,
            engine="a",
            state=Role.ACTIVE,
            models=(MODEL,),
            inflight=0,
            capacity=100_000,
            steps=number,
            seq=number,
            standby=None,
        )
        self._chunk(encode_watch_line(line))
        self._timer = self._loop.call_later(0.5, self._watch, number + 1)

    def _chunk(self, data: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))


async def main() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    worker = Worker()
    server = await asyncio.get_running_loop().create_server(lambda: Connection(worker), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)  # until whoever started us goes


if __name__ == "__main__":
    uvloop.run(main())
