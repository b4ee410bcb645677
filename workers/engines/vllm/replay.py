"""vLLM's AsyncLLM, recording what it gives to the serving layer, and replaying what another engine gave.

The serving layer is a function of the outputs that it pulls from ``generate``, of its clock and of its ids. So one pull
is one note (``workers.recorder``), and a resume runs the same serving code over the same outputs: its requests are
registered with the output processor but held back from the core; the noted tokens go through the output processor as if
they came from there (detokenizer, stop strings, logprobs); each noted output is pulled as it had been; and when the
serving layer asks for more than there was, and what it made of it is what the client has, the held requests enter the
core as if they had been preempted after those tokens (``resumed``).

Whatever fails in between ends this one request: it is answered with 409, and what it had registered is aborted.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any, Final

from vllm.exceptions import GenerationError, MaxQueuedTokensError, QueueOverflowError
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from workers.engines.vllm import admission
from workers.engines.vllm.logprob_text import pack
from workers.engines.vllm.replayed import Choice, logprobs_of
from workers.engines.vllm.resumable import engine_reason, request_reason
from workers.engines.vllm.resumed import RESUMED
from workers.recorder import RECORDER, Recorder, ResumeRefusedError
from workers.resume import Resume, crc32

logger = logging.getLogger(__name__)

_OUTPUTS_A_TURN: Final = 32
"""Outputs that are replayed before the event loop gets its turn."""
_TOKENS_A_TURN: Final = 256
"""The same, of tokens: one output may have many."""

_FULL: Final = (QueueOverflowError, MaxQueuedTokensError)

_UNFINISHED: Final = frozenset({"abort", "error"})
"""Ends that say nothing of the tokens before them."""


class ReplayingLLM(AsyncLLM):
    """One engine's client, for requests with a recorder and for those without."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._never = engine_reason(self.vllm_config)
        self._seeds_resume = False
        self._configuration = 0
        self._held: ContextVar[list[Any] | None] = ContextVar("hotspare_held", default=None)
        self._enter_core = self.engine_core.add_request_async
        self.engine_core.add_request_async = self._hold_or_enter

    def resume_with(self, *, seeds_resume: bool, configuration: bytes) -> None:
        """What is known once the core runs: whether generators can be brought to where they were, and a text that is
        the same for engines that give the same answers."""
        self._seeds_resume = seeds_resume
        self._configuration = crc32(configuration)

    async def _hold_or_enter(self, request: Any) -> None:
        held = self._held.get()
        if held is not None:
            held.append(request)
        else:
            await self._enter_core(request)

    def generate(self, prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> AsyncGenerator[Any, None]:
        """As AsyncLLM's; no layer lies over it where nobody records."""
        if sampling_params.extra_args and RESUMED in sampling_params.extra_args:  # a client's
            sampling_params = copy.copy(sampling_params)
            sampling_params.extra_args = {k: v for k, v in sampling_params.extra_args.items() if k != RESUMED}
        recorder = RECORDER.get()
        if recorder is None:
            return super().generate(prompt, sampling_params, request_id, **options)
        return self._recorded(recorder, prompt, sampling_params, request_id, options)

    async def _recorded(
        self, recorder: Recorder, prompt: Any, params: Any, request_id: str, options: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        reason = self._never or request_reason(
            prompt, params, lora=options.get("lora_request") is not None, seeds_resume=self._seeds_resume
        )
        try:
            await self._begin(recorder, prompt, reason)
            whole = params.output_kind == RequestOutputKind.FINAL_ONLY and not reason
            if whole:  # told as it is generated, given to the serving layer at its end
                params = copy.copy(params)
                params.output_kind = RequestOutputKind.DELTA
            total: Any = None
            first = True
            async with aclosing(super().generate(prompt, params, request_id, **options)) as outputs:
                async for output in outputs:
                    if not reason and not recorder.replaying:
                        _note(recorder, output, first=first)
                    first = False
                    if not whole:
                        yield output
                        await recorder.end_unit()
                        continue
                    if total is None:
                        total = output
                    else:
                        total.add(output, aggregate=True)
                    await recorder.note_alone()
            await _replayed(recorder)
        except Exception as error:
            if isinstance(error, _FULL):  # a stream's head says 200 already, but has not left
                await recorder.turn_away(error.message)
            if not recorder.refused:
                raise
            # Nobody will read what the serving layer says of it; of this kind it says it without a stack trace.
            raise GenerationError("the request was refused") from error
        if total is not None:
            total.outputs.sort(key=lambda choice: choice.index)
            yield total

    async def _begin(self, recorder: Recorder, prompt: Any, reason: str) -> None:
        """Say, or compare, what this answer is made from, and let go what the serving layer says before any token."""
        try:
            if reason and recorder.replaying:
                raise ResumeRefusedError(f"{reason} cannot be resumed")
            recorder.generates()
            if reason:
                recorder.unresumable(reason)
            else:
                recorder.made_from(f"{crc32(array('I', prompt['prompt_token_ids']).tobytes(), self._configuration):x}")
        except ResumeRefusedError as refused:
            await _refuse(recorder, refused)
            raise
        await recorder.end_unit()

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """As AsyncLLM's; its refusals are told as such."""
        try:
            super().check_admission(n, request_id)
        except _FULL as error:
            admission.refused(error.message)
            raise

    async def add_request(self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        """As AsyncLLM's; of a request that is replayed, the queue that comes back gives the replayed outputs first."""
        recorder = RECORDER.get()
        if recorder is None:
            return await super().add_request(request_id, prompt, params, *args, **kwargs)
        held: list[Any] | None = [] if recorder.replaying else None
        # Without the recorder: the ids by which the engine knows its requests must not be those of an earlier attempt.
        recording, holding = RECORDER.set(None), self._held.set(held)
        try:
            queue = await super().add_request(request_id, prompt, params, *args, **kwargs)
        finally:
            self._held.reset(holding)
            RECORDER.reset(recording)
        if held is None or recorder.resume is None:
            return queue
        try:
            return await self._replay(recorder, recorder.resume, queue, held)
        except BaseException as error:
            if isinstance(error, Exception):
                await _refuse(recorder, error)
            await self.abort(queue.request_id, internal=True)
            raise

    async def _replay(self, recorder: Recorder, resume: Resume, queue: Any, held: list[Any]) -> _ReplayedQueue:
        choices = [Choice(request, self.model_config) for request in held]
        states = self.output_processor.request_states
        logprobs = logprobs_of(resume, choices)
        for choice in choices:
            state = states[choice.request.request_id]
            state.num_cached_tokens = resume.cached_tokens or 0
            state.num_cache_creation_tokens = resume.cache_writes or 0
            if state.num_cached_tokens > len(choice.request.prompt_token_ids):
                raise ResumeRefusedError("its notes have more cached tokens than its prompt has tokens")
        outputs: deque[Any] = deque()
        taken = 0
        for number, output in enumerate(resume.outputs):
            positions = iter(logprobs[number]) if logprobs else None
            for index, tokens in output:
                if not 0 <= index < len(choices):
                    raise ResumeRefusedError(f"its notes name a choice {index}")
                for token in tokens:
                    made = choices[index].take(token, states, next(positions) if positions is not None else None)
                    self.output_processor.process_outputs([made])
                    taken += 1
                    if taken % _TOKENS_A_TURN == 0:
                        await asyncio.sleep(0)
            pulled = queue.get_nowait()
            if pulled is None:
                raise ResumeRefusedError("an output that its notes name gives nothing here")
            outputs.append(pulled)
            if number % _OUTPUTS_A_TURN == _OUTPUTS_A_TURN - 1:
                await asyncio.sleep(0)

        async def go_on() -> None:
            await _replayed(recorder)
            for choice in choices:
                if choice.request.request_id in states:
                    await self._enter_core(choice.resumed())

        return _ReplayedQueue(queue, outputs, go_on, recorder)


class _ReplayedQueue:
    """Stands for the queue that ``generate`` pulls from: what was replayed, one output a pull, and then the queue."""

    def __init__(
        self, queue: Any, outputs: deque[Any], go_on: Callable[[], Awaitable[None]], recorder: Recorder
    ) -> None:
        self.request_id = queue.request_id
        self._recorder = recorder
        self._queue = queue
        self._outputs = outputs
        self._go_on: Callable[[], Awaitable[None]] | None = go_on

    def get_nowait(self) -> Any:
        return None if self._go_on is not None else self._queue.get_nowait()

    async def get(self) -> Any:
        if self._outputs:
            return self._outputs.popleft()
        if self._go_on is not None:
            go_on, self._go_on = self._go_on, None
            await go_on()
            return await self._first()
        return await self._queue.get()

    async def _first(self) -> Any:
        """What the core says first. Nothing was sent yet: if it does not take the tokens, this can still be a 409."""
        output = await self._queue.get()
        if any(choice.finish_reason == "error" and not choice.token_ids for choice in output.outputs):
            refused = ResumeRefusedError("the engine does not take its tokens")
            await _refuse(self._recorder, refused)
            raise refused
        return output

    def close(self) -> None:
        self._queue.close()


def _note(recorder: Recorder, output: Any, *, first: bool) -> None:
    """What the serving layer is about to pull."""
    choices, logprobs = [], []
    for choice in output.outputs:
        choices.append((choice.index, choice.token_ids))
        if choice.logprobs is not None:
            logprobs += choice.logprobs
        if choice.finish_reason in _UNFINISHED:
            recorder.unresumable(f"ended_by_{choice.finish_reason}")
    text = pack(logprobs) if logprobs else ""
    if first:
        recorder.output(
            choices,
            logprobs=text,
            cached_tokens=output.num_cached_tokens,
            cache_writes=output.num_cache_creation_tokens or None,
        )
    else:
        recorder.output(choices, logprobs=text)


async def _replayed(recorder: Recorder) -> None:
    """The serving layer has made all that it makes of what was noted."""
    try:
        await recorder.replayed()
    except ResumeRefusedError as refused:
        await _refuse(recorder, refused)
        raise


async def _refuse(recorder: Recorder, error: Exception) -> None:
    if isinstance(error, ResumeRefusedError):
        await recorder.refuse(str(error), cause=error.cause)
    else:
        logger.error("a replay failed", exc_info=error)
        await recorder.refuse(f"its replay failed with {type(error).__name__}")
