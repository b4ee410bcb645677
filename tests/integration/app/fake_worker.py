"""A worker made of sockets: speaks the watch, answers as it is told, and breaks on command.

What the next request meets is a *behaviour*, a coroutine function; behaviours are used up in order, then the default
one answers. Everything observable is an event or a list, so that tests wait and never sleep.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import zlib
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

from workers.contract import WATCH_PATH, Role, WatchLine, encode_watch_line

MODEL = "tiny"


@dataclass
class Call:
    """One request as the worker got it."""

    worker: FakeWorker
    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    """The gateway closed the connection while the request ran."""
    go: asyncio.Event = field(default_factory=asyncio.Event)
    """For behaviours that wait for the test."""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    def cut(self, *, reset: bool) -> None:
        """Break the connection, with RST or with FIN."""
        if reset:
            transport_socket = self.writer.get_extra_info("socket")
            transport_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.writer.transport.abort()
        else:
            self.writer.close()


Behaviour = Callable[[Call], Awaitable[None]]


def event(text: str) -> bytes:
    document = {"id": "c-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    choice = {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": None}
    return b"data: " + json.dumps(document | {"choices": [choice]}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def head(status: int, **headers: object) -> bytes:
    lines = [f"HTTP/1.1 {status} Status"] + [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


STREAM_HEAD = head(200, content_type="text/event-stream; charset=utf-8", transfer_encoding="chunked")


def answers(status: int = 200, document: Any = None, **headers: object) -> Behaviour:
    async def behave(call: Call) -> None:
        body = json.dumps(completion(call) if document is None else document).encode()
        await call.send(head(status, content_type="application/json", content_length=len(body), **headers) + body)

    return behave


def completion(call: Call) -> dict[str, Any]:
    message = {"role": "assistant", "content": f"from {call.worker.name}"}
    return {
        "id": "c-1",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
    }


def streams(*pieces: bytes, end: bytes = DONE) -> Behaviour:
    """A stream of these pieces, each in a chunk of its own, to a proper end."""

    async def behave(call: Call) -> None:
        await call.send(STREAM_HEAD)
        for piece in (*pieces, end):
            if piece:
                await call.send(chunk(piece))
        await call.send(b"0\r\n\r\n")

    return behave


def streams_units(*units: list[bytes], cut: int | None = None) -> Behaviour:
    """Units of events with their token notes, each in a chunk of its own; whole, or cut after so many bytes."""

    async def behave(call: Call) -> None:
        data = b""
        count = crc = 0
        for number, events in enumerate((*units, [DONE])):
            count += len(events)
            crc = zlib.crc32(b"".join(events), crc)
            data += chunk(b": t e=%d n=%d c=%08x g=0:%d\n" % (count, len(events), crc, number) + b"".join(events))
        noted = STREAM_HEAD[:-2] + b"x-hotspare-stream: 1\r\n\r\n"
        if cut is None:
            await call.send(noted + data + b"0\r\n\r\n")
        else:
            await call.send(noted + data[:cut])
            call.cut(reset=False)

    return behave


def streams_then_waits(*pieces: bytes, then: bytes = b"") -> Behaviour:
    """A stream that pauses after these pieces until the test says ``call.go``, then ends properly or is gone."""

    async def behave(call: Call) -> None:
        await call.send(STREAM_HEAD)
        for piece in pieces:
            await call.send(chunk(piece))
        await wait_for_either(call.go, call.closed)
        if not call.closed.is_set():
            await call.send(chunk(then + DONE) + b"0\r\n\r\n")

    return behave


def cuts(data: bytes = b"", *, reset: bool = False) -> Behaviour:
    """Sends these raw bytes and breaks the connection once the test says ``go``; at once if there are none."""

    async def behave(call: Call) -> None:
        if data:
            await call.send(data)
            await wait_for_either(call.go, call.closed)
        call.cut(reset=reset)

    return behave


def sends_and_cuts(data: bytes, *, reset: bool = False) -> Behaviour:
    async def behave(call: Call) -> None:
        await call.send(data)
        call.cut(reset=reset)

    return behave


def reselects() -> Behaviour:
    return answers(
        503, {"error": {"message": "full", "type": "x", "param": None, "code": "full"}}, x_hotspare_reselect=1
    )


async def hangs(call: Call) -> None:
    """Says nothing until the gateway gives up or the test lets it answer."""
    await wait_for_either(call.go, call.closed)
    if not call.closed.is_set():
        await answers()(call)


async def wait_for_either(*events: asyncio.Event) -> None:
    tasks = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def by_body(call: Call) -> None:
    """The default: a stream if one was asked for, else a whole answer."""
    if call.json.get("stream"):
        await streams(event(f"from {call.worker.name}"), event(" done"))(call)
    else:
        await answers()(call)


class FakeWorker:
    """Use as ``async with``. ``port`` 0 takes any free one; the same object can be started again after :meth:`die`."""

    def __init__(
        self,
        name: str = "pod-0",
        *,
        models: tuple[str, ...] = (MODEL,),
        epoch: int = 1,
        port: int = 0,
        capacity: int = 4096,
    ) -> None:
        self.name = name
        self.port = port
        self.line = WatchLine(
            worker=name,
            instance=f"{name}-life",
            epoch=epoch,
            engine="a",
            state=Role.ACTIVE,
            models=models,
            inflight=0,
            capacity=capacity,
            steps=0,
            seq=0,
            standby=Role.STANDBY,
        )
        self.calls: list[Call] = []
        self.default: Behaviour = by_body
        self.watch_behaviour: Behaviour | None = None
        self.watches_opened = 0
        self.heartbeat = True
        self._next: deque[Behaviour] = deque()
        self._arrived = asyncio.Condition()
        self._watchers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def epoch(self, number: int) -> None:
        """The next start is another promotion."""
        self.line = msgspec.structs.replace(self.line, epoch=number)

    async def die(self) -> None:
        """As a SIGKILL looks from outside: listener and all connections gone."""
        self.stop_listening()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def will(self, *behaviours: Behaviour) -> None:
        self._next.extend(behaviours)

    def say(self, **changes: Any) -> None:
        """Change the watch line and send it."""
        self.line = msgspec.structs.replace(self.line, seq=self.line.seq + 1, **changes)
        for writer in self._watchers:
            if not writer.is_closing():
                writer.write(chunk(encode_watch_line(self.line)))

    def drop_watches(self) -> None:
        for writer in self._watchers:
            writer.close()

    async def call(self, number: int = 0) -> Call:
        """Wait for the request with this number, from 0."""
        async with asyncio.timeout(5):
            async with self._arrived:
                await self._arrived.wait_for(lambda: len(self.calls) > number)
        return self.calls[number]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:
            pass  # die() ends us; nothing awaits this task for a result
        finally:
            self._watchers.discard(writer)
            self._tasks.discard(task)
            writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        raw = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = raw.split("\r\n")
        method, target, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        call = Call(self, method, target, headers, body, reader, writer)
        if target == WATCH_PATH:
            await (self.watch_behaviour or self._watch)(call)
            return False
        async with self._arrived:
            self.calls.append(call)
            self._arrived.notify_all()
        behaviour = self._next.popleft() if self._next else self.default
        running = asyncio.ensure_future(behaviour(call))
        eof = asyncio.create_task(reader.read(1))
        try:
            await asyncio.wait((running, eof), return_when=asyncio.FIRST_COMPLETED)
            if eof.done() and not running.done():
                call.closed.set()
            await running
        finally:
            eof.cancel()
            running.cancel()
            await asyncio.gather(eof, running, return_exceptions=True)
        return not writer.is_closing() and not call.closed.is_set()

    async def _watch(self, call: Call) -> None:
        await call.send(head(200, content_type="application/x-ndjson", transfer_encoding="chunked"))
        self._watchers.add(call.writer)
        await call.send(chunk(encode_watch_line(self.line)))
        self.watches_opened += 1
        while not call.writer.is_closing():
            await asyncio.sleep(0.1)
            if self.heartbeat:
                self.say()
