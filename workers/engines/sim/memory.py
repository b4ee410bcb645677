"""The sim's bytes: weights shared through the memory service, and KV pages that hold the tokens being made.

Both are really used, so that what is wrong with memory shows: the next token is read out of the weights, and each one
is written to the request's KV slot and read back. Pages that are not there end the process (SIGSEGV), as they would
end a real engine. Without a memory service both are private memory. Calls block and belong in a thread.

An engine may be told to stop while such a call still waits for the service: that ends the wait. What is being mapped
then stays so until the process ends, soon: taking pages away under a thread that writes to them would end it the hard
way.
"""

from __future__ import annotations

import mmap
import struct
import threading
from collections.abc import Callable
from hashlib import sha256

import msgspec

from gms.custody_phases import CustodyState
from gms.mapping import Reservation
from workers.engine import EngineConfigError, EngineDeadError
from workers.engines.sim.batch import SimRequest
from workers.engines.sim.prefixes import BLOCK_TOKENS, KEY_BYTES, KINDS
from workers.engines.sim.tokens import WeightsPattern, page_aligned
from workers.kv_index import KvIndex, Refusal, Shape
from workers.kv_memory import Carried, KvMemory
from workers.memory import MemoryService
from workers.settings import SimSettings
from workers.waits import Waits
from workers.weights import WeightsMemory, pool_name

WORD_BYTES = 8
MIN_SLOT_WORDS = 8
_NAME_WORDS = KEY_BYTES // WORD_BYTES
PREFIX_WORDS = KINDS * _NAME_WORDS
"""At the beginning of each slot; the rest is the ring."""
_PREFIX = struct.Struct(f"<{_NAME_WORDS}Q")


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What the writer of the weights tells their readers."""

    layout: str
    weights_bytes: int


def layout_key(settings: SimSettings) -> str:
    """Names the weights by what they hold: the pools of engines with other settings are other pools."""
    return sha256(f"sim 1 {settings.seed} {settings.weights_bytes}".encode()).hexdigest()


class SimWeights:
    """The weights, mapped read-only from ``attach`` to ``close``."""

    def __init__(self, settings: SimSettings, service: MemoryService | None) -> None:
        self._settings = settings
        self._attaching = threading.Lock()
        self._memory = None if service is None else WeightsMemory(service, pool_name(layout_key(settings)))
        self._private: mmap.mmap | None = None
        self.size_bytes = page_aligned(settings.weights_bytes)
        self.words: memoryview = memoryview(b"").cast("Q")
        """The weights as 64-bit words; empty until attached."""

    @property
    def role(self) -> str:
        return "private" if self._memory is None else self._memory.role

    def attach(self) -> None:
        """Write the weights if nobody has, and map them read-only.

        Raises:
            EngineConfigError: the pool holds something else.
            gms.client.GmsError: no service, no memory, or another writer that does not come to an end.
        """
        with self._attaching:
            pattern = WeightsPattern(seed=self._settings.seed, size_bytes=self.size_bytes)
            if self._memory is None:
                self._private = mmap.mmap(-1, self.size_bytes)
                pattern.fill(memoryview(self._private).cast("Q"))
                self.words = memoryview(self._private).toreadonly().cast("Q")
                return
            self._memory.attach()
            write = self._memory.role == "writer"
            place = self._write(self._memory, pattern) if write else self._read(self._memory)
            self.words = _words(place).toreadonly()

    def _write(self, memory: WeightsMemory, pattern: WeightsPattern) -> Reservation:
        place = memory.map_for_writing(self.size_bytes)
        pattern.fill(_words(place))
        memory.commit(msgspec.json.encode(self._manifest))
        return place

    def _read(self, memory: WeightsMemory) -> Reservation:
        if msgspec.json.decode(memory.manifest, type=Manifest) != self._manifest:
            raise EngineConfigError(f"the pool {memory.pool} holds {memory.manifest!r}, not the sim's weights")
        return memory.map_for_reading()

    @property
    def _manifest(self) -> Manifest:
        return Manifest(layout=layout_key(self._settings), weights_bytes=self.size_bytes)

    def check(self, *, enough: Callable[[], bool]) -> str | None:
        """``WeightsMemory.check``; private weights are not compared with anything."""
        return self._memory.check(enough=enough) if self._memory is not None else None

    @property
    def lost(self) -> str | None:
        """Why the weights must not be used any more, or None."""
        return self._memory.lost if self._memory is not None else None

    def custody(self) -> tuple[CustodyState, ...]:
        """How the custody stands; empty while there is none."""
        return self._memory.custody() if self._memory is not None else ()

    def close(self) -> None:
        """Give the mapping and the lease back, and end an ``attach`` that waits for its lease. Twice is fine."""
        if self._memory is not None:
            self._memory.interrupt()
        if not self._attaching.acquire(blocking=False):
            return
        try:
            self.words = memoryview(b"").cast("Q")
            self._private = None
            if self._memory is not None:
                self._memory.close()
        finally:
            self._attaching.release()


class SimKv:
    """KV pages as 64-bit words, cut into one slot a request; a slot is a ring, so that any length fits."""

    def __init__(
        self, settings: SimSettings, service: MemoryService | None, *, slots: int, carry_over: bool = False
    ) -> None:
        """Reserve the range.

        Raises:
            EngineConfigError: ``kv_bytes`` has not room for ``slots`` requests.
        """
        self.size_bytes = page_aligned(settings.kv_bytes)
        self._slot_words = self.size_bytes // WORD_BYTES // slots
        if self._slot_words < MIN_SLOT_WORDS:
            raise EngineConfigError(
                f"sim.kv_bytes ({settings.kv_bytes}) is too small for a capacity of {slots} requests: "
                f"it takes {slots * MIN_SLOT_WORDS * WORD_BYTES} bytes"
            )
        self._mapping = threading.Lock()
        self._pages = None if service is None else KvMemory(service, size_bytes=self.size_bytes)
        if self._pages is not None and carry_over:
            said = f"{layout_key(settings)} {self.size_bytes} {slots}"
            fingerprint = sha256(said.encode()).digest()
            self._pages.keep_index(Shape(blocks=slots * KINDS, block_tokens=BLOCK_TOKENS, fingerprint=fingerprint))
        self._private: mmap.mmap | None = None
        self._words: memoryview = memoryview(b"").cast("Q")

    @property
    def index(self) -> KvIndex | None:
        """To be written to while the pages are mapped, if one is kept."""
        return self._pages.index if self._pages is not None else None

    @property
    def index_bytes(self) -> int:
        return self._pages.index_bytes if self._pages is not None else 0

    @property
    def carried(self) -> Carried:
        """What the last ``map`` found of the engine before."""
        return self._pages.carried if self._pages is not None else Carried((), Refusal.OFF)

    @property
    def waits(self) -> Waits | None:
        """``KvMemory.waits``; None without a memory service."""
        return self._pages.waits if self._pages is not None else None

    @property
    def mapped(self) -> bool:
        return self._pages.mapped if self._pages is not None else self._private is not None

    @property
    def lost(self) -> str | None:
        """Why the pages are another engine's by now and this one must stop, or None."""
        return self._pages.lost if self._pages is not None else None

    def custody(self) -> tuple[CustodyState, ...]:
        """How the custody stands; empty while there is none."""
        return self._pages.custody() if self._pages is not None else ()

    def map(self, *, epoch: int) -> None:
        """Put pages behind the range. Raises what ``KvMemory.map`` raises; nothing stays mapped then."""
        with self._mapping:
            if self._pages is None:
                if self._private is not None:
                    raise RuntimeError("the KV pages are mapped already")
                self._private = mmap.mmap(-1, self.size_bytes)
                self._words = memoryview(self._private).cast("Q")
            else:
                self._pages.map(epoch=epoch)
                self._words = _words(self._pages.range)

    def unmap(self) -> None:
        """Take the pages away; the caller vouches that no step runs. Harmless if nothing is mapped."""
        with self._mapping:
            self._unmap()

    def try_out(self, token: int) -> str | None:
        """Take a token through the KV cache as a step does, over scratch memory: what is wrong, or None. Nothing is
        mapped before or after."""
        with self._mapping:
            if self._pages is None:
                return None
            if (problem := self._pages.check_parked()) is not None:
                return problem
            with self._pages.scratch():
                words = _words(self._pages.range)
                words[0] = token
                held = words[0]
        return None if held == token else f"the KV cache's addresses hold {held:#x} where {token:#x} was written"

    def _unmap(self) -> None:
        self._private = None
        if self._pages is None:
            self._words = memoryview(b"").cast("Q")
        elif self._pages.mapped:
            self._pages.unmap()

    def close(self) -> None:
        """Unmap and give the range back, and end a ``map`` that waits for its lease."""
        if self._pages is not None:
            self._pages.interrupt()
        if not self._mapping.acquire(blocking=False):
            return
        try:
            self._unmap()
            self._words = memoryview(b"").cast("Q")
            if self._pages is not None:
                self._pages.close()
        finally:
            self._mapping.release()

    def through(self, request: SimRequest, token: int) -> int:
        """Write a request's new token to its slot and return what the slot then holds.

        Raises:
            EngineDeadError: the pages gave back something else: somebody else writes there.
        """
        index = len(request.tokens)
        ring = self._slot_words - PREFIX_WORDS
        at = request.slot * self._slot_words + PREFIX_WORDS + (request.prompt_tokens + index) % ring
        written = (request.digest & 0xFFFF_FFFF) << 32 | token
        self._words[at] = written
        held = self._words[at]
        if held != written:
            raise self._fault(f"the KV pages hold {held:#x} where {written:#x} was written")
        return held & 0xFFFF_FFFF

    def put(self, slot: int, position: int, word: int) -> int:
        """What ``through`` does to the pages, for a further rank's: write a word, and return what is there then."""
        ring = self._slot_words - PREFIX_WORDS
        at = slot * self._slot_words + PREFIX_WORDS + position % ring
        self._words[at] = word
        return self._words[at]

    def write_prefix(self, place: int, key: bytes) -> None:
        """Let a slot's pages hold a prefix: its name, where a model's keys and values would be."""
        at = self._place(place)
        for number, word in enumerate(_PREFIX.unpack(key)):
            self._words[at + number] = word

    def check_prefix(self, place: int, key: bytes) -> None:
        """Use what a slot's pages hold.

        Raises:
            EngineDeadError: it is something else.
        """
        at = self._place(place)
        held = _PREFIX.pack(*self._words[at : at + _NAME_WORDS])
        if held != key:
            raise self._fault(f"the KV pages hold the prefix {held.hex()} where {key.hex()} was to be")

    def _place(self, place: int) -> int:
        return place // KINDS * self._slot_words + place % KINDS * _NAME_WORDS

    def _fault(self, what: str) -> EngineDeadError:
        """Somebody else wrote to the pages: nothing in them can be believed."""
        if self.index is not None:
            self.index.mark_fault(what)
        return EngineDeadError(what)


def _words(place: Reservation) -> memoryview:
    """The range as 64-bit words. Touches no page; reading or writing what is not mapped is a SIGSEGV."""
    return memoryview(place.buffer()).cast("B").cast("Q")
