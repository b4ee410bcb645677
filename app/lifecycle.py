"""The life of the gateway process, as a table. Pure.

What ``/health`` and ``/live`` say, and whether a request is admitted, is read off the state and stored nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from types import MappingProxyType


class Lifecycle(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"
    STOPPED = "stopped"


class LifecycleEvent(StrEnum):
    DISCOVERED = "discovered"
    """The first discovery is done: each known address was tried once."""
    DRAIN = "drain"
    """Somebody asked the process to end."""
    DRAINED = "drained"
    """Nothing is in flight any more, or the drain's time is over."""
    CLOSED = "closed"
    """Listeners and connections are closed."""


TRANSITIONS: Mapping[tuple[Lifecycle, LifecycleEvent], Lifecycle] = MappingProxyType(
    {
        (Lifecycle.STARTING, LifecycleEvent.DISCOVERED): Lifecycle.READY,
        (Lifecycle.STARTING, LifecycleEvent.DRAIN): Lifecycle.DRAINING,
        (Lifecycle.READY, LifecycleEvent.DRAIN): Lifecycle.DRAINING,
        # Discovery may finish while we drain already: that changes nothing.
        (Lifecycle.DRAINING, LifecycleEvent.DISCOVERED): Lifecycle.DRAINING,
        (Lifecycle.DRAINING, LifecycleEvent.DRAINED): Lifecycle.STOPPING,
        (Lifecycle.STOPPING, LifecycleEvent.CLOSED): Lifecycle.STOPPED,
    }
)


class IllegalTransition(RuntimeError):
    """An event that has no meaning in this state: a bug of the caller."""


class LifecycleMachine:
    """Holds the state and refuses what the table does not know."""

    def __init__(self, on_change: Callable[[Lifecycle], None] | None = None) -> None:
        self._state = Lifecycle.STARTING
        self._on_change = on_change

    @property
    def state(self) -> Lifecycle:
        return self._state

    @property
    def admits(self) -> bool:
        """Whether new requests are taken. While starting they are: they wait for a worker like any other."""
        return self._state in (Lifecycle.STARTING, Lifecycle.READY)

    @property
    def live(self) -> bool:
        return self._state in (Lifecycle.STARTING, Lifecycle.READY, Lifecycle.DRAINING)

    def fire(self, event: LifecycleEvent) -> Lifecycle:
        """Raises:
        IllegalTransition: the table has no such cell.
        """
        target = TRANSITIONS.get((self._state, event))
        if target is None:
            raise IllegalTransition(f"{event.value} while {self._state.value}")
        changed = target is not self._state
        self._state = target
        if changed and self._on_change is not None:
            self._on_change(target)
        return target
