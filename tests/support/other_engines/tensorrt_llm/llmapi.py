"""As TensorRT-LLM's: workers in processes of their own, asked for their memory over Ray."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import Any

from generating import Generating, fork_child


class AsyncLLM:
    def __init__(self, model: str, max_seq_len: int, max_batch_size: int, dtype: str, **kwargs: Any) -> None:
        if unknown := set(kwargs) - {"tensor_parallel_size", "trust_remote_code"}:
            raise ValueError(f"unknown arguments: {', '.join(sorted(unknown))}")
        self.max_seq_len = max_seq_len
        self.generating = Generating()
        self.child = 0
        self.broken = "breaks-at-its-end" in model

    async def setup_async(self) -> None:
        self.child = fork_child()

    async def release(self, tags: list[str]) -> None:
        await asyncio.sleep(0)
        self.generating.release(tags)

    async def resume(self, tags: list[str]) -> None:
        await asyncio.sleep(0)
        self.generating.resume(tags)

    def _check_health(self) -> bool:
        return self.generating.health

    def shutdown(self) -> None:
        self.generating.calls.append("shutdown")
        child, self.child = self.child, 0
        if child:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        if self.broken:
            raise RuntimeError("the executor did not answer")
