"""A relayed request as the gateway understood it, and the report of how it went."""

from __future__ import annotations

from dataclasses import dataclass

from app.openai.errors import GatewayError, Header
from app.openai.surface import RelayRoute


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayRequest:
    """A request that was read and understood as far as routing needs."""

    route: RelayRoute
    target: bytes
    """Path and query as the client wrote them."""
    headers: list[Header]
    body: bytes
    model: str
    """Empty if the request names none."""
    streaming: bool
    request_id: bytes
    gateway_id: bytes


@dataclass(slots=True)
class Report:
    """How a request went, for its access line and metrics."""

    model: str = ""
    status: int = 0
    error: GatewayError | None = None
    """What the gateway itself reported, in whatever form."""
    worker: str = ""
    attempts: int = 0
    retries: int = 0
    first_byte_at: float = 0.0
    disconnected: bool = False
