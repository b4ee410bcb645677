"""vLLM's CPU worker with its KV cache in a reserved range, whose memory comes and goes.

The range is reserved once and never moves. Behind it stands nothing while the engine is parked, a small scratch chunk
while it warms up, and the memory service's pages while it is active.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from vllm.v1.worker.cpu_worker import CPUWorker

from gms import tensors
from workers.engine import EngineMemory
from workers.engines.vllm.arguments import Placement
from workers.engines.vllm.loader import weights_of
from workers.memory import KvMemory, MemoryService
from workers.weights import WeightsMemory

logger = logging.getLogger(__name__)

_SCRATCH_CHUNK_BYTES: Final = 4 * 1024 * 1024
_SCRATCH_MAPPINGS: Final = 1024
"""Enough for 4 GiB of KV cache at the smallest chunk; beyond that the chunk grows with the range."""


class _KvAllocation(TorchFunctionMode):
    """Answers the one allocation that ``allocate_kv_cache`` makes (``torch.zeros(size, dtype=int8)``) from the range.

    vLLM offers a memory pool context at this place and no hook for the tensor itself.
    """

    def __init__(self, worker: GmsCpuWorker) -> None:
        super().__init__()
        self._worker = worker

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and kwargs.get("dtype") is torch.int8 and len(args) == 1 and isinstance(args[0], int):
            return self._worker.reserve_kv(args[0])
        return func(*args, **kwargs)


class GmsCpuWorker(CPUWorker):
    """The worker of a GMS engine. Its methods are called by name through ``collective_rpc``."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        service = Placement.from_config(vllm_config.additional_config).service
        if service is None:
            raise ValueError("this worker needs a memory service")
        self._service: MemoryService = service
        self._kv: KvMemory | None = None

    def determine_available_memory(self) -> int:
        """The KV cache's size, as set: its pages are the service's, so free memory here says nothing about them."""
        return int(self.cache_config.kv_cache_memory_bytes)

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        if tag == "kv_cache":
            return _KvAllocation(self)
        context: AbstractContextManager[Any] = super()._maybe_get_memory_pool_context(tag)
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
        size = self.kv.range.size_bytes
        self.kv.range.map_scratch(max(_SCRATCH_CHUNK_BYTES, size // _SCRATCH_MAPPINGS))

    def kv_map(self, epoch: int) -> None:
        """Put the service's pages behind the range."""
        self.kv.map(epoch=epoch)

    def kv_unmap(self) -> None:
        """Take pages or scratch away. The caller sees to it that no step runs."""
        self.kv.unmap()

    def hotspare_memory(self) -> EngineMemory:
        """Measured from the tensors' real addresses."""
        return measure(self.model_runner.get_model(), self._kv)

    def hotspare_kv(self) -> KvMemory:
        """The KV memory itself, which may be asked from any thread how its custody stands."""
        return self.kv

    def hotspare_weights(self) -> WeightsMemory | None:
        """The weights' memory, as ``hotspare_kv``."""
        return weights_of(self.model_runner.get_model())

    def shutdown(self) -> None:
        super().shutdown()
        if self._kv is not None:
            self._kv.unmap()  # the range itself stays: tensors over it may still be referenced


class PrivateMemoryWorker(CPUWorker):
    """The worker of an engine without a service: private weights, private KV cache."""

    def hotspare_memory(self) -> EngineMemory:
        memory = measure(self.model_runner.get_model(), None)
        kv_bytes = sum(storage.nbytes() for storage in _storages(self.model_runner.kv_caches).values())
        return EngineMemory(
            weights_bytes=memory.weights_bytes,
            weights_outside_gms_bytes=memory.weights_outside_gms_bytes,
            weights_role=memory.weights_role,
            kv_bytes=kv_bytes,
            kv_mapped=True,
        )


def measure(model: Any, kv: KvMemory | None) -> EngineMemory:
    """Count each parameter's storage once, and those outside the service's mapping apart."""
    weights = weights_of(model)
    total = outside = 0
    for address, storage in _storages(model.parameters()).items():
        total += storage.nbytes()
        if weights is None or not weights.holds(address, storage.nbytes()):
            outside += storage.nbytes()
    return EngineMemory(
        weights_bytes=total,
        weights_outside_gms_bytes=outside,
        weights_role=weights.role if weights is not None else "private",
        kv_bytes=kv.range.size_bytes if kv is not None else 0,
        kv_mapped=kv is not None and kv.mapped,
    )


def _storages(tensors: Any) -> dict[int, Any]:
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage for storage in storages}
