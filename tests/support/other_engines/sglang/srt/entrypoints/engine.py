"""As SGLang's: one scheduler process, and a tokenizer manager in this one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import Any

from generating import Generating, fork_child

from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput


class TokenizerManager:
    def __init__(self, server_args: Any) -> None:
        self.server_args = server_args
        self.generating = Generating()

    @property
    def last_receive_tstamp(self) -> float:
        return self.generating.last

    @property
    def rid_to_state(self) -> dict[str, None]:
        return dict.fromkeys(self.generating.requests)

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        self.generating.requests.difference_update([rid], self.rid_to_state if abort_all else ())

    async def release_memory_occupation(self, obj: ReleaseMemoryOccupationReqInput, request: Any) -> None:
        assert self.server_args.enable_memory_saver
        await asyncio.sleep(0)
        self.generating.release(obj.tags or [])

    async def resume_memory_occupation(self, obj: ResumeMemoryOccupationReqInput, request: Any) -> None:
        await asyncio.sleep(0)
        self.generating.resume(obj.tags or [])


class Engine:
    def __init__(self, **kwargs: Any) -> None:
        self.server_args = kwargs["server_args"]
        if "no-such-model" in self.server_args.model_path:
            raise ValueError("it has no config.json")
        self.tokenizer_manager = TokenizerManager(self.server_args)
        self.template_manager = object()
        self.children = [fork_child()]

    def get_all_child_pids(self) -> list[int]:
        return list(self.children)

    def shutdown(self) -> None:
        self.tokenizer_manager.generating.calls.append("shutdown")
        for pid in self.children:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        self.children = []
