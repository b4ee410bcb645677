"""[P] The sim's prefix cache: which slot's pages hold the beginning of which text, in whole blocks of tokens.

A slot's pages keep what they hold until another request gets the slot. So the beginning of a new request's tokens,
which another one had before, need not be computed again if the slot that holds it is free. Two requests that run at
once never share one. Of each slot two beginnings are known: the prompt, and the prompt with what was generated so far;
those are what a repeated prompt, and an answer that is gone on with or talked on about, begin with. They are written
down in the index beside the pages (``workers.kv_index``), whose blocks they are.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

from workers.engines.sim.batch import SimRequest
from workers.kv_index import IN_USE, Entry, KvIndex

BLOCK_TOKENS: Final = 16
KEY_BYTES: Final = 16
PROMPT, GROWN = 0, 1
KINDS: Final = 2
_MICROSECONDS: Final = 1_000_000


class Held(NamedTuple):
    """A slot's pages hold a beginning of ``tokens`` tokens, a multiple of ``BLOCK_TOKENS``."""

    key: bytes
    tokens: int


class _Hasher:
    """Names the beginnings of prompt and answer, each longer than the one before."""

    def __init__(self) -> None:
        self._digest = blake2b(digest_size=KEY_BYTES)
        self._done = 0

    def key(self, prompt: Sequence[int], tokens: Sequence[int], length: int) -> bytes:
        """The name of the first ``length`` of both."""
        cut = len(prompt)
        new = [*prompt[self._done : length], *tokens[max(self._done - cut, 0) : max(length - cut, 0)]]
        self._digest.update(array("I", new).tobytes())
        self._done = length
        return self._digest.digest()


class Prefixes:
    """Which prefixes each slot holds. A *place* is a slot's for one kind; times are seconds of the caller's clock."""

    def __init__(self, *, slots: int) -> None:
        self._held: list[Held | None] = [None] * (slots * KINDS)
        self._at: dict[bytes, set[int]] = {}
        self._lengths: Counter[int] = Counter()
        self._index: KvIndex | None = None

    def attach(self, index: KvIndex | None, entries: Iterable[Entry], free: deque[int]) -> int:
        """Forget everything and go on with what the engine before left, in slots that are ``free``; the number of
        entries taken. The order in which it may be given up becomes that of ``free``, whose right end is used first."""
        self._index = None
        for place in range(len(self._held)):
            self._forget(place)
        self._index = index
        idle, taken = set(free), 0
        for entry in entries:
            slot = entry.block // KINDS
            if slot in idle:
                self._remember(entry.block, Held(entry.key, entry.tokens))
                free.remove(slot)
                free.appendleft(slot)
                taken += 1
            elif index is not None:
                index.clear(entry.block)
        return taken

    def take(self, request: SimRequest, free: deque[int], *, now: float) -> int:
        """A free slot for a request, and in ``request.cached`` how much of its tokens that holds already. At least one
        token is left to be computed."""
        request.hasher = None  # of a request that was preempted: it begins at the beginning again
        found = self._longest(request, free) if self._lengths else None
        if found is None:
            slot = free.pop()
            request.cached = 0
            for kind in range(KINDS):
                self.clear(slot * KINDS + kind)
            return slot
        place, request.cached = found
        slot = place // KINDS
        free.remove(slot)
        if place % KINDS == PROMPT:
            self.clear(slot * KINDS + GROWN)  # it goes on in another way now
        self._stamp(slot, IN_USE | int(now * _MICROSECONDS))
        return slot

    def used(self, request: SimRequest) -> tuple[int, Held] | None:
        """What the request's prefill reads instead of computing it, and where."""
        for kind in reversed(range(KINDS)):
            place = request.slot * KINDS + kind
            held = self._held[place]
            if request.cached and held is not None and held.tokens == request.cached:
                return place, held
        return None

    def due(self, request: SimRequest) -> Iterator[tuple[int, Held]]:
        """What the request's slot holds, of more than is known, once the tokens that it has are in its pages."""
        prompt = len(request.prompt) // BLOCK_TOKENS * BLOCK_TOKENS
        if len(request.tokens) == request.given and prompt:
            yield from self._due(request, PROMPT, prompt)
        grown = (len(request.prompt) + len(request.tokens)) // BLOCK_TOKENS * BLOCK_TOKENS
        if request.prompt and grown > prompt:
            yield from self._due(request, GROWN, grown)

    def _due(self, request: SimRequest, kind: int, tokens: int) -> Iterator[tuple[int, Held]]:
        place = request.slot * KINDS + kind
        held = self._held[place]
        if held is not None and held.tokens == tokens:
            return  # whatever is left in the slot is a beginning of this request's
        if request.hasher is None:
            request.hasher = _Hasher()
        yield place, Held(request.hasher.key(request.prompt, request.tokens, tokens), tokens)

    def clear(self, place: int) -> None:
        """The pages are about to be written to."""
        self._forget(place)
        if self._index is not None:
            self._index.clear(place)

    def publish(self, place: int, held: Held, *, now: float) -> None:
        """The pages hold this now."""
        self._remember(place, held)
        if self._index is not None:
            self._index.publish(Entry(place, held.key, held.tokens, IN_USE | int(now * _MICROSECONDS)))

    def left(self, slot: int, *, now: float) -> None:
        """The slot's request is gone."""
        self._stamp(slot, int(now * _MICROSECONDS))

    def _stamp(self, slot: int, stamp: int) -> None:
        if self._index is not None:
            for place in range(slot * KINDS, (slot + 1) * KINDS):
                if self._held[place] is not None:
                    self._index.stamp(place, stamp)

    def _longest(self, request: SimRequest, free: deque[int]) -> tuple[int, int] | None:
        most = len(request.prompt) + len(request.tokens) - 1
        best: tuple[int, int] | None = None
        idle: set[int] = set()
        hasher = _Hasher()
        for length in sorted(length for length in self._lengths if length <= most):
            if places := self._at.get(hasher.key(request.prompt, request.tokens, length)):
                idle = idle or set(free)
                if usable := [place for place in places if place // KINDS in idle]:
                    best = min(usable), length
        return best

    def _remember(self, place: int, held: Held) -> None:
        self._forget(place)
        self._held[place] = held
        self._at.setdefault(held.key, set()).add(place)
        self._lengths[held.tokens] += 1

    def _forget(self, place: int) -> None:
        held, self._held[place] = self._held[place], None
        if held is None:
            return
        places = self._at[held.key]
        places.discard(place)
        if not places:
            del self._at[held.key]
        self._lengths[held.tokens] -= 1
        if not self._lengths[held.tokens]:
            del self._lengths[held.tokens]
