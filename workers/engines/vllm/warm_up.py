"""The first requests of an engine, which nobody waits for.

What a first request does lazily (schemas, chat template, tokenizer, sampler, detokenizer, response path) is then done:
after a promotion the first client should not pay for it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

import httpx

from workers.engine import ASGIApp

logger = logging.getLogger(__name__)

_PROMPT: Final = "Say hello to the user in one short sentence."
_TOKENS: Final = 4
REQUEST_SECONDS: Final = 120.0
"""For each of them: what an engine that serves may take for one step (``step_timeout_seconds``), since the first step
is the slowest."""


async def warm_up(app: ASGIApp, *, model: str, tasks: Any, request_seconds: float = REQUEST_SECONDS) -> None:
    """Send the application a few requests in this process, and discard the answers.

    Failures are logged and otherwise ignored: they would come again, with a client to see them. After a request that
    is not answered in ``request_seconds`` no other one is sent. Whether the engine itself hangs, whoever parks it finds
    out.
    """
    if "generate" not in tasks:
        return
    chat = {"model": model, "messages": [{"role": "user", "content": _PROMPT}], "max_tokens": _TOKENS}
    text = {"model": model, "prompt": _PROMPT, "max_tokens": _TOKENS, "ignore_eos": True}
    sampled = {"temperature": 0.7, "top_p": 0.9, "seed": 1}
    streamed = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    asks: tuple[tuple[str, str, dict[str, Any] | None], ...] = (
        ("POST", "/v1/chat/completions", {**chat, **streamed, "ignore_eos": True}),
        ("POST", "/v1/chat/completions", {**chat, **sampled, "logprobs": True, "top_logprobs": 1}),
        ("POST", "/v1/completions", {**text, **streamed}),
        ("POST", "/v1/completions", {**text, **sampled}),
        ("GET", "/v1/models", None),
    )
    # Its own timeouts are a connection's, and there is none: httpx's ASGITransport waits for ever.
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://warm-up") as client:
        for method, path, body in asks:
            limit = asyncio.timeout(request_seconds)
            try:
                async with limit:
                    answer = await client.request(method, path, json=body)
            except Exception as error:
                if limit.expired():
                    logger.warning("warm-up: %s did not answer within %g s; no more is tried", path, request_seconds)
                    return
                logger.warning("warm-up: %s failed: %s", path, error, exc_info=True)
            else:
                if answer.status_code != httpx.codes.OK:
                    logger.warning("warm-up: %s answered %d: %.300s", path, answer.status_code, answer.text)
