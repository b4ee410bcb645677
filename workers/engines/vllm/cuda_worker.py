"""vLLM's worker for a GPU, as an engine uses it: memory as ``worker`` has it, requests resumed as ``resumed`` has it.

Not run on hardware: written against vLLM's sources, which any build of it has, and checked against them by name. What
differs from a CPU, here and in ``worker.KvOnGpu``:

- Kernels are handed over and run later. Nothing may be taken from under the KV range before the device has come to
  rest, and a kernel that touches addresses without memory ends the engine's GPU context, and with it the engine.
- So from its reservation on the range has scratch behind it: while kernels are compiled and tuned and graphs captured.
  Graphs keep addresses, and addresses stay. vLLM's dummy runs write to no slot; what they read is zero.
- The cache's size is a setting, and what vLLM returns for it. It runs the model once without a cache beforehand, which
  compiles it; free memory is looked at nowhere but where something is allocated.
- After a wake vLLM has nothing to mend here. Scales of the cache are buffers, of which each engine has its own for
  life; what a sleeping vLLM loses is weights, cache and scratch of its own pools, and of these there are none
  (``arguments`` refuses them). Of its ``wake_up`` the wait for the device remains, which ``kv_map`` has.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from workers.engines.vllm.resumed import ResumedBatch
from workers.engines.vllm.worker import KvOnGpu, PrivateMemoryWorker


class ResumedCudaRunner(ResumedBatch, GPUModelRunner):
    """vLLM's V1 runner for GPUs, with resumed requests."""


class ResumedCudaWorker(Worker):
    """vLLM's worker for GPUs with the runner above."""

    def _make_model_runner(self) -> Any:
        if self.use_v2_model_runner:
            return super()._make_model_runner()
        return ResumedCudaRunner(self.vllm_config, self.device)

    def hotspare_seeds_resume(self) -> bool:
        """Kernels draw as many numbers as suits them: what a token takes from a generator is not known."""
        return False


class GmsCudaWorker(KvOnGpu, ResumedCudaWorker):
    """The worker of an engine with a memory service."""


class PrivateCudaWorker(PrivateMemoryWorker, ResumedCudaWorker):
    """The worker of an engine without one."""
