"""One small HTTP request to a neighbour's admin port: probes, the spare's role, hand-overs. Not for what streams."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Mapping
from typing import Final

from workers.hosts import authority

MAX_ANSWER_BYTES: Final = 256 * 1024


class GetFailed(Exception):
    """No whole, sensible answer came within the deadline; the message says what came instead."""


async def http_get(
    host: str,
    port: int,
    path: str,
    *,
    timeout_seconds: float,
    headers: Mapping[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
) -> tuple[int, bytes]:
    """Status and body of ``GET path``, on a connection of its own that is closed afterwards.

    Raises:
        GetFailed: refused, reset, too slow, too long, or not HTTP.
    """
    return await _within(timeout_seconds, host, port, path, headers, tls, None)


async def http_post(
    host: str, port: int, path: str, body: bytes, *, timeout_seconds: float, headers: Mapping[str, str] | None = None
) -> tuple[int, bytes]:
    """The same for ``POST path`` with a JSON document."""
    return await _within(timeout_seconds, host, port, path, headers, None, body)


async def _within(
    timeout_seconds: float,
    host: str,
    port: int,
    path: str,
    headers: Mapping[str, str] | None,
    tls: ssl.SSLContext | None,
    body: bytes | None,
) -> tuple[int, bytes]:
    try:
        async with asyncio.timeout(timeout_seconds):
            return await _ask(host, port, path, headers or {}, tls, body)
    except TimeoutError:
        raise GetFailed(f"no answer from {authority(host, port)}{path} within {timeout_seconds:g} s") from None
    except OSError as error:
        raise GetFailed(f"{authority(host, port)}{path}: {error.strerror or error}") from error


async def _ask(
    host: str, port: int, path: str, headers: Mapping[str, str], tls: ssl.SSLContext | None, sent: bytes | None
) -> tuple[int, bytes]:
    more_lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    asked = authority(host, port)
    reader, writer = await asyncio.open_connection(host, port, limit=MAX_ANSWER_BYTES, ssl=tls)
    try:
        method = "GET" if sent is None else "POST"
        if sent is not None:
            more_lines += f"content-type: application/json\r\ncontent-length: {len(sent)}\r\n"
        request = f"{method} {path} HTTP/1.1\r\nhost: {asked}\r\nconnection: close\r\n{more_lines}\r\n"
        writer.write(request.encode() + (sent or b""))
        answer = await reader.read(MAX_ANSWER_BYTES + 1)
        while (more := await reader.read(MAX_ANSWER_BYTES + 1)) and len(answer) <= MAX_ANSWER_BYTES:
            answer += more
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    if len(answer) > MAX_ANSWER_BYTES:
        raise GetFailed(f"{asked}{path} answers more than {MAX_ANSWER_BYTES} bytes")
    if not answer:
        raise GetFailed(f"{asked}{path} ended the connection without an answer")
    head, separator, body = answer.partition(b"\r\n\r\n")
    fields = head.split(b" ", 2)
    if not separator or len(fields) < 2 or not fields[0].startswith(b"HTTP/1.") or not fields[1].isdigit():
        raise GetFailed(f"{asked}{path} does not answer in HTTP")
    return int(fields[1]), body
