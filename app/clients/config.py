"""What all connections of clients share: uvicorn's configuration, and ours."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from typing import Any

from uvicorn import Config

from app.clients.connections import Connections
from app.clients.cors import Cors
from app.clients.direct import DirectEndpoint
from app.intake.request_ids import RequestIds
from app.security.tls import ServerTls

HANDSHAKE_SECONDS = 10.0


WRITE_BUFFER_BYTES = 64 * 1024
"""What may wait for a slow reader before its worker is read no further. For TLS the loop's own figure is eight times
that."""


class ClientConfig(Config):
    """uvicorn's configuration and ours. Durations in seconds. ``direct``: path → what is served without ASGI.
    ``on_refusal`` is told the code of each error that the connection itself answers with."""

    def __init__(
        self,
        app: Any,
        *,
        head_seconds: float,
        direct: Mapping[bytes, DirectEndpoint] | None = None,
        ids: RequestIds | None = None,
        cors: Cors | None = None,
        connections: Connections | None = None,
        tls: ServerTls | None = None,
        handshake_seconds: float = HANDSHAKE_SECONDS,
        on_refusal: Callable[[str], None] | None = None,
        http: type[asyncio.Protocol],
        **options: Any,
    ) -> None:
        super().__init__(app, http=http, **options)
        self.tls = tls
        self.handshake_seconds = handshake_seconds
        self.head_seconds = head_seconds
        self.direct = dict(direct or {})
        self.ids = ids or RequestIds()
        self.cors = cors
        self.on_refusal = on_refusal
        self.connections = connections or Connections(limit=sys.maxsize, on_refused=lambda: None)
