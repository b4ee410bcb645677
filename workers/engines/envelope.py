"""Errors of an engine's own application in OpenAI's envelope, where it has another form."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from workers.asgi import Message, Send

_MAX_BYTES: Final = 64 * 1024
"""A longer error goes on as it is."""
_JSON: Final = [(b"content-type", b"application/json")]


def enveloped(send: Send) -> Send:
    """``send``, but that an answer of 400 and above leaves as ``{"error": {…}}``; 422 is OpenAI's 400."""
    held: Message | None = None
    body = bytearray()

    async def sent(message: Message) -> None:
        nonlocal held
        if message["type"] == "http.response.start" and message["status"] >= 400:
            held = message
            return
        if held is None:
            await send(message)
            return
        body.extend(message.get("body", b""))
        more = message.get("more_body", False)
        if more and len(body) <= _MAX_BYTES:
            return
        start, held = held, None
        if more:
            await send(start)
            await send({"type": "http.response.body", "body": bytes(body), "more_body": True})
            return
        status = 400 if start["status"] == 422 else start["status"]
        said = in_envelope(status, bytes(body))
        kept = [(name, value) for name, value in start["headers"] if name not in (b"content-type", b"content-length")]
        headers = [*kept, *_JSON, (b"content-length", b"%d" % len(said))]
        await send({**start, "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": said})

    return sent


def in_envelope(status: int, body: bytes) -> bytes:
    """The body of an error in OpenAI's form: as it is if it has it already."""
    said: Any = None
    try:
        said = msgspec.json.decode(body)
    except msgspec.DecodeError:
        said = body.decode("utf-8", "replace")
    error = said.get("error", said) if isinstance(said, dict) else said
    if isinstance(said, dict) and isinstance(said.get("error"), dict) and isinstance(said["error"].get("message"), str):
        return body
    message = error
    param = None
    if isinstance(error, dict):
        message = error.get("message", error.get("detail", error))
        param = error.get("param")
    if not isinstance(message, str):
        message = msgspec.json.encode(message).decode()
    kind = "invalid_request_error" if status < 500 else "server_error"
    return msgspec.json.encode(
        {"error": {"message": message or f"the engine answered {status}", "type": kind, "param": param, "code": None}}
    )
