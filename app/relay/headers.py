"""Which headers travel, in which direction. Pure.

End-to-end headers pass; hop-by-hop ones, credentials and everything between gateway and workers do not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from app.http_headers import find
from app.openai.errors import Header
from workers.contract import HEADER_PREFIX, HEADER_REQUEST_ID, HEADER_STREAM

REQUEST_ID = b"x-request-id"
PROCESSING_MS = b"openai-processing-ms"
"""From the whole request to the head of its answer."""
_PREFIX = HEADER_PREFIX.encode()
_HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
# The gateway's own framing and encoding; a client's credentials are for the gateway, not for workers.
_NOT_UPSTREAM = _HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"accept-encoding",
    b"expect",
    b"authorization",
    b"x-api-key",
    b"api-key",
    b"cookie",
    REQUEST_ID,
}
# The gateway's server adds its own date; the length is that of what the gateway sends; a worker has no sessions.
_NOT_DOWNSTREAM = _HOP_BY_HOP | {b"content-length", b"date", b"server", b"set-cookie", PROCESSING_MS, REQUEST_ID}
_OURS = HEADER_REQUEST_ID.encode()
_NOTES_WANTED = b"%b: 1\r\n" % HEADER_STREAM.encode()
_SAFE_ID = re.compile(rb"[A-Za-z0-9._:+/=-]{1,128}")


def client_request_id(headers: Iterable[Header]) -> bytes | None:
    """The client's ``x-request-id`` if it is fit for a header and a log line: short, and of harmless characters."""
    given = find(headers, REQUEST_ID)
    return given if given is not None and _SAFE_ID.fullmatch(given) else None


def _end_to_end(headers: Iterable[Header], withheld: frozenset[bytes]) -> list[Header]:
    """Without ``withheld``, which has the hop-by-hop ones, those that ``connection`` names, and ours."""
    named: list[bytes] = []
    kept = []
    for item in headers:
        name = item[0]
        if name in withheld:
            if name == b"connection":
                named += item[1].lower().split(b",")
        elif not name.startswith(_PREFIX):
            kept.append(item)
    if named:
        dropped = {token.strip() for token in named}
        kept = [item for item in kept if item[0] not in dropped]
    return kept


def upstream_headers(
    headers: Sequence[Header],
    *,
    length: int,
    client_id: bytes,
    gateway_id: bytes,
    notes: bool,
    content_type: bytes | None = None,
) -> bytes:
    """Header lines of a request to a worker, without ``host`` and without the empty line. ``notes``: ask for token
    notes; ``content_type``: in the place of the client's."""
    lines = [b"%b: %b\r\n" % item for item in _end_to_end(headers, _NOT_UPSTREAM)]
    if content_type is not None:
        lines = [line for line in lines if not line.startswith(b"content-type:")]
        lines.append(b"content-type: %b\r\n" % content_type)
    lines.append(
        b"accept-encoding: identity\r\ncontent-length: %d\r\nx-request-id: %b\r\n%b: %b\r\n"
        % (length, client_id, _OURS, gateway_id)
    )
    if notes:
        lines.append(_NOTES_WANTED)
    return b"".join(lines)


def downstream_headers(headers: Sequence[Header], *, request_id: bytes) -> list[Header]:
    """A worker's response headers as the client gets them, without a length."""
    kept = _end_to_end(headers, _NOT_DOWNSTREAM)
    kept.append((REQUEST_ID, request_id))
    return kept


def stream_headers(headers: Sequence[Header], *, request_id: bytes) -> list[Header]:
    """The head of an event stream: nothing on the way may cache or buffer it."""
    own = (b"cache-control", b"x-accel-buffering", b"content-type")
    kept = [item for item in downstream_headers(headers, request_id=request_id) if item[0] not in own]
    kept += [
        (b"content-type", find(headers, b"content-type") or b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ]
    return kept
