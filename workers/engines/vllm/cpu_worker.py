"""vLLM's worker for CPUs, as an engine uses it: memory as ``worker`` has it, requests resumed as ``resumed`` has it.

Not to be imported on a machine whose vLLM runs on GPUs: vLLM's own module replaces parts of ``torch.cuda``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from workers.engines.vllm.resumed import ResumedBatch
from workers.engines.vllm.worker import GmsWorker, PrivateMemoryWorker


class ResumedRunner(ResumedBatch, CPUModelRunner):
    """vLLM's V1 runner for CPUs, with resumed requests, and with seeds that survive a prefill in chunks."""

    _resting: Mapping[int, torch.Generator] = MappingProxyType({})
    """Generators of the rows that draw from none in this step."""

    # vLLM takes back what a row drew whose sample is thrown away (a prefill that is not at its end) by setting its
    # generator's offset, which only CUDA's have: on a CPU that ends the engine. Here such rows do not draw from their
    # own generator in the first place.

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        rows = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0].tolist()
        generators = self.input_batch.generators
        self._resting = {row: generators.pop(row) for row in rows if row in generators}
        return super()._sample(*args, **kwargs)

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            self.input_batch.generators.update(self._resting)
            self._resting = MappingProxyType({})

    def _advance(self, generator: torch.Generator, draws: int) -> None:
        """vLLM's sampler for CPUs draws a number a token."""
        for _ in range(draws):
            torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)


class ResumedWorker(CPUWorker):
    """vLLM's worker for CPUs with the runner above."""

    def init_device(self) -> None:
        super().init_device()
        if not self.use_v2_model_runner:
            self.model_runner.__class__ = ResumedRunner

    def hotspare_seeds_resume(self) -> bool:
        """Whether a token takes from its request's generator what the runner's ``_advance`` takes: not so with 64-bit
        noise, nor on architectures that vLLM has no kernel for."""
        sampler = getattr(getattr(self.model_runner, "sampler", None), "topk_topp_sampler", None)
        return sampler is not None and sampler.forward == sampler.forward_cpu and not sampler.use_fp64_gumbel


class GmsCpuWorker(GmsWorker, ResumedWorker):
    """The worker of an engine with a memory service."""

    def determine_available_memory(self) -> int:
        """The KV cache's size, as set: its pages are the service's, so free memory here says nothing about them."""
        return int(self.cache_config.kv_cache_memory_bytes)


class PrivateCpuWorker(PrivateMemoryWorker, ResumedWorker):
    """The worker of an engine without one."""
