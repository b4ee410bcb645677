"""What is added to vLLM's worker of a device: a KV cache in a reserved range, whose memory comes and goes.

The range is reserved once and never moves. Behind it stands nothing while the engine is parked, a small scratch chunk
while it warms up, and the memory service's pages while it is active.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import torch
from torch.overrides import TorchFunctionMode

from gms import tensors
from gms.mapping import Backing
from gms.rotation import CHECK_SECONDS
from workers.engine import EngineMemory
from workers.engines.vllm import loader
from workers.engines.vllm.arguments import Placement
from workers.engines.vllm.loader import weights_of
from workers.engines.vllm.trial import Trial
from workers.kv_memory import KvMemory
from workers.memory import MemoryService
from workers.waits import Waits
from workers.weights import WeightsMemory

logger = logging.getLogger(__name__)


class _KvAllocation(TorchFunctionMode):
    """Answers the one allocation that ``allocate_kv_cache`` makes (``torch.zeros(size, dtype=int8)``) from the range.

    vLLM offers a memory pool context at this place and no hook for the tensor itself.
    """

    def __init__(self, worker: GmsWorker) -> None:
        super().__init__()
        self._worker = worker

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and kwargs.get("dtype") is torch.int8 and len(args) == 1 and isinstance(args[0], int):
            return self._worker.reserve_kv(args[0])
        return func(*args, **kwargs)


class GmsWorker:
    """Mixed into the worker of an engine with a memory service. Its methods are called by name, through
    ``collective_rpc``."""

    model_runner: Any
    rank: int

    def synchronize_device(self) -> None:
        """Wait for the work that was handed to the device; vLLM's own."""
        super().synchronize_device()  # type: ignore[misc]

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]
        extra = vllm_config.load_config.model_loader_extra_config
        self._service: MemoryService = Placement.from_config(extra).service
        self._kv: KvMemory | None = None
        self.trial = Trial()

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        if tag == "kv_cache":
            return _KvAllocation(self)
        context: AbstractContextManager[Any] = super()._maybe_get_memory_pool_context(tag)  # type: ignore[misc]
        return context

    def reserve_kv(self, size_bytes: int) -> torch.Tensor:
        """The KV cache's tensor, over addresses without memory."""
        if self._kv is not None:
            raise RuntimeError("vLLM allocated its KV cache twice; this engine knows of one allocation only")
        self._kv = KvMemory(self._service, size_bytes=size_bytes)
        return tensors.arena(self._kv.range).view(torch.int8)[:size_bytes]

    @property
    def kv(self) -> KvMemory:
        """Raises RuntimeError: this model has no KV cache."""
        if self._kv is None:
            raise RuntimeError("vLLM allocated no KV cache for this model")
        return self._kv

    def kv_scratch(self) -> None:
        """Back the range so that steps can run, with memory that is worth nothing."""
        self.kv.map_scratch()

    def kv_map(self, epoch: int, marks: Sequence[bytes] = ()) -> bytes:
        """Put the service's pages behind the range. ``marks`` are what the other ranks have said that theirs are
        called; what these are is returned."""
        self.kv.map(epoch=epoch, marks=marks)
        return self.kv.mark

    def hotspare_follow(self) -> None:
        """Rank 0 keeps an index."""
        if self.rank > 0:
            self.kv.follow()

    def kv_unmap(self) -> None:
        """Take pages or scratch away. The caller sees to it that no step runs."""
        self.synchronize_device()
        self.kv.unmap()

    def hotspare_try_out(self, stop: Callable[[], bool] = lambda: False) -> str | None:
        """A step of one token over scratch memory, while parked, given up once ``stop``: what is wrong, or None. Ranks
        make it together, and none may give it up: the others would wait."""
        if (problem := self.kv.check_parked()) is not None or stop():
            return problem
        with self.kv.scratch():
            try:
                return self.trial.run(self.model_runner, stop)
            finally:
                self.synchronize_device()

    def execute_dummy_batch(self) -> None:
        """vLLM runs these where several engines share experts, to keep step with others. None of ours does.

        Raises:
            RuntimeError: there is no scratch behind the KV range, so that it would be read, or on a GPU be the end.
        """
        if self.kv.range.backing is not Backing.SCRATCH:
            raise RuntimeError("a step that belongs to no request runs over scratch memory only")
        super().execute_dummy_batch()  # type: ignore[misc]

    def hotspare_check_memory(self) -> str | None:
        """While parked: whether a further rank's memory is as it should be, as ``VllmEngine`` looks at rank 0's. What
        is wrong, or None."""
        weights = self.hotspare_weights()
        if self.rank == 0 or weights is None:
            return self.kv.check_parked()
        until = time.monotonic() + CHECK_SECONDS
        return weights.check(enough=lambda: time.monotonic() > until) or self.kv.check_parked()

    def hotspare_lost(self) -> str | None:
        """Why this worker must not go on, or None. Asked before each step."""
        weights = self.hotspare_weights() if self.model_runner is not None else None
        return (weights.lost if weights is not None else None) or (self._kv.lost if self._kv is not None else None)

    def hotspare_memory(self) -> EngineMemory:
        """Measured from the tensors' real addresses."""
        return measure(self.model_runner, self._kv)

    def hotspare_kv(self) -> KvMemory:
        """The KV memory itself, which may be asked from any thread how its custody stands."""
        return self.kv

    def hotspare_waits(self) -> Waits | None:
        """Those for pages of the memory service; None before there is a KV cache."""
        return self._kv.waits if self._kv is not None else None

    def hotspare_weights(self) -> WeightsMemory | None:
        """The weights' memory, as ``hotspare_kv``."""
        return weights_of(self.model_runner.get_model())

    def shutdown(self) -> None:
        weights = weights_of(getattr(getattr(self, "model_runner", None), "model", None))
        super().shutdown()  # type: ignore[misc]
        if self._kv is not None:
            self.synchronize_device()
            self._kv.unmap()  # the range itself stays: tensors over it may still be referenced
        if weights is not None:
            weights.hand_back()


class KvOnGpu(GmsWorker):
    """The same where addresses without memory are no place to read from, not even for a dummy run: from its reservation
    on there is scratch behind the range, until it is parked for the first time. ``cuda_worker`` says more."""

    def reserve_kv(self, size_bytes: int) -> torch.Tensor:
        tensor = super().reserve_kv(size_bytes)
        self.kv_scratch()
        return tensor

    def kv_scratch(self) -> None:
        if self.kv.range.backing is not Backing.SCRATCH:
            super().kv_scratch()

    def kv_map(self, epoch: int, marks: Sequence[bytes] = ()) -> bytes:
        mark = super().kv_map(epoch, marks)
        self.synchronize_device()
        return mark


class PrivateMemoryWorker:
    """Mixed into the worker of an engine without a service: private weights, private KV cache."""

    model_runner: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.trial = Trial()

    def hotspare_try_out(self, stop: Callable[[], bool] = lambda: False) -> str | None:
        """As that of an engine with a service. The KV cache here is this engine's own, and a dummy step writes to no
        slot of it."""
        return self.trial.run(self.model_runner, stop)

    def hotspare_check_memory(self) -> str | None:
        """As that of an engine with a service, and nothing to look at."""
        return None

    def hotspare_lost(self) -> str | None:
        """As that of an engine with a service: what is its own, nobody takes away."""
        return None

    def hotspare_waits(self) -> Waits | None:
        """As that of an engine with a service, and nothing to wait for."""
        return None

    def hotspare_memory(self) -> EngineMemory:
        memory = measure(self.model_runner, None)
        kv_bytes = sum(loader.storage_sizes(self.model_runner.kv_caches).values())
        return msgspec.structs.replace(memory, kv_bytes=kv_bytes, kv_mapped=True)


def measure(runner: Any, kv: KvMemory | None) -> EngineMemory:
    """Where this engine's bytes are."""
    model = runner.get_model()
    weights, held = weights_of(model), loader.measure(model, beside=runner.kv_caches)
    return EngineMemory(
        weights_bytes=held.weights_bytes,
        weights_outside_gms_bytes=held.private_weights_bytes,
        weights_role=weights.role if weights is not None else "private",
        other_bytes=held.other_bytes,
        kv_bytes=kv.range.size_bytes if kv is not None else 0,
        kv_mapped=kv is not None and kv.mapped,
        kv_index_bytes=kv.index_bytes if kv is not None else 0,
    )
