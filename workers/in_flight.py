"""The requests that an engine answers: how many, which, and when one ends.

A request costs one entry here; what else may be asked of it is read from its scope when somebody asks.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from workers.asgi import UNRESUMABLE, Scope
from workers.change import Change
from workers.contract import HEADER_REQUEST_ID, HEADER_STREAM
from workers.resume import RESUMABLE_PATHS, RESUME_CONTENT_TYPE
from workers.route_groups import REPEATABLE, RouteGroup, group_of

_ID: Final = HEADER_REQUEST_ID.encode()
_NOTES: Final = HEADER_STREAM.encode()
_RESUME: Final = RESUME_CONTENT_TYPE.encode()
MAX_ID_CHARS: Final = 128
MOST_NAMED: Final = 20
"""Requests that a line of the log names."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request being answered, for a log line: nothing of what was asked."""

    request_id: str
    path: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.request_id or 'without an id'} ({self.path}, {self.seconds:.1f} s)"


def named(requests: Sequence[Request]) -> str:
    """Which these are, for a line of the log."""
    more = f" and {len(requests) - MOST_NAMED} more" if len(requests) > MOST_NAMED else ""
    return "; ".join(str(request) for request in requests[:MOST_NAMED]) + more


class InFlight:
    """``changed`` is told of every end."""

    def __init__(self, changed: Change) -> None:
        self._running: dict[int, tuple[Scope, float]] = {}
        self.changed = changed

    def __len__(self) -> int:
        return len(self._running)

    def enter(self, scope: Scope) -> None:
        self._running[id(scope)] = (scope, time.monotonic())

    def leave(self, scope: Scope) -> None:
        del self._running[id(scope)]
        self.changed.notify()

    def paths(self) -> list[str]:
        """Of each request, oldest first."""
        return [scope["path"] for scope, _ in self._running.values()]

    def by_group(self) -> dict[RouteGroup, int]:
        """How many there are of each group that has any."""
        return dict(Counter(group_of(path) for path in self.paths()))

    def of(self, groups: Iterable[RouteGroup]) -> list[Scope]:
        """The requests of these groups, oldest first."""
        wanted = frozenset(groups)
        return [scope for scope, _ in self._running.values() if group_of(scope["path"]) in wanted]

    def bound_here(self) -> list[Request]:
        """Requests that nobody could take to another engine, oldest first: they do not come from a gateway, or it asked
        for no notes of an answer that is only gone on with by them, or these say that it cannot be gone on with."""
        now = time.monotonic()
        return [_request(scope, now - since) for scope, since in self._running.values() if not _moves(scope)]

    def all(self) -> list[Request]:
        """All of them, oldest first."""
        now = time.monotonic()
        return [_request(scope, now - since) for scope, since in self._running.values()]


def _request(scope: Scope, seconds: float) -> Request:
    return Request(request_id=_header(scope, _ID), path=scope["path"], seconds=seconds)


def _moves(scope: Scope) -> bool:
    if UNRESUMABLE in scope or not _header(scope, _ID):
        return False
    if scope["path"] in RESUMABLE_PATHS:
        return bool(_header(scope, _NOTES)) or _header(scope, b"content-type").startswith(_RESUME.decode())
    return group_of(scope["path"]) in REPEATABLE


def _header(scope: Scope, name: bytes) -> str:
    found = next((value for key, value in scope["headers"] if key == name), b"")
    return bytes(found)[:MAX_ID_CHARS].decode("latin-1")
