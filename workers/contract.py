"""What gateway and worker say to each other: states, header names, the watch line.

This is the only module of ``workers`` that the gateway may import, so it stays pure: no asyncio, sockets,
environment or clock. Change a form here, and nowhere else.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

WATCH_PATH = "/internal/watch"
"""Path of the watch stream on a worker's serving port."""

WATCH_CONTENT_TYPE = "application/x-ndjson"

MAX_WATCH_LINE_BYTES = 16 * 1024
"""A longer line is a broken worker, not a worker with a lot to say."""

HEADER_PREFIX = "x-hotspare-"
"""Headers with this prefix belong to gateway and workers; the gateway drops those that a client sends."""

HEADER_REQUEST_ID = "x-hotspare-request-id"
"""The gateway's own, unique id of a request; the same on every attempt."""

HEADER_RESELECT = "x-hotspare-reselect"
"""On a 503 of a worker: nothing was started here, pick another worker; this costs no budget. On a 401: the same, since
the worker token was not the right one."""

HEADER_WORKER_TOKEN = "x-hotspare-worker-token"  # noqa: S105 - a name
"""What a worker knows its gateways by, on requests and on the watch."""

CODE_WORKER_TOKEN = "invalid_worker_token"  # noqa: S105 - a name
"""Code of the 401 for a request without the right worker token."""

MAX_WORKER_TOKEN_BYTES = 512

HEADER_STREAM = "x-hotspare-stream"
"""``1`` on a request: put token notes before the units of a streamed answer, and frame a whole one. On the answer: the
notes are there; ``body``: and an answer that is no stream comes behind them, in a frame (``workers.resume``)."""

STREAM_FRAMED = "body"

INTERNAL_PREFIX = "/internal/"
"""Paths under this prefix are between gateway and worker; never reachable through the gateway."""


class Role(StrEnum):
    """Where an engine is in its life. The transitions stand in ``workers.role``."""

    INIT = "INIT"
    STANDBY = "STANDBY"
    PROMOTING = "PROMOTING"
    ACTIVE = "ACTIVE"
    HANDOVER = "HANDOVER"
    DRAINING = "DRAINING"
    STOPPED = "STOPPED"
    FAILED = "FAILED"


class WatchLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the watch: what the engine that holds the lock says about itself and its pod.

    ``instance`` is the pod's life, ``epoch`` the promotion within it: compare both for equality only.
    ``steps`` counts engine steps and advances while work is done, so that a long prefill is not taken for silence.
    ``standby`` is ``None`` where the pod has no other engine. ``kv_usage`` is a fraction, 0 to 1.
    ``capacity`` is how many requests it answers at a time (0: it does not say), ``refused`` how many it has turned away
    for want of room in this promotion, ``gateways`` how many watches there are. ``max_model_len`` is the longest that
    prompt and answer may be together, in tokens, of each of its models (0: it does not say). ``lock_seconds`` is how
    long it has had the lock (-1: it does not say).
    """

    worker: str
    instance: str
    epoch: int
    engine: str
    state: Role
    models: tuple[str, ...]
    inflight: int
    capacity: int
    steps: int
    seq: int
    standby: Role | None = None
    kv_usage: float = 0.0
    refused: int = 0
    gateways: int = 1
    max_model_len: int = 0
    lock_seconds: float = -1.0


class WorkerTokenError(ValueError):
    """A text that is no worker token, or holds none; the message does not repeat it."""


def parse_worker_tokens(raw: bytes) -> tuple[str, ...]:
    """The tokens of a file: one a line, empty lines and those that begin with ``#`` left out. The gateway sends the
    first; a worker accepts any.

    Raises:
        WorkerTokenError: there is none, or a line is not one.
    """
    found = []
    for number, line in enumerate(raw.splitlines(), 1):
        token = line.strip()
        if not token or token.startswith(b"#"):
            continue
        if len(token) > MAX_WORKER_TOKEN_BYTES or not all(0x21 <= byte <= 0x7E for byte in token):
            raise WorkerTokenError(
                f"line {number} is not a token: at most {MAX_WORKER_TOKEN_BYTES} printable ASCII characters, no spaces"
            )
        found.append(token.decode())
    if not found:
        raise WorkerTokenError("it holds no token")
    return tuple(found)


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(WatchLine)


def encode_watch_line(line: WatchLine) -> bytes:
    """The line as it travels, its newline included."""
    return _encoder.encode(line) + b"\n"


def decode_watch_line(raw: bytes) -> WatchLine:
    """Parse one line, with or without its newline.

    Raises:
        msgspec.DecodeError: not JSON, or not a watch line. Unknown fields are ignored, so that a gateway can be
            older than its workers.
    """
    return _decoder.decode(raw)
