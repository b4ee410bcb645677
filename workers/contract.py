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
"""On a 503 of a worker: nothing was started here, pick another worker; this costs no budget."""

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
