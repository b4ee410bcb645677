"""What the gateway concludes from a worker's watch. Pure: facts and the time in, conclusions out.

Nothing here is kept: ``UP``, ``SUSPECT``, ``DOWN`` and *routable* are computed whenever a fact changes. All times are
``time.monotonic()`` seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from workers.contract import Role


class WorkerState(StrEnum):
    UP = "UP"
    SUSPECT = "SUSPECT"
    """No new requests: a stream of this worker broke, or its watch is silent."""
    DOWN = "DOWN"
    """No watch."""


class ReplicaKey(NamedTuple):
    """One promotion of one pod's life."""

    worker: str
    instance: str
    epoch: int


@dataclass(frozen=True, slots=True)
class WatchFacts:
    connected: bool
    line_at: float
    """When the watch last said something."""
    suspected_at: float | None = None
    """When a stream of this worker last broke."""


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    key: ReplicaKey
    state: WorkerState
    reported: Role


SUSPICION_SECONDS = 0.25
"""A line that comes this long after a stream broke was written after it: the worker lives. Earlier ones may have been
on their way when it died; a dying process with 1 GB of memory needs about 0.1 s to close its last connection."""

SILENT_WATCH_FACTOR = 10
"""After this many heartbeat timeouts the watch itself is given up: no packet ever says that a partition happened."""

FAST_RECONNECT_SECONDS = 10.0
FAST_DELAY_SECONDS = 0.025
SLOW_DELAY_SECONDS = 0.25
_BACKOFF_SECONDS = 5.0


def derive_state(facts: WatchFacts, *, now: float, heartbeat_timeout: float) -> WorkerState:
    if not facts.connected:
        return WorkerState.DOWN
    if facts.suspected_at is not None or now - facts.line_at >= heartbeat_timeout:
        return WorkerState.SUSPECT
    return WorkerState.UP


def clears_suspicion(suspected_at: float, line_at: float) -> bool:
    """Whether a watch line proves that the worker outlived the break of one of its streams."""
    return line_at - suspected_at >= SUSPICION_SECONDS


def routable_keys(replicas: Iterable[ReplicaFacts]) -> frozenset[ReplicaKey]:
    """Which replicas get new requests: up, serving, and of the highest epoch that its instance is known with.

    An older epoch never routes again once a newer one has spoken, whatever it says about itself: the lock has moved on.
    """
    known = list(replicas)
    highest: dict[tuple[str, str], int] = {}
    for replica in known:
        life = replica.key[:2]
        highest[life] = max(highest.get(life, replica.key.epoch), replica.key.epoch)
    return frozenset(
        replica.key
        for replica in known
        if replica.state is WorkerState.UP
        and replica.reported is Role.ACTIVE
        and replica.key.epoch == highest[replica.key[:2]]
    )


def reconnect_delay(down_for: float, fraction: float) -> float:
    """Seconds until the next attempt to reach a worker that has been away for ``down_for`` seconds.

    25 ms for the first 10 s, so that a promotion is noticed at once, then growing to 250 ms. ``fraction`` (0 to 1,
    random) spreads several gateways over plus or minus 20 %.
    """
    growth = min(1.0, max(0.0, (down_for - FAST_RECONNECT_SECONDS) / _BACKOFF_SECONDS))
    delay = FAST_DELAY_SECONDS + growth * (SLOW_DELAY_SECONDS - FAST_DELAY_SECONDS)
    return delay * (0.8 + 0.4 * fraction)
