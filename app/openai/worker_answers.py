"""A worker's error answers: whether SDKs can read them as they are, and what to make of them if not."""

from __future__ import annotations

import msgspec

from app.openai.errors import GatewayError, from_status, task_not_served


def from_worker(status: int, body: bytes, *, model: str, path: str) -> GatewayError:
    """An envelope for a worker's error that came without one."""
    if status == 404:  # engines have the routes of their model's task, and no others
        return task_not_served(model, path)
    return from_status(status, _said(body) or f"The worker answered {status} without a word.")


class _Detail(msgspec.Struct):
    detail: str


_detail = msgspec.json.Decoder(_Detail)


def _said(body: bytes) -> str:
    """What a web framework said, if it did."""
    try:
        return _detail.decode(body).detail[:1000]
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return body[:1000].decode("utf-8", "replace")


def has_envelope(body: bytes) -> bool:
    """Whether a worker's error body is one that SDKs can read: a JSON object with an ``error``."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return False
    return isinstance(document, dict) and bool(document.get("error"))
