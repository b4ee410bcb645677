"""A realtime session: a WebSocket over the same sockets; of the websockets package only the protocol.

Two responses, one after the other, in one conversation.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

import gevent
from gevent import socket
from websockets.client import ClientProtocol
from websockets.exceptions import WebSocketException
from websockets.frames import Frame, Opcode
from websockets.http11 import Response as Handshake
from websockets.protocol import State
from websockets.uri import parse_uri

from app.cli.bench.chaos.plan import Question
from app.cli.bench.loadtest.generator.client import READ_BYTES, Base, Client
from app.cli.bench.loadtest.hearing import Hearing

CLOSE_SECONDS: Final = 1.0


class Said:
    """What came of a session."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.tokens = 0
        self.status = 0
        self.broken = ""


def converse(
    client: Client,
    base: Base,
    headers: Mapping[str, str],
    question: Question,
    model: str,
    hearing: Hearing,
    *,
    seconds: float,
) -> Said:
    """All of it. ``hearing`` hears each response's tokens; the first one's first token is that of the session."""
    said = Said()
    timeout = gevent.Timeout.start_new(seconds)
    connection = None
    try:
        connection = client.connect()
        _Session(connection, base, headers, question.path, model).run(question, hearing, said)
    except (OSError, WebSocketException, LookupError, ValueError) as error:  # the last two: not what was agreed on
        said.broken = f"{type(error).__name__}: {error}"
    except gevent.Timeout as fired:
        if fired is not timeout:
            raise
        said.broken = f"TimeoutError: not within {seconds:g} s"
    finally:
        timeout.close()
        if connection is not None:
            connection.close()
    return said


class _Session:
    def __init__(
        self, connection: socket.socket, base: Base, headers: Mapping[str, str], path: str, model: str
    ) -> None:
        scheme = "wss" if base.tls else "ws"
        self._connection = connection
        self._headers = headers
        self._protocol = ClientProtocol(
            parse_uri(f"{scheme}://{base.authority}{base.path}{path}?model={model}"), max_size=1 << 24
        )

    def run(self, question: Question, hearing: Hearing, said: Said) -> None:
        request = self._protocol.connect()
        for name, value in self._headers.items():
            request.headers[name] = value
        self._protocol.send_request(request)
        events = self._events(said)
        if next(events, None) is None:  # the handshake
            raise ConnectionError("the server closed the connection")
        for prompt in question.prompts:
            part = {"type": "input_text", "text": prompt}
            item = {"type": "message", "role": "user", "content": [part]}
            self._send({"type": "conversation.item.create", "item": item})
            self._send({"type": "response.create", "response": {"max_output_tokens": question.tokens}})
            hearing.attentive(time.monotonic())
            text, problem = self._response(events, hearing, said)
            if problem:
                said.broken = problem
                return
            said.texts.append(text)
        self._protocol.send_close(1000)
        self._flush()
        with gevent.Timeout(CLOSE_SECONDS, False):
            for _ in events:
                pass

    def _response(self, events: Iterator[dict[str, Any]], hearing: Hearing, said: Said) -> tuple[str, str]:
        """One response's text, and what went wrong, if anything did."""
        parts: list[str] = []
        for event in events:
            kind = event.get("type")
            if kind == "response.output_text.delta":
                hearing.token(time.monotonic())
                parts.append(event["delta"])
            elif kind == "error":
                return "", f"an error event: {event['error'].get('code')}"
            elif kind == "response.done":
                response = event["response"]
                if response["status"] not in ("completed", "incomplete"):
                    details = response.get("status_details") or {}
                    return "", f"{response['status']}: {(details.get('error') or {}).get('code')}"
                said.tokens += (response.get("usage") or {}).get("output_tokens") or len(parts)
                whole = response["output"][0]["content"][0]["text"]
                return (whole, "") if whole == "".join(parts) else (whole, "its deltas are not its text")
        return "", "the session ended"

    def _send(self, event: dict[str, Any]) -> None:
        self._protocol.send_text(json.dumps(event).encode())
        self._flush()

    def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            if data:
                self._connection.sendall(data)

    def _events(self, said: Said) -> Iterator[dict[str, Any]]:
        """First {} when the handshake is done, then what the server says, until the connection is closed."""
        parts = bytearray()
        self._flush()
        while True:
            data = self._connection.recv(READ_BYTES)
            if data:
                self._protocol.receive_data(data)
            else:
                self._protocol.receive_eof()
            self._flush()
            for event in self._protocol.events_received():
                if isinstance(event, Handshake):
                    said.status = event.status_code
                    if self._protocol.handshake_exc is None:
                        yield {}
                elif isinstance(event, Frame) and event.opcode in (Opcode.TEXT, Opcode.CONT):
                    parts += event.data
                    if event.fin:
                        yield json.loads(bytes(parts))
                        parts.clear()
            if self._protocol.handshake_exc is not None:
                raise self._protocol.handshake_exc
            if not data or self._protocol.state is State.CLOSED:
                return
