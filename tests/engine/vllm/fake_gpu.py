"""The driver beside it, for engines whose memory is that of the fake GPU: ``python -m tests.engine.vllm.fake_gpu``.

vLLM computes on the CPU, and what the fake driver maps is the host's memory; so torch is told that it is. All else is
as on a GPU: the service and its clients, chunks and scratch, digests, and the half of the worker that has the memory.
"""

from __future__ import annotations

import os

from tests.engine.vllm import driver
from workers.engines.vllm import arguments

WORKER = "tests.engine.vllm.fake_gpu_worker.FakeGpuWorker"


def mark(word: str) -> None:
    """A line between those of the fake driver's calls."""
    log = os.open(os.environ["FAKE_CUDA_LOG"], os.O_WRONLY | os.O_APPEND)
    try:
        os.write(log, f"{word}\n".encode())
    finally:
        os.close(log)


if __name__ == "__main__":
    arguments.WORKERS[False, True] = WORKER
    driver.main()
