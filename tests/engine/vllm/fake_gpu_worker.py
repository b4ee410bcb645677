"""The worker of an engine on the fake GPU: what GPUs ask for, over vLLM's worker for CPUs."""

from __future__ import annotations

from typing import Any

from gms import dlpack, tensors
from gms.devices import DLPACK_CPU
from tests.engine.vllm.fake_gpu import mark
from workers.engines.vllm.cpu_worker import GmsCpuWorker
from workers.engines.vllm.worker import KvOnGpu


def on_the_host(address: int, size_bytes: int, *, device: tuple[int, int], owner: object = None) -> Any:
    """A tensor over the memory, wherever it is said to be."""
    return dlpack.raw_bytes(address, size_bytes, device=(DLPACK_CPU, 0), owner=owner)


tensors.raw_bytes = on_the_host


class FakeGpuWorker(KvOnGpu, GmsCpuWorker):
    """Says when it waits for the device."""

    def synchronize_device(self) -> None:
        mark("SYNC")

    def kv_map(self, epoch: int) -> None:
        mark("WAKE")
        super().kv_map(epoch)
        mark("AWAKE")
