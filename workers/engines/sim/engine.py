"""SimEngine: the Engine protocol over a scheduler, a mapping of pseudo weights and KV slots."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from gms.client import GmsError
from gms.custody_phases import CustodyState
from gms.rotation import CHECK_SECONDS
from workers import metrics
from workers.carry_over import tell
from workers.engine import ASGIApp, EngineDeadError, EngineMemory, MemoryLostError
from workers.engines.sim.accelerator import Accelerator
from workers.engines.sim.app import SimApp
from workers.engines.sim.batch import SimRequest
from workers.engines.sim.memory import SimKv, SimWeights
from workers.engines.sim.poison import Poison, die
from workers.engines.sim.prefixes import KINDS, Prefixes
from workers.engines.sim.ranks import Word, make_rank
from workers.engines.sim.scheduler import Scheduler
from workers.engines.sim.tokens import token_at
from workers.memory import MemoryService
from workers.progress import TokenProgress
from workers.ranks import Attach, Check, Map, Ranks, Step, Unmap
from workers.recorded import RecordedApp
from workers.resume import crc32
from workers.settings import EngineSettings, SimSettings
from workers.threads import in_daemon_thread, interruptible
from workers.waits import Waits

logger = logging.getLogger(__name__)

DEFAULT_MODEL = "sim"
LEAK_BYTES = 8 * 1024 * 1024
RANK_SECONDS: Final = 2.0
"""What a further rank may take for anything that waits for nobody else."""


class SimFault(Enum):
    """What can be made to go wrong, for tests. There is no way back: a faulty engine is there to be replaced."""

    HANG_LOOP = "hang_loop"
    """The event loop blocks for ever: no beat, no answer, and only SIGKILL ends the process."""
    SPIN_LOOP = "spin_loop"
    """As HANG_LOOP, but with the processor at full load."""
    STALL_STEPS = "stall_steps"
    """The loop runs, but no step is made while requests wait for one."""
    LIVELOCK = "livelock"
    """Steps are made, and no request gets a token of them."""
    LEAK = "leak"
    """Memory is taken and never given back: ``LEAK_BYTES`` a tenth of a second."""
    DEAD = "dead"
    """``check_health`` raises EngineDeadError, and running requests end with it."""


class SimEngine:
    """An engine that needs no model; see ``workers.engine.Engine`` for what each method promises.

    ``runtime_dir`` is for an engine's own sockets; the sim has none.
    """

    make_rank = staticmethod(make_rank)
    """See ``workers.ranks``: this engine can have further ranks."""

    def __init__(
        self, settings: EngineSettings, service: MemoryService | None, runtime_dir: Path, ranks: Ranks | None = None
    ) -> None:
        self._settings = settings
        self._ranks = ranks
        self._service = service
        self._weights = SimWeights(settings.sim, service)
        self._kv: SimKv | None = None
        self._prefixes = Prefixes(slots=settings.capacity)
        self._scheduler = Scheduler(
            slots=settings.capacity,
            ttft_seconds=settings.sim.ttft_seconds,
            token_seconds=settings.sim.token_seconds,
            make_token=self._make_token,
            prefixes=self._prefixes,
            accelerator=_accelerator(settings.sim),
        )
        self._loop_task: asyncio.Task[None] | None = None
        self._epoch = 0
        """Of its last promotion."""
        self._progress = TokenProgress(
            timeout_seconds=settings.token_timeout_seconds, interval_seconds=settings.health_check_seconds
        )
        self._leaked: list[bytes] = []
        self.models: tuple[str, ...] = (settings.served_model_name or DEFAULT_MODEL,)
        self.max_model_len = settings.sim.max_model_len

    @property
    def steps(self) -> int:
        return self._scheduler.steps

    @property
    def busy(self) -> bool:
        return self._scheduler.busy

    @property
    def waits(self) -> Waits | None:
        """For the memory service, of all ranks; None without one."""
        return self._kv.waits if self._kv is not None else None

    @property
    def dead(self) -> bool:
        return self._scheduler.failure is not None or self._lost is not None

    async def initialize(self) -> None:
        """Attach the weights and reserve the KV range; takes at least ``startup_seconds``, or ``restart_seconds`` where
        another engine had this one's name before."""
        sim = self._settings.sim
        restart = sim.restart_seconds if metrics.lives() > 1 else None
        ready_at = time.monotonic() + (sim.startup_seconds if restart is None else restart)
        self._kv = SimKv(
            self._settings.sim,
            self._service,
            slots=self._settings.capacity,
            carry_over=self._settings.kv_carry_over and self._ranks is None,
        )
        await in_daemon_thread(self._attach, name="sim-weights")
        await asyncio.sleep(max(0.0, ready_at - time.monotonic()))
        for pidfd in self._ranks.pidfds if self._ranks is not None else ():
            asyncio.get_running_loop().add_reader(pidfd, self._rank_died, pidfd)
        self._loop_task = asyncio.create_task(self._scheduler.run(), name="sim-steps")
        logger.debug("weights: %d bytes, %s", self._weights.size_bytes, self._weights.role)

    async def wake(self, *, epoch: int) -> None:
        kv = self._initialized
        if kv.mapped:
            raise RuntimeError("the engine is awake already")
        await in_daemon_thread(partial(self._map, epoch), name="sim-kv")
        taken = self._prefixes.attach(kv.index, kv.carried.entries, self._scheduler.free_slots)
        if self._service is not None:
            tell(kv.carried, taken=taken, blocks=self._settings.capacity * KINDS)
        self._epoch = epoch
        self._scheduler.resume()

    async def park(self) -> None:
        """Requests that are still here wait for the next ``wake``; whoever serves them decides whether they end."""
        self._scheduler.pause()
        await in_daemon_thread(self._unmap, name="sim-kv")

    async def self_test(self) -> None:
        """See ``Engine.self_test``: mappings, a part of the weights, and a token made over scratch memory."""
        await self.check_health()
        kv = self._initialized
        problem = await interruptible(partial(self._try_out, kv), name="sim-self-test")
        if problem is not None:
            raise EngineDeadError(problem)

    def _try_out(self, kv: SimKv, stop: Callable[[], bool]) -> str | None:
        until = time.monotonic() + CHECK_SECONDS
        problem = self._weights.check(enough=lambda: stop() or time.monotonic() > until)
        if problem is not None or stop():
            return problem
        return kv.try_out(token_at(self._weights.words, 0, 0))

    async def quiesce(self, *, timeout_seconds: float) -> None:
        """See ``Engine.quiesce``. Steps run on the loop, so none is in hand here."""
        self._scheduler.pause()
        self._scheduler.recompute()
        try:
            await in_daemon_thread(self._unmap, name="sim-kv")
        except Exception as error:
            raise EngineDeadError(f"the KV pages could not be released: {error}") from error

    def app(self) -> ASGIApp:
        sim = self._settings.sim
        made = SimApp(
            self._scheduler,
            model=self.models[0],
            max_model_len=sim.max_model_len,
            configuration=f"{crc32(f'{sim.seed}/{self._weights.size_bytes}'.encode()):08x}",
            token_at=partial(token_at, self._weights.words),
            poison=Poison(sim.poison_text) if sim.poison_text else None,
            report=self._report if sim.prefill_tokens_per_second else None,
        )
        return RecordedApp(made)

    def _report(self) -> bytes:
        did, counts = msgspec.structs.asdict(self._scheduler.work), self._scheduler.counts
        return msgspec.json.encode({"epoch": self._epoch, **did, **counts})

    def _leak(self) -> None:
        self._leaked.append(b"x" * LEAK_BYTES)
        asyncio.get_running_loop().call_later(0.1, self._leak)

    async def check_health(self) -> None:
        if self._scheduler.failure is not None:
            raise EngineDeadError(str(self._scheduler.failure)) from self._scheduler.failure
        if self._loop_task is None:
            raise EngineDeadError("the engine was not initialized, or was shut down")
        if self._loop_task.done():
            raise EngineDeadError("the loop that makes its steps has ended")
        if (reason := self._lost) is not None:
            raise MemoryLostError(reason)
        marks, aborted = self._scheduler.marks(), self._scheduler.aborted()
        if (reason := self._progress.observe(marks, aborted=aborted, now=time.monotonic())) is not None:
            raise EngineDeadError(reason)
        if self._ranks is not None:
            self._ranks.ask(Check(), timeout_seconds=RANK_SECONDS)

    def kv_usage(self) -> float:
        """A request holds one slot of the KV pages from its prefill to its end."""
        return self._scheduler.usage

    def memory(self) -> EngineMemory:
        size = self._weights.size_bytes
        return EngineMemory(
            weights_bytes=size,
            weights_outside_gms_bytes=size if self._service is None else 0,
            weights_role=self._weights.role,
            kv_bytes=self._kv.size_bytes if self._kv is not None else 0,
            kv_mapped=self._kv is not None and self._kv.mapped,
            kv_index_bytes=self._kv.index_bytes if self._kv is not None else 0,
        )

    def custody(self) -> tuple[CustodyState, ...]:
        return (*self._weights.custody(), *(self._kv.custody() if self._kv is not None else ()))

    def inject(self, fault: SimFault) -> None:
        """Make ``fault`` happen; HANG_LOOP from the loop's next turn on, so that the caller can still answer."""
        logger.warning("fault injected: %s", fault.value)
        match fault:
            case SimFault.HANG_LOOP:
                asyncio.get_running_loop().call_soon(_hang)
            case SimFault.SPIN_LOOP:
                asyncio.get_running_loop().call_soon(_spin)
            case SimFault.LIVELOCK:
                self._scheduler.starve()
            case SimFault.LEAK:
                self._leak()
            case SimFault.STALL_STEPS:
                self._scheduler.stall()
            case SimFault.DEAD:
                self._scheduler.fail(EngineDeadError("a fault was injected: dead"))

    async def shutdown(self) -> None:
        self._scheduler.fail(EngineDeadError("the engine was shut down"))
        task, self._loop_task = self._loop_task, None
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            for pidfd in ranks.pidfds:
                asyncio.get_running_loop().remove_reader(pidfd)
            await in_daemon_thread(ranks.close, name="sim-ranks")
        kv, self._kv = self._kv, None
        if kv is not None:
            await in_daemon_thread(kv.close, name="sim-kv")
        await in_daemon_thread(self._weights.close, name="sim-weights")

    @property
    def _initialized(self) -> SimKv:
        if self._kv is None:
            raise RuntimeError("the engine was not initialized, or was shut down")
        return self._kv

    @property
    def _lost(self) -> str | None:
        return self._weights.lost or (self._kv.lost if self._kv is not None else None)

    def _attach(self) -> None:
        if self._ranks is None:
            self._weights.attach()
        else:
            waits = self._service.timeout_seconds + self._service.connect_seconds if self._service is not None else 0.0
            self._ranks.ask(Attach(), timeout_seconds=RANK_SECONDS + waits, meanwhile=self._weights.attach)

    def _map(self, epoch: int) -> None:
        """The pages of all ranks, or none."""
        if self._ranks is None:
            self._initialized.map(epoch=epoch)
            return
        waits = self._service.longest_wait_seconds if self._service is not None else 0.0
        own = partial(self._initialized.map, epoch=epoch)
        self._ranks.ask(Check(), timeout_seconds=RANK_SECONDS)  # one that is stopped is not waited for as a service is
        try:
            seconds = self._settings.wake_timeout_seconds
            self._ranks.ask(Map(epoch), timeout_seconds=seconds, wait_seconds=waits, waits=self.waits, meanwhile=own)
        except GmsError:
            self._unmap()
            raise

    def _unmap(self) -> None:
        if self._ranks is None:
            self._initialized.unmap()
        else:
            self._ranks.ask(Unmap(), timeout_seconds=RANK_SECONDS, meanwhile=self._initialized.unmap)

    def _rank_died(self, pidfd: int) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        if self._ranks is not None and (reason := self._ranks.lost) is not None:
            self._scheduler.fail(EngineDeadError(reason))

    def _make_token(self, request: SimRequest) -> int:
        if request.dies_after is not None and len(request.tokens) - request.given >= request.dies_after:
            die()
        kv, prefixes = self._initialized, self._prefixes
        if request.cached and len(request.tokens) == request.given and (used := prefixes.used(request)):
            kv.check_prefix(used[0], used[1].key)
        token = token_at(self._weights.words, request.digest, len(request.tokens))
        if self._ranks is not None:
            self._through_ranks(self._ranks, request, token)
        made = kv.through(request, token)
        for place, held in prefixes.due(request):
            prefixes.clear(place)
            kv.write_prefix(place, held.key)
            prefixes.publish(place, held, now=asyncio.get_running_loop().time())
        return made

    def _through_ranks(self, ranks: Ranks, request: SimRequest, token: int) -> None:
        """Every rank has its part in every token, as in tensor parallelism."""
        word = Word(request.slot, request.prompt_tokens + len(request.tokens), (request.digest & 0xFFFF) << 32 | token)
        for held in ranks.ask(Step(msgspec.msgpack.encode(word)), timeout_seconds=RANK_SECONDS):
            if (seen := msgspec.msgpack.decode(held, type=int)) != word.word:
                raise EngineDeadError(f"a rank's KV pages hold {seen:#x} where {word.word:#x} was written")


def _accelerator(sim: SimSettings) -> Accelerator | None:
    if not sim.prefill_tokens_per_second:
        return None
    return Accelerator(
        prefill_tokens_per_second=sim.prefill_tokens_per_second,
        step_seconds=sim.step_seconds,
        sequence_seconds=sim.sequence_seconds,
        context_token_seconds=sim.context_token_seconds,
        chunk_tokens=sim.chunk_tokens,
        kv_tokens=sim.kv_tokens,
    )


def _hang() -> None:
    while True:
        time.sleep(3600)


def _spin() -> None:
    while True:
        pass
