"""What the stand-ins for other engines do as engines do: tokens that come with time, over a cache that can be away."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

TOKEN_SECONDS = 0.002


def fork_child() -> int:
    """A process of the engine's own, as its schedulers are; it ends with its parent."""
    from workers.lifeline import die_with_parent

    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            die_with_parent(parent)
            while True:
                time.sleep(3600)
        finally:
            os._exit(1)
    return pid


class Generating:
    """The tokens of all requests. ``present``: the parts of its memory that are there."""

    def __init__(self) -> None:
        self.present = {"weights", "kv_cache"}
        self.requests: set[str] = set()
        self.calls: list[str] = []
        self.health = True
        self.last = 0.0

    async def tokens(self, rid: str, count: int) -> AsyncIterator[str]:
        self.requests.add(rid)
        try:
            for at in range(count):
                await asyncio.sleep(TOKEN_SECONDS)
                if rid not in self.requests:
                    return
                assert "kv_cache" in self.present, "a step over a cache that is away"
                self.last = time.time()
                yield f" word{at}"
        finally:
            self.requests.discard(rid)

    def release(self, tags: list[str]) -> None:
        assert not self.requests, "memory is released when the engine is idle only"
        assert self.present.issuperset(tags), "released twice"
        self.calls.append(f"release {','.join(tags)}")
        self.present -= set(tags)

    def resume(self, tags: list[str]) -> None:
        assert self.present.isdisjoint(tags), "resumed twice"
        self.calls.append(f"resume {','.join(tags)}")
        self.present |= set(tags)


async def answer(engine: Generating, request: Request, asked: Any, *, chat: bool, most: int) -> Response:
    """An answer of chat completions or completions, in the engine's own words."""
    rid = os.urandom(8).hex()
    head = {"id": rid, "object": "chat.completion" if chat else "text_completion", "model": asked.model, "created": 1}
    if asked.max_tokens > most:
        flat = {"object": "error", "message": f"max_tokens is more than {most}", "type": "BadRequestError", "code": 400}
        return JSONResponse(flat, status_code=400)
    tokens = engine.tokens(rid, asked.max_tokens)
    if not asked.stream:
        text = "".join([token async for token in tokens])
        said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        usage = {"prompt_tokens": 3, "completion_tokens": asked.max_tokens, "total_tokens": asked.max_tokens + 3}
        return JSONResponse({**head, "choices": [{"index": 0, "finish_reason": "length", **said}], "usage": usage})

    async def events() -> AsyncIterator[bytes]:
        async for token in tokens:
            said = {"delta": {"content": token}} if chat else {"text": token}
            yield f"data: {json.dumps({**head, 'choices': [{'index': 0, **said}]})}\n\n".encode()
        yield b"data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")
