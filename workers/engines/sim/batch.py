"""Which requests run, which wait, and what one engine step does: continuous batching without a clock.

A request runs in a *slot*, of which there are as many as its KV pages have room for; the others wait in order of
arrival. A step gives every running request whose prefill is over its next token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class SimRequest:
    """One request in the batch. ``tokens`` grows by one a step, up to ``max_tokens``."""

    __slots__ = ("digest", "max_tokens", "prompt_tokens", "ready_at", "slot", "tokens")

    def __init__(self, *, digest: int, prompt_tokens: int, max_tokens: int) -> None:
        self.digest = digest
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.tokens: list[int] = []
        self.slot = -1
        """-1 while it waits, and after it has left."""
        self.ready_at = 0.0
        """When its prefill is over, seconds."""

    @property
    def complete(self) -> bool:
        return len(self.tokens) >= self.max_tokens


class Batch:
    """The running and the waiting requests. Times are seconds of the caller's clock."""

    def __init__(self, *, slots: int, ttft_seconds: float) -> None:
        self.slots = slots
        self._ttft = ttft_seconds
        self._free = list(range(slots - 1, -1, -1))
        self._running: dict[SimRequest, None] = {}
        self._waiting: deque[SimRequest] = deque()

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add(self, request: SimRequest, *, now: float) -> None:
        """Take a request in; it runs now if a slot is free, and otherwise when one gets free."""
        self._waiting.append(request)
        self._schedule(now)

    def remove(self, request: SimRequest, *, now: float) -> None:
        """Let a request go, finished or not. One that is not in the batch is no error."""
        if request in self._running:
            del self._running[request]
            self._free.append(request.slot)
            request.slot = -1
            self._schedule(now)
        elif request in self._waiting:
            self._waiting.remove(request)

    def prefill_until(self) -> float | None:
        """When the first prefill is over if nothing but prefills runs; ``None`` if a decode can be done already."""
        earliest: float | None = None
        for request in self._running:
            if request.tokens:
                return None
            if earliest is None or request.ready_at < earliest:
                earliest = request.ready_at
        return earliest

    def step(self, make_token: Callable[[SimRequest], int], *, now: float) -> list[SimRequest]:
        """One engine step; returns the requests that got a token. Complete ones have left the batch."""
        advanced = [request for request in self._running if request.ready_at <= now]
        for request in advanced:
            request.tokens.append(make_token(request))
            if request.complete:
                self.remove(request, now=now)
        return advanced

    def _schedule(self, now: float) -> None:
        while self._free and self._waiting:
            request = self._waiting.popleft()
            request.slot = self._free.pop()
            request.ready_at = now + self._ttft
            self._running[request] = None
