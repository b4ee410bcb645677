"""vLLM's prefix cache over the life of engines: its block pool writes the index beside the KV pages, and reads it.

The pool names a block when it schedules the step that will compute it. In the index the block is valid only when that
step's output is there, which is why only the scheduler without overlapping steps is taken. A block loses its name in
the pool before it is handed out again; there its entry is taken away (``workers.kv_index`` says why that suffices).

What the pool knows beyond one name a block (several groups of layers, names of parts of blocks) is not in the index:
engines with such a cache start empty, and say so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Any, Final

import msgspec
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import FullAttentionSpec

from workers import metrics
from workers.carry_over import tell
from workers.kv_index import IN_USE, MAX_KEY_BYTES, Entry, KvIndex, Refusal, Shape
from workers.kv_memory import KvMemory
from workers.ranks import RankFaultError

logger = logging.getLogger(__name__)

_MICROSECONDS: Final = 1_000_000
_FAULTS: Final = ("AcceleratorError", "CUDA error", "illegal memory access", "misaligned address", "uncorrectable ECC")
"""As torch and the driver say it. Being out of memory is none of these."""


class JournallingPool(BlockPool):
    """vLLM's block pool, whose names are written down while an index is attached. Pools become one by their class:
    vLLM builds them where no other can be given."""

    index: KvIndex | None = None
    named: list[tuple[Any, bytes, int, int]]
    """(block, name, tokens, arrival) of blocks that were named since the last output."""
    _arrived = 0

    def attach(self, index: KvIndex, entries: Iterable[Entry]) -> int:
        """Go on with what the engine before left, given in the order in which it may be given up; the number of blocks
        that were taken. The pool is empty before."""
        self.index, self.named = None, []
        taken = 0
        for entry in entries:
            block = self.blocks[entry.block]
            if block.is_null or block.ref_cnt or block.block_hash is not None:
                raise RuntimeError(f"block {entry.block} of the prefix cache is in use before the cache is taken over")
            super()._insert_block_hash(kv_cache_utils.BlockHashWithGroupId(entry.key), block, entry.tokens or None)
            self.free_block_queue.remove(block)
            self.free_block_queue.append(block)
            taken += 1
        self.index = index
        return taken

    def publish(self) -> None:
        """The output of the step that was scheduled last is there: what it computed is valid."""
        index, named = self.index, self.named
        if index is None or not named:
            return
        for block, name, tokens, arrival in named:
            if block.block_hash == name:
                index.publish(Entry(block.block_id, name, tokens, IN_USE | arrival))
        named.clear()

    # --- what vLLM calls

    def cache_full_blocks(self, request: Any, *args: Any, **kwargs: Any) -> None:
        self._arrived = int(request.arrival_time * _MICROSECONDS)
        super().cache_full_blocks(request, *args, **kwargs)

    def _insert_block_hash(self, block_hash_with_group_id: Any, block: Any, num_tokens: int | None) -> None:
        super()._insert_block_hash(block_hash_with_group_id, block, num_tokens)
        if self.index is not None and block.block_hash == block_hash_with_group_id:
            self.named.append((block, block_hash_with_group_id, num_tokens or 0, self._arrived))

    def _remove_cached_block_hashes(self, block: Any) -> list[Any]:
        if (index := self.index) is not None:
            index.clear(block.block_id)
        removed: list[Any] = super()._remove_cached_block_hashes(block)
        return removed

    def touch(self, blocks: Sequence[Any]) -> None:
        super().touch(blocks)
        if (index := self.index) is not None:
            stamp = IN_USE | int(time.time() * _MICROSECONDS)
            for block in blocks:
                index.stamp(block.block_id, stamp)

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        blocks = list(ordered_blocks)
        super().free_blocks(blocks)
        if (index := self.index) is not None:
            stamp = int(time.time() * _MICROSECONDS)
            for block in blocks:
                if not block.ref_cnt:
                    index.stamp(block.block_id, stamp)

    def reset_prefix_cache(self) -> bool:
        done: bool = super().reset_prefix_cache()
        if done and (index := self.index) is not None:
            index.clear_all()
            self.named.clear()
        return done


class JournallingScheduler:
    """Mixed into vLLM's scheduler of steps that do not overlap."""

    _journal: JournallingPool | None = None

    def journal_to(self, pool: JournallingPool) -> None:
        self._journal = pool

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        if self._journal is not None:
            self._journal.publish()
        return super().update_from_output(*args, **kwargs)  # type: ignore[misc]


# --- between two steps, in the core's thread


def keep_index(core: Any, *, key: bytes, wanted: bool) -> None:
    """Once, before the KV pages are mapped for the first time. ``key`` is the same for engines whose blocks are."""
    kv = _kv_of(core)
    if not wanted:
        kv.keep_none(Refusal.OFF)
        return
    if why := unsupported(core):
        logger.info("the prefix cache will not outlive this engine: %s", why)
        kv.keep_none(Refusal.UNSUPPORTED, why)
        return
    kv.keep_index(shape_of(core, key))
    core.collective_rpc("hotspare_follow")
    pool = core.scheduler.kv_cache_manager.block_pool
    pool.__class__ = JournallingPool
    pool.named = []
    core.scheduler.journal_to(pool)


def take_over(core: Any) -> None:
    """After the KV pages were mapped, and before a step is made."""
    began = time.monotonic()
    kv = _kv_of(core)
    carried, index = kv.carried, kv.index
    scheduler = core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    taken = 0
    if isinstance(pool, JournallingPool):
        pool.index = None
        # Whatever this engine knew of the pages from an earlier time, they were another's since; requests that it may
        # still have begin anew.
        scheduler.reset_prefix_cache(reset_running_requests=True)
        if index is not None and not index.closed:
            taken = pool.attach(index, carried.entries)
    metrics.record_phase("adopt", time.monotonic() - began)
    tell(carried, taken=taken, blocks=pool.num_gpu_blocks - 1)


def leave(core: Any) -> None:
    """Once nothing runs: forget the prefix cache, but leave the index as it is, for the next engine."""
    pool = core.scheduler.kv_cache_manager.block_pool
    if isinstance(pool, JournallingPool):
        pool.index = None
    core._reset_caches()


def preempt(core: Any) -> None:
    """The same while requests are kept, once no step is in hand: they are preempted, to be recomputed from their tokens
    where the pages may hold another engine's blocks by then."""
    pool = core.scheduler.kv_cache_manager.block_pool
    if isinstance(pool, JournallingPool):
        pool.index = None
    core.scheduler.reset_prefix_cache(reset_running_requests=True)


def mark_fault(core: Any, error: BaseException) -> None:
    """Before the core's end is known to anybody: if a memory fault is behind it, the next engine must not believe what
    the pages hold."""
    index = getattr(core.scheduler.kv_cache_manager.block_pool, "index", None)
    if index is not None and (told := told_fault(error)):
        index.mark_fault(told)


def told_fault(error: BaseException | None) -> str:
    """What an error or its causes say of a memory fault, or of a device that can say nothing sound any more; empty if
    it is none of that. Faults on a CPU are signals and come by another way (``workers.fault_mark``)."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, RankFaultError) or any(sign in text for sign in _FAULTS):
            return text
        error = error.__cause__ or error.__context__
    return ""


def unsupported(core: Any) -> str:
    """Why this engine's prefix cache cannot be carried over; empty if it can."""
    scheduler = core.scheduler
    manager = scheduler.kv_cache_manager
    groups = manager.kv_cache_config.kv_cache_groups
    if not core.vllm_config.cache_config.enable_prefix_caching:
        return "it has none"
    if not isinstance(scheduler, JournallingScheduler) or core.batch_queue is not None:
        return "its steps overlap, so that a block is named long before it is computed"
    if core.vllm_config.scheduler_config.policy == "priority":
        return "by priorities a request can lose its place in a step after blocks were named for it"
    if len(groups) != 1:
        return f"it has {len(groups)} groups of layers, whose blocks are named apart"
    if type(groups[0].kv_cache_spec) is not FullAttentionSpec:
        return f"its blocks are of the kind {type(groups[0].kv_cache_spec).__name__}, which was not tried"
    if type(manager.block_pool) is not BlockPool:
        return f"its blocks are kept by a {type(manager.block_pool).__name__}"
    if core.vllm_config.kv_transfer_config is not None or manager.block_pool.enable_kv_cache_events:
        return "others are told of its blocks"
    if core.vllm_config.speculative_config is not None:
        return "it drafts tokens"
    if len(kv_cache_utils.NONE_HASH) + 4 > MAX_KEY_BYTES:
        return "the names of its blocks are too long"
    return ""


def shape_of(core: Any, key: bytes) -> Shape:
    """What must be the same for one engine's blocks to be another's."""
    config = core.scheduler.kv_cache_manager.kv_cache_config
    pool = core.scheduler.kv_cache_manager.block_pool
    (group,) = config.kv_cache_groups
    said = {
        "answers": key,
        "hash": core.vllm_config.cache_config.prefix_caching_hash_algo,
        "seed": kv_cache_utils.NONE_HASH,
        "hash_block": pool.hash_block_size,
        "layers": group.layer_names,
        "spec": repr(group.kv_cache_spec),
        "layout": str(config.kv_cache_layout),
        "tensors": [repr(tensor) for tensor in config.kv_cache_tensors],
    }
    return Shape(
        blocks=pool.num_gpu_blocks,
        block_tokens=group.kv_cache_spec.block_size,
        fingerprint=sha256(msgspec.msgpack.encode(said)).digest(),
    )


def _kv_of(core: Any) -> KvMemory:
    kv: KvMemory = core.model_executor.driver_worker.hotspare_kv()
    return kv
