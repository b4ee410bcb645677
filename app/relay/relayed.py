"""A relayed request as the gateway understood it, and the report of how it went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from app.openai.errors import GatewayError, Header
from app.openai.surface import RelayRoute


class RelayRequest(NamedTuple):
    """A request that was read and understood as far as routing needs."""

    route: RelayRoute
    target: bytes
    """Path and query as the client wrote them."""
    headers: list[Header]
    model: str
    """Empty if the request names none."""
    streaming: bool
    request_id: bytes
    gateway_id: bytes


class Try(NamedTuple):
    """One attempt at a worker that broke, or would not go on. Times are those of ``time.monotonic()``."""

    worker: str
    epoch: int
    began_at: float
    ended_at: float
    ending: str


@dataclass(slots=True)
class Report:
    """How a request went, for its access line and metrics."""

    model: str = ""
    status: int = 0
    error: GatewayError | None = None
    """What the gateway itself reported, in whatever form."""
    worker: str = ""
    epoch: int = 0
    """The promotion of the worker that answered last."""
    attempts: int = 0
    retries: int = 0
    """Times that it was sent, to be started from the beginning again, because a worker broke."""
    resumes: int = 0
    """Times that a worker was asked to go on with its answer."""
    tries: tuple[Try, ...] = ()
    """Those that broke, before the last one."""
    lost: str = ""
    """Why it ended with an error, if a worker broke under it; what follows a colon is said in more detail."""
    repeated: bool = False
    """It was refused without being tried: the same request has killed workers."""
    streamed: bool = False
    """Whether the answer is an event stream of the worker's."""
    waited: float = 0.0
    """Seconds in line for a worker."""
    first_byte_at: float = 0.0
    last_event_at: float = 0.0
    events: int = 0
    """Events of a streamed answer, its end marker included."""
    bytes: int = 0
    """Of the answer's body, as handed to the client's side."""
    disconnected: bool = False
    client: str = ""
    """The client's address, where the request was refused for its key: whoever guesses must be found."""

    @property
    def event_seconds(self) -> float | None:
        """Mean time between the events of a streamed answer; ``None`` if there were not two."""
        if not self.streamed or self.events < 2:
            return None
        return max(0.0, self.last_event_at - self.first_byte_at) / (self.events - 1)
