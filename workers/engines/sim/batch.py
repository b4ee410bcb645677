"""Which requests run, which wait, and what one engine step does: continuous batching without a clock.

A request runs in a *slot*, of which there are as many as its KV pages have room for; the others wait in order of
arrival. A step gives every running request whose prefill is over its next token.

When a prefill is over is told by time alone, or, where an accelerator's time is simulated, by the steps that have
computed it; the KV cache then has room for so many tokens, too, and a request waits until all that it may need is free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from workers.engines.sim.accelerator import Accelerator, Work


class SimRequest:
    """One request in the batch. ``tokens`` grows by one a step, up to ``max_tokens``.

    It may come with tokens that another engine has ``generated``: they count, and are part of its prefill, which takes
    as long as any.
    """

    __slots__ = (
        "cached",
        "dies_after",
        "digest",
        "given",
        "hasher",
        "max_tokens",
        "prompt",
        "prompt_tokens",
        "ready_at",
        "slot",
        "to_compute",
        "tokens",
    )

    def __init__(
        self,
        *,
        digest: int,
        prompt_tokens: int,
        max_tokens: int,
        generated: Sequence[int] = (),
        dies_after: int | None = None,
        prompt: Sequence[int] = (),
    ) -> None:
        """``prompt``: its tokens, if they are to be found again in the prefix cache."""
        self.prompt = prompt
        self.cached = 0
        """How many of its tokens the pages held before its prefill, which is that much shorter."""
        self.hasher: PrefixHasher | None = None
        """The prefix cache's, of the tokens that its pages hold."""
        self.digest = digest
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.tokens = list(generated)
        self.given = len(self.tokens)
        """How many of the tokens it came with, or had when it was preempted."""
        self.dies_after = dies_after
        """A fault: the engine dies when it has made so many tokens for this request, and is to make one more."""
        self.slot = -1
        """-1 while it waits, and after it has left."""
        self.ready_at = 0.0
        """When its prefill is over, seconds."""
        self.to_compute = 0
        """How many tokens of its prefill are left, where an accelerator's time is simulated."""

    @property
    def most_tokens(self) -> int:
        """Of its KV cache, in the end."""
        return self.prompt_tokens + self.max_tokens

    @property
    def complete(self) -> bool:
        return len(self.tokens) >= self.max_tokens


class PrefixHasher(Protocol):
    """Names the beginnings of a text as it grows."""

    def key(self, prompt: Sequence[int], tokens: Sequence[int], length: int) -> bytes:
        """The name of the first ``length`` of both, no fewer than the time before."""


class Slots(Protocol):
    """Who has a word in which free slot a request gets: the prefix cache."""

    def take(self, request: SimRequest, free: deque[int], *, now: float) -> int:
        """Take one out of ``free``, whose right end has been free for longest, and say in ``request.cached`` how much
        of the request it holds."""

    def left(self, slot: int, *, now: float) -> None:
        """Its request is gone."""


class Composed(NamedTuple):
    """A step of an accelerator that has begun: what it computes, and how long that takes."""

    seconds: float
    prefills: tuple[tuple[SimRequest, int], ...]
    """Requests, and how many tokens of each."""
    decodes: tuple[SimRequest, ...]


class Batch:
    """The running and the waiting requests. Times are seconds of the caller's clock."""

    def __init__(
        self,
        *,
        slots: int,
        ttft_seconds: float,
        prefixes: Slots | None = None,
        accelerator: Accelerator | None = None,
    ) -> None:
        """``accelerator``: whose steps are composed here (``compose``, ``finish``); with one, ``ttft_seconds`` means
        nothing."""
        self.slots = slots
        self._accelerator = accelerator
        self.work = Work()
        """Of the accelerator."""
        self.free = deque(range(slots - 1, -1, -1))
        """Free slots; the right end has been free for longest."""
        self._ttft = ttft_seconds
        self._prefixes = prefixes
        self._running: dict[SimRequest, None] = {}
        self._waiting: deque[SimRequest] = deque()
        self._held_up = False

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def kv_tokens(self) -> int:
        """How many tokens of the KV cache are set aside for what runs."""
        return sum(request.most_tokens for request in self._running)

    def requests(self) -> list[SimRequest]:
        """All that run or wait."""
        return [*self._running, *self._waiting]

    def add(self, request: SimRequest, *, now: float) -> None:
        """Take a request in; it runs now if a slot is free, and otherwise when one gets free."""
        self._waiting.append(request)
        self._schedule(now)

    def remove(self, request: SimRequest, *, now: float) -> None:
        """Let a request go, finished or not. One that is not in the batch is no error."""
        if request in self._running:
            del self._running[request]
            self.free.appendleft(request.slot)
            if self._prefixes is not None:
                self._prefixes.left(request.slot, now=now)
            request.slot = -1
            self._schedule(now)
        elif request in self._waiting:
            self._waiting.remove(request)

    def prefill_until(self) -> float | None:
        """When the first prefill is over if nothing but prefills runs; ``None`` if a decode can be done already."""
        earliest: float | None = None
        for request in self._running:
            if len(request.tokens) > request.given:
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

    def compose(self, accelerator: Accelerator) -> Composed:
        """The step that begins now."""
        room = accelerator.chunk_tokens
        prefills, decodes, context = [], [], 0
        for request in self._running:
            if not request.to_compute:
                decodes.append(request)
                context += request.prompt_tokens + len(request.tokens)
            elif part := min(room, request.to_compute):
                prefills.append((request, part))
                room -= part
        seconds = accelerator.seconds(
            sequences=len(decodes), context_tokens=context, prefill_tokens=accelerator.chunk_tokens - room
        )
        return Composed(seconds, tuple(prefills), tuple(decodes))

    def finish(self, step: Composed, make_token: Callable[[SimRequest], int], *, now: float) -> list[SimRequest]:
        """The step is over: what it has computed is there, and everybody whose prefill is done has a token more.
        Returns those; complete ones have left the batch."""
        advanced = [request for request in step.decodes if request in self._running]
        for request, part in step.prefills:
            self.work.prefilled_tokens += part
            self.work.prefilled_again_tokens += part if request.given else 0
            if request in self._running:
                request.to_compute -= part
                advanced += () if request.to_compute else (request,)
        for request in advanced:
            request.tokens.append(make_token(request))
            if request.complete:
                self.remove(request, now=now)
        return advanced

    def recompute(self, *, now: float) -> None:
        """Preempt all, and let nothing run until ``go_on``: what ran waits again, before what waited already and in the
        same order, and begins with a prefill of all that it has."""
        self._held_up = True
        for request in reversed(self._running):
            self.free.appendleft(request.slot)
            if self._prefixes is not None:
                self._prefixes.left(request.slot, now=now)
            request.slot = -1
            request.given = len(request.tokens)
            self._waiting.appendleft(request)
        self._running.clear()

    def go_on(self, *, now: float) -> None:
        """Let what waits run, as far as there are slots."""
        self._held_up = False
        self._schedule(now)

    def _schedule(self, now: float) -> None:
        while self.free and self._waiting and not self._held_up and self._has_room(self._waiting[0]):
            request = self._waiting.popleft()
            if self._prefixes is None:
                request.slot = self.free.pop()
            else:
                request.slot = self._prefixes.take(request, self.free, now=now)
            share = 1 - request.cached / (request.prompt_tokens + request.given) if request.cached else 1
            request.ready_at = now + self._ttft * share
            if self._accelerator is not None:
                request.to_compute = request.prompt_tokens + request.given - request.cached
                self.work.cached_tokens += request.cached
            self._running[request] = None

    def _has_room(self, request: SimRequest) -> bool:
        """Whether the KV cache has. One that is larger than all of it runs alone."""
        limit = self._accelerator.kv_tokens if self._accelerator is not None else 0
        return not limit or not self._running or self.kv_tokens + request.most_tokens <= limit
