"""A further rank of a sim engine: its own weights and KV pages, through which every token of rank 0 goes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from workers.engine import MemoryLostError
from workers.engines.sim.memory import SimKv, SimWeights
from workers.memory import MemoryService
from workers.ranks import MakeWorker
from workers.settings import EngineSettings
from workers.waits import Waits


class Word(msgspec.Struct, frozen=True):
    """What a step writes, and where."""

    slot: int
    position: int
    word: int


_words = msgspec.msgpack.Decoder(Word)


class SimRank:
    """Implements ``workers.ranks.RankWorker``."""

    def __init__(self, settings: EngineSettings, rank: int, service: MemoryService | None) -> None:
        share = settings.sim.model_copy(update={"seed": settings.sim.seed + rank})
        self._weights = SimWeights(share, service)
        self._kv = SimKv(share, service, slots=settings.capacity)

    @property
    def waits(self) -> Waits | None:
        return self._kv.waits

    def attach(self) -> None:
        self._weights.attach()

    def map(self, *, epoch: int) -> None:
        self._kv.map(epoch=epoch)

    def unmap(self) -> None:
        self._kv.unmap()

    def step(self, work: bytes) -> bytes:
        word = _words.decode(work)
        return msgspec.msgpack.encode(self._kv.put(word.slot, word.position, word.word))

    def check(self) -> None:
        if (reason := self._weights.lost or self._kv.lost) is not None:
            raise MemoryLostError(reason)

    def close(self) -> None:
        self._kv.close()
        self._weights.close()


def make_rank(settings: EngineSettings, services: Sequence[MemoryService]) -> MakeWorker:
    """The factory that ``workers.ranks`` calls in the rank's process. ``services``: one a rank, or none at all."""

    def make(rank: int, others: Sequence[int]) -> SimRank:
        service = services[rank].fenced_with(others) if services else None
        return SimRank(settings, rank, service)

    return make
