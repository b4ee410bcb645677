"""An open-loop load: requests go out at their times, whatever becomes of those before, and each notes what it sees.

Every prompt is another one, so that no prefix is cached but a request's own. Answers are streamed; an event is a token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import urlsplit

import httptools
import msgspec

from app.cli.bench.failover.series import Record
from app.cli.bench.streaming import prompt_of
from app.cli.bench.together import together

CONNECT_SECONDS: Final = 30.0
_READ_BYTES: Final = 1 << 16
_DONE: Final = b"data: [DONE]"


class OpenLoad:
    """One request every ``period`` seconds from ``running`` on, until ``end``."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        headers: Mapping[str, str],
        period: float,
        prompt_tokens: int,
        answer_tokens: int,
    ) -> None:
        self._url = urlsplit(url)
        self._model = model
        self._headers = dict(headers)
        self._period = period
        self._prompt_tokens = prompt_tokens
        self._answer_tokens = answer_tokens
        self._over = asyncio.Event()
        self.records: list[Record] = []

    def end(self) -> None:
        """Send nothing new; what was sent is waited for."""
        self._over.set()

    @property
    def open(self) -> int:
        """Requests whose answers have not ended."""
        return sum(not record.end for record in self.records)

    @asynccontextmanager
    async def running(self, *, patience: float) -> AsyncIterator[OpenLoad]:
        """Send while inside, until ``end``; on leaving, answers are waited for, ``patience`` seconds at most."""
        tasks: set[asyncio.Task[None]] = set()
        try:
            async with together() as group:
                sending = group.create_task(self._send(group, tasks))
                yield self
                self.end()
                await sending
                if tasks:
                    await asyncio.wait(tasks, timeout=patience)
                for task in tasks:
                    task.cancel()
        finally:
            for record in self.records:
                record.end = record.end or "it had not ended when the run did"

    async def _send(self, group: asyncio.TaskGroup, tasks: set[asyncio.Task[None]]) -> None:
        began, number = time.monotonic(), 0
        while True:
            due = began + number * self._period
            payload = self._payload(number)  # before it is due: a long prompt takes milliseconds to write
            try:
                async with asyncio.timeout(max(0.0, due - time.monotonic())):
                    await self._over.wait()
                return
            except TimeoutError:
                pass
            record = Record(number=number, due=due)
            self.records.append(record)
            task = group.create_task(self._ask(record, payload))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            number += 1

    def _payload(self, number: int) -> bytes:
        """One request as it goes over the wire."""
        body = msgspec.json.encode(
            {
                "model": self._model,
                "prompt": prompt_of(number, self._prompt_tokens),
                "max_tokens": self._answer_tokens,
                "temperature": 0,
                "stream": True,
                "ignore_eos": True,
            }
        )
        lines = {
            "host": self._url.netloc,
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            "x-request-id": request_id(number),
            **self._headers,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        return f"POST {self._url.path} HTTP/1.1\r\n{head}\r\n".encode() + body

    async def _ask(self, record: Record, payload: bytes) -> None:
        record.sent = time.monotonic()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(self._url.hostname, self._url.port)
        except (OSError, TimeoutError) as error:
            record.end = f"no connection: {error}"
            return
        try:
            writer.write(payload)
            record.end = await _read(reader, record)
        except (OSError, httptools.HttpParserError) as error:
            record.end = f"{type(error).__name__}: {error}"
        finally:
            writer.close()


def request_id(number: int) -> str:
    """By which the gateway's log has a request."""
    return f"failover-{number}"


async def _read(reader: asyncio.StreamReader, record: Record) -> str:
    """Read the answer to its end, and say how it ended."""
    answer = _Answer(record)
    parser = httptools.HttpResponseParser(answer)
    while not answer.over and (data := await reader.read(_READ_BYTES)):
        answer.now = time.monotonic()
        parser.feed_data(data)
        answer.status = parser.get_status_code()
    if answer.problem:
        return answer.problem
    if answer.status not in (0, 200):
        return f"status {answer.status}: {bytes(answer.rest[:300])!r}"
    return Record.WHOLE if answer.done else f"it ended after {len(record.at)} tokens, without its end"


class _Answer:
    """What ``httptools`` finds."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self.rest = bytearray()
        """What has come of an event, and of an answer that is no stream all of it."""
        self.now = 0.0
        self.status = 0
        self.problem = ""
        self.done = self.over = False

    def on_body(self, data: bytes) -> None:
        *events, rest = bytes(self.rest + data).split(b"\n\n")
        self.rest = bytearray(rest)
        for event in events:
            if event == _DONE:
                self.done = True
            elif event.startswith(b"data: "):
                self._event(event[6:])

    def on_message_complete(self) -> None:
        self.over = True

    def _event(self, raw: bytes) -> None:
        event: dict[str, Any] = msgspec.json.decode(raw)
        if "error" in event:
            self.problem = self.problem or f"an error: {str(event['error'])[:300]}"
        elif event.get("choices"):
            self._record.at.append(self.now)
