"""What notes cost the worker: units of one event, with vLLM's outputs and the note before each, and without."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from workers.asgi import Message
from workers.engines.vllm.replay import _note
from workers.recorder import Recorder

_UNITS: Final = 2000
_TURNS: Final = 9
_HEAD: Final = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
_EVENT: Final = b"data: " + b"x" * 240 + b"\n\n"


async def microseconds(logprobs: int) -> float:
    """A unit's, the least of several turns: whatever else this machine does can only add to it."""
    outputs = [_output(token, logprobs) for token in range(_UNITS)]
    return (await _least(_with, outputs) - await _least(_without, outputs)) / _UNITS * 1e6


async def _least(turn: Callable[[list[Any]], Awaitable[None]], outputs: list[Any]) -> float:
    seconds = []
    for _ in range(_TURNS):
        started = time.thread_time()
        await turn(outputs)
        seconds.append(time.thread_time() - started)
    return min(seconds)


async def _with(outputs: list[Any]) -> None:
    recorder = Recorder(_send, root="r")
    await recorder.send(_HEAD)
    for output in outputs:
        _note(recorder, output, first=False)
        await recorder.send({"type": "http.response.body", "body": _EVENT, "more_body": True})
        await recorder.end_unit()


async def _without(outputs: list[Any]) -> None:
    for _ in outputs:
        await _send({"type": "http.response.body", "body": _EVENT, "more_body": True})


async def _send(message: Message) -> None:
    assert message


def _output(token: int, logprobs: int) -> Any:
    likely = {token + at: Logprob(logprob=-1.5, rank=at + 1, decoded_token="x") for at in range(logprobs)}
    choice = CompletionOutput(
        index=0,
        text=" word",
        token_ids=[token],
        cumulative_logprob=None,
        logprobs=[likely] if logprobs else None,
    )
    return RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=[1],
        prompt_logprobs=None,
        outputs=[choice],
        finished=False,
        num_cached_tokens=0,
    )
