"""The sim's engine loop: one timer a step for the whole batch, as a real engine has one forward pass a step.

A step is due every ``token_seconds`` while requests run, counted from the step before and not from its end, so that
the pace does not depend on how long the step took. While all requests are in their prefill, steps go on (slowly): a
long prefill is work, and whoever watches the step counter must see that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from workers.engine import EngineDeadError
from workers.engines.sim.batch import Batch, SimRequest
from workers.engines.sim.tokens import prompt_digest

PREFILL_STEP_SECONDS = 0.01
"""Shortest time between steps that only prefill: they make no token, so they may be rare."""


class Generation:
    """One request's tokens as they come. Close it, whatever happened."""

    def __init__(self, scheduler: Scheduler, request: SimRequest) -> None:
        self._scheduler = scheduler
        self._taken = 0
        self._arrived = asyncio.Event()
        self._closed = False
        self.request = request

    def notify(self) -> None:
        """Something changed: tokens came, or the engine failed."""
        self._arrived.set()

    async def pull(self) -> list[int]:
        """The tokens made since the last call, at least one; an empty list once there will be no more.

        Raises:
            EngineDeadError: the engine failed or was shut down before this request was done.
        """
        request = self.request
        while True:
            new = request.tokens[self._taken :]
            if new:
                self._taken += len(new)
                return new
            if request.complete or self._closed:
                return []
            if self._scheduler.failure is not None:
                raise EngineDeadError(str(self._scheduler.failure)) from self._scheduler.failure
            self._arrived.clear()
            await self._arrived.wait()

    def close(self) -> None:
        """Stop generating for this request and end a ``pull`` that waits."""
        if not self._closed:
            self._closed = True
            self._scheduler.discard(self)
            self._arrived.set()


class Scheduler:
    """Runs the batch. ``make_token`` does one request's part of a step and touches the memory."""

    def __init__(
        self, *, slots: int, ttft_seconds: float, token_seconds: float, make_token: Callable[[SimRequest], int]
    ) -> None:
        self._batch = Batch(slots=slots, ttft_seconds=ttft_seconds)
        self._token_seconds = token_seconds
        self._make_token = make_token
        self._generations: dict[SimRequest, Generation] = {}
        self._changed = asyncio.Event()
        self._may_step = False
        self._stalled = False
        self.steps = 0
        self.failure: Exception | None = None
        """Why no step will ever be made again."""

    @property
    def busy(self) -> bool:
        """Whether a step is due. False while paused: a parked engine owes nobody a step."""
        return self._may_step and bool(self._batch.running or self._batch.waiting)

    @property
    def usage(self) -> float:
        """Share of slots in use, 0 to 1."""
        return self._batch.running / self._batch.slots

    def submit(self, prompt: list[int], *, max_tokens: int) -> Generation:
        """Start generating ``max_tokens`` tokens for a prompt."""
        request = SimRequest(digest=prompt_digest(prompt), prompt_tokens=len(prompt), max_tokens=max_tokens)
        generation = Generation(self, request)
        self._generations[request] = generation
        self._batch.add(request, now=asyncio.get_running_loop().time())
        self._changed.set()
        return generation

    def discard(self, generation: Generation) -> None:
        """Forget a request; its slot is free at once."""
        if self._generations.pop(generation.request, None) is not None:
            self._batch.remove(generation.request, now=asyncio.get_running_loop().time())

    def resume(self) -> None:
        """Steps may be made from now on, unless the engine failed."""
        self._may_step = self.failure is None
        self._changed.set()

    def pause(self) -> None:
        """No step after this call returns (steps run on the loop, so none is half done). Requests keep waiting."""
        self._may_step = False

    def stall(self) -> None:
        """Fault: make no step any more while requests run."""
        self._stalled = True

    def fail(self, error: Exception) -> None:
        """End every request with ``error``; nothing is generated any more."""
        self._may_step = False
        self.failure = self.failure or error
        for generation in self._generations.values():
            generation.notify()

    async def run(self) -> None:
        """Make steps until cancelled, or until one fails (then ``failure`` says why)."""
        clock = asyncio.get_running_loop().time
        due = clock()
        while self.failure is None:
            if not self.busy or self._stalled:
                self._changed.clear()
                await self._changed.wait()
                due = clock()
                continue
            now = clock()
            try:
                self._step(now)
            except Exception as error:
                self.fail(error)
                return
            due = max(due + self._pace(), now)
            prefill_until = self._batch.prefill_until()
            if prefill_until is not None:
                due = min(due, max(prefill_until, now))
            await asyncio.sleep(due - now)

    def _pace(self) -> float:
        if self._batch.prefill_until() is None:
            return self._token_seconds
        return max(self._token_seconds, PREFILL_STEP_SECONDS)

    def _step(self, now: float) -> None:
        self.steps += 1
        for request in self._batch.step(self._make_token, now=now):
            self._generations[request].notify()
