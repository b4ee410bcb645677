"""Who asks for notes, and who comes with those of another engine: the recorder's place around an engine's application.

Requests of gateways get one (:mod:`workers.recorder`); all others pass as they are. Of a resume the original request is
unwrapped here: the application sees what the client had sent.
"""

from __future__ import annotations

from asyncio import to_thread
from collections.abc import Sequence
from typing import Final

from workers import metrics
from workers.asgi import Message, Receive, Scope, Send, respond_error
from workers.contract import HEADER_REQUEST_ID
from workers.engine import ASGIApp
from workers.recorder import ASKED, RECORDER, Recorder, ResumeRefusedError
from workers.resume import RESUMABLE_PATHS, RESUME_CONTENT_TYPE, Resume, ResumeError, decode_resume

_AT_ONCE_BYTES: Final = 64 * 1024
"""A resume body of so many is read in a few milliseconds."""

MAX_RESUME_BODY_BYTES: Final = 64 * 1024 * 1024
"""Of a resume body, notes and original body together: above what a gateway takes from clients and keeps of notes."""


class RecordedApp:
    """An engine's application whose generating routes leave notes for whoever asks for them, and can be resumed."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        headers: Sequence[tuple[bytes, bytes]] = scope["headers"]
        resuming = _value(headers, b"content-type").startswith(RESUME_CONTENT_TYPE.encode())
        root = _value(headers, HEADER_REQUEST_ID.encode()).decode("latin-1")
        if not resuming and (not root or ASKED not in headers or scope["path"] not in RESUMABLE_PATHS):
            await self._app(scope, receive, send)
            return
        resume: Resume | None = None
        asked = scope
        if resuming:
            if scope["path"] not in RESUMABLE_PATHS:
                await _unreadable(send, 415, f"there is nothing to resume at {scope['path']}")
                return
            if not root:
                await _unreadable(
                    send, 400, f"a resume needs {HEADER_REQUEST_ID}, which the answer's ids are made from"
                )
                return
            try:
                raw = await _read(receive)
                # A long one in a thread: others' answers go on meanwhile, and so does the beat of this loop.
                at_once = len(raw) <= _AT_ONCE_BYTES
                found, body = decode_resume(raw) if at_once else await to_thread(decode_resume, raw)
            except ResumeError as error:
                await _unreadable(send, 400, f"the resume body cannot be read: {error}")
                return
            scope, receive = _original(scope, body), _replayed_body(body, receive)
            if found.events or found.outputs:  # else nothing was said: it begins
                resume = found
        recorder = Recorder(send, root=root, resume=resume, scope=asked)
        if resume is not None and resume.unresumable:
            await recorder.refuse(f"its notes say {resume.unresumable}", cause="notes")
            return
        token = RECORDER.set(recorder)
        try:
            await self._app(scope, receive, recorder.send)
        except ResumeRefusedError as error:
            await recorder.refuse(str(error), cause=error.cause)
        finally:
            RECORDER.reset(token)


def _value(headers: Sequence[tuple[bytes, bytes]], name: bytes) -> bytes:
    return next((value for key, value in headers if key == name), b"")


async def _read(receive: Receive) -> bytes:
    """The whole body.

    Raises:
        ResumeError: it is larger than any resume body.
    """
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ResumeError("it was not sent to its end")
        part = message.get("body", b"")
        more = message.get("more_body", False)
        size += len(part)
        if size > MAX_RESUME_BODY_BYTES:
            raise ResumeError(f"it is larger than {MAX_RESUME_BODY_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


def _original(scope: Scope, body: bytes) -> Scope:
    """The request as the client had sent it."""
    kept = [(name, value) for name, value in scope["headers"] if name not in (b"content-length", b"content-type")]
    kept += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    return {**scope, "headers": kept}


def _replayed_body(body: bytes, receive: Receive) -> Receive:
    parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return parts.pop() if parts else await receive()

    return replayed


async def _unreadable(send: Send, status: int, message: str) -> None:
    metrics.record_resume("unreadable")
    await respond_error(send, status, message=message, kind="invalid_request_error", code="invalid_resume")
