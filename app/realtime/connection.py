"""The shell around a realtime session: its WebSocket on one side, the relay on the other.

A session has two tasks, one that reads and one that writes. Its responses go through the intake like any client's
requests: admitted, relayed, and accounted for. Nothing waits for a slow client but what is for it: its responses pause
at the worker, and its events are not read, while more than a little is queued. A client that takes nothing for too long
is given up. When the client is gone, so are its responses, at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from app.clients.asgi import Receive, Send
from app.each import each
from app.intake.arrival import Arrival
from app.lifecycle import LifecycleMachine
from app.openai.chat_stream import decode_chunk
from app.openai.errors import Header, draining, too_many_sessions
from app.openai.sse import fields, split_events
from app.realtime.response import Failure
from app.realtime.session import Action, RealtimeSession, SendEvent, StartResponse, StopResponse
from app.relay.downstream import DownstreamObserver

HIGH_WATER_BYTES: Final = 256 * 1024
LOW_WATER_BYTES: Final = 64 * 1024
GOING_AWAY: Final = 1001
DRAIN_JITTER_SECONDS: Final = 1.0
"""Sessions that a drain closes while they are idle are spread over so long: their clients all connect again."""

Begin = Callable[["ResponseStream", StartResponse], Arrival]
"""Makes a request of a response: its answer goes to the stream. Not begun yet."""


class ResponseStream:
    """A ``Downstream``: the chat completion behind one response."""

    def __init__(self, connection: RealtimeConnection, response_id: str) -> None:
        self._connection = connection
        self._id = response_id
        self._observer: DownstreamObserver | None = None
        self._arrival: Arrival | None = None
        self._status = 0
        self._events = False
        self._given_up = False
        """Of this answer nothing more is taken."""
        self._body: list[bytes] = []

    def start(self, arrival: Arrival, body: bytes) -> None:
        self._arrival = arrival
        arrival.begin()
        arrival.body(body)  # unless it is over already

    def leave(self) -> None:
        """Nobody waits for this any more: the worker's side is ended at once."""
        if self._arrival is not None:
            self._arrival.leave()

    def pause(self) -> None:
        if self._observer is not None:
            self._observer.pause()

    def resume(self) -> None:
        if self._observer is not None:
            self._observer.resume()

    # A Downstream

    def client(self) -> str:
        return self._connection.client

    def observe(self, observer: DownstreamObserver | None) -> None:
        self._observer = observer
        if observer is not None and self._connection.paused:
            observer.pause()

    def send_head(self, status: int, headers: list[Header]) -> None:
        self._status = status
        self._events = any(n == b"content-type" and v.startswith(b"text/event-stream") for n, v in headers)

    def send_bytes(self, data: bytes) -> None:
        """Of an event stream, whole events."""
        if not self._events:
            self._body.append(data)
            return
        for event in split_events(data):
            name, text = fields(event)
            is_error = name == b"error"
            if self._given_up or text == b"[DONE]" or not (text or is_error):
                continue
            if not self._report(text, is_error=is_error):
                self._given_up = True
                self._fail("bad_answer", "The worker sent an event that cannot be read.")
                self._connection.act((StopResponse(self._id),))

    def end(self) -> None:
        if self._events:
            self._connection.act(self._connection.session.ended(self._id))
            return
        if not self._report(b"".join(self._body), is_error=True):
            self._fail("bad_answer", f"The worker answered {self._status} with an error that cannot be read.")

    def abort(self) -> None:
        self._fail("worker_lost", "The answer broke off.")

    def settle(self, then: Callable[[], None]) -> None:
        self._connection.settle(self._id, then)

    def _report(self, data: bytes, *, is_error: bool) -> bool:
        """Whether it could be read. ``is_error``: it says that it is one."""
        chunk = decode_chunk(data)
        if chunk is None or (is_error and chunk.error is None):
            return False
        self._connection.act(self._connection.session.chunk(self._id, chunk))
        return True

    def _fail(self, code: str, message: str) -> None:
        self._connection.act(self._connection.session.failed(self._id, Failure(code, "server_error", message)))


class RealtimeConnection:
    """One session and its WebSocket, which is accepted already. ``client``: its address. ``write_timeout``: seconds."""

    def __init__(
        self,
        session: RealtimeSession,
        receive: Receive,
        send: Send,
        begin: Begin,
        *,
        client: str,
        write_timeout: float,
    ) -> None:
        self.session = session
        self.client = client
        self.paused = False
        self.responses = 0
        self.close_code = 0
        """What it ended with; 0: the connection was lost."""
        self._receive = receive
        self._send = send
        self._begin = begin
        self._write_timeout = write_timeout
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._work = asyncio.Event()
        """There is something to send, or to close."""
        self._room = asyncio.Event()
        self._room.set()
        self._flushed = True
        self._settling: list[Callable[[], None]] = []
        """To be called once everything said so far has been handed to the server."""
        self._streams: dict[str, ResponseStream] = {}
        self._close_timer: asyncio.TimerHandle | None = None
        self._jitter = DRAIN_JITTER_SECONDS
        self._closing = False
        self._gone = False

    async def run(self) -> None:
        """Until the client or a drain ends the session, and nothing of it is left."""
        try:
            async with asyncio.TaskGroup() as group:
                ends = [group.create_task(self._read()), group.create_task(self._write())]
                self.act(self.session.opened())
                try:
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    self._leave()
                for task in ends:
                    task.cancel()
        finally:
            self._leave()

    def act(self, actions: Iterable[Action]) -> None:
        """Do what the session has decided."""
        for action in actions:
            match action:
                case SendEvent():
                    self._enqueue(action.data)
                case StartResponse():
                    self._start(action)
                case StopResponse():
                    stream = self._streams.get(action.response_id)
                    if stream is not None:  # not within a call that may come from this very stream
                        asyncio.get_running_loop().call_soon(stream.leave)
        self._close_if_finished()

    def settle(self, response_id: str, then: Callable[[], None]) -> None:
        """A response's stream is over."""
        self._streams.pop(response_id, None)
        unsaid = Failure("internal_error", "server_error", "The gateway failed on this response; its log says why.")
        self.act(self.session.failed(response_id, unsaid))
        if self._flushed:
            then()
        else:
            self._settling.append(then)

    def drain(self) -> None:
        """Tell the client; close when its response is done, some time soon if none runs."""
        self.act(self.session.drain())

    def hasten(self) -> None:
        """The drain's time is over: close as soon as may be."""
        self._jitter = 0.0
        if self._close_timer is not None:
            self._close_timer.cancel()
            self._close()

    # Tasks

    async def _read(self) -> None:
        while True:
            await self._room.wait()
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                self.close_code = self.close_code or message.get("code") or 0
                return
            text = message.get("text")
            self.act(self.session.frame(message.get("bytes") or b"" if text is None else text))
            await asyncio.sleep(0)  # many small events that came at once are not everybody's pause

    async def _write(self) -> None:
        try:
            while self._queue or not self._closing:
                if self._queue:
                    await self._send_event(self._queue.popleft())
                    continue
                self._settle_all()
                self._work.clear()
                await self._work.wait()
            self.close_code = GOING_AWAY
            async with asyncio.timeout(self._write_timeout):
                await self._send({"type": "websocket.close", "code": GOING_AWAY, "reason": "shutting down"})
        except (TimeoutError, OSError):
            return  # it takes nothing any more, or has left while we sent: the reader's news comes too late

    async def _send_event(self, event: bytes) -> None:
        async with asyncio.timeout(self._write_timeout):
            await self._send({"type": "websocket.send", "text": event.decode()})
        self._queued_bytes -= len(event)
        if self.paused and self._queued_bytes < LOW_WATER_BYTES:
            self.paused = False
            self._room.set()
            for stream in self._streams.values():
                stream.resume()

    # State

    def _start(self, start: StartResponse) -> None:
        self.responses += 1
        stream = self._streams[start.response_id] = ResponseStream(self, start.response_id)
        stream.start(self._begin(stream, start), start.body)

    def _settle_all(self) -> None:
        self._flushed = True
        settling, self._settling = self._settling, []
        for then in settling:
            then()

    def _enqueue(self, event: bytes) -> None:
        if self._gone or self._closing:
            return
        self._queue.append(event)
        self._queued_bytes += len(event)
        self._flushed = False
        self._work.set()
        if not self.paused and self._queued_bytes > HIGH_WATER_BYTES:
            self.paused = True
            self._room.clear()
            for stream in self._streams.values():
                stream.pause()

    def _close_if_finished(self) -> None:
        if self.session.finished and self._close_timer is None and not (self._gone or self._closing):
            delay = random.uniform(0, self._jitter)  # noqa: S311  # no secret
            self._close_timer = asyncio.get_running_loop().call_later(delay, self._close)

    def _close(self) -> None:
        self._close_timer = None
        self._closing = True
        self._work.set()

    def _leave(self) -> None:
        """The client is gone, or nobody serves it any more."""
        self._gone = True
        if self._close_timer is not None:
            self._close_timer.cancel()
            self._close_timer = None
        self._queue.clear()
        self._settle_all()
        for stream in list(self._streams.values()):
            stream.leave()


class RealtimeSessions:
    """All sessions: how many there may be, and their end. Each is tracked until its task exits."""

    def __init__(self, lifecycle: LifecycleMachine, *, limit: int) -> None:
        self._lifecycle = lifecycle
        self._limit = limit
        self._places = 0
        self._connections: set[RealtimeConnection] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def count(self) -> int:
        return self._places

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """Room for one session, held from before its handshake to its end.

        Raises:
            GatewayError: 503 ``draining``, or 429 ``overloaded``.
        """
        if not self._lifecycle.admits:
            raise draining()
        if self._places >= self._limit:
            raise too_many_sessions(self._limit)
        self._places += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._places -= 1
            if not self._places:
                self._empty.set()

    async def run(self, connection: RealtimeConnection) -> None:
        self._connections.add(connection)
        try:
            if not self._lifecycle.admits:  # since the place was taken
                connection.drain()
            await connection.run()
        finally:
            self._connections.discard(connection)

    def drain(self) -> None:
        each([connection.drain for connection in self._connections])

    def hasten(self) -> None:
        each([connection.hasten for connection in self._connections])

    async def wait_closed(self) -> None:
        """Return once there is no session. The caller sets the deadline."""
        await self._empty.wait()
