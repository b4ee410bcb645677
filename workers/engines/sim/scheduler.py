"""The sim's engine loop: one timer a step for the whole batch, as a real engine has one forward pass a step.

A step is due every ``token_seconds`` while requests run, counted from the step before and not from its end, so that
the pace does not depend on how long the step took. While all requests are in their prefill, steps go on (slowly): a
long prefill is work, and whoever watches the step counter must see that.

Where an accelerator's time is simulated (:mod:`.accelerator`), what a step is made of is settled when it begins and
says how long it takes; its tokens are there when it is over. A step that ends late lets the next one begin as if it had
not, as long as that is little: a timer's lateness, which a real accelerator has none of, must not add up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from workers.engine import EngineDeadError
from workers.engines.sim.accelerator import Accelerator, Work
from workers.engines.sim.batch import Batch, Composed, SimRequest, Slots
from workers.engines.sim.tokens import prompt_digest

PREFILL_STEP_SECONDS = 0.01
"""Shortest time between steps that only prefill: they make no token, so they may be rare."""

CATCH_UP_SECONDS = 0.02
"""A step may begin so much before the one before it was found to be over."""

MOST_ABORTED = 65536
"""Between two looks at the engine; more are forgotten, and taken for answered."""


class Generation:
    """One request's tokens as they come. Close it, whatever happened."""

    def __init__(self, scheduler: Scheduler, request: SimRequest) -> None:
        self._scheduler = scheduler
        self._taken = request.given
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
        self,
        *,
        slots: int,
        ttft_seconds: float,
        token_seconds: float,
        make_token: Callable[[SimRequest], int],
        prefixes: Slots | None = None,
        accelerator: Accelerator | None = None,
    ) -> None:
        """``accelerator``: whose times hold, instead of the two that are given."""
        self._accelerator = accelerator
        self._batch = Batch(slots=slots, ttft_seconds=ttft_seconds, prefixes=prefixes, accelerator=accelerator)
        self._under_way: Composed | None = None
        """The accelerator's step."""
        self._token_seconds = token_seconds
        self._make_token = make_token
        self._generations: dict[SimRequest, Generation] = {}
        self._changed = asyncio.Event()
        self._may_step = False
        self._stalled = self._starved = False
        self._aborted: dict[str, int] = {}
        self.steps = 0
        self.failure: Exception | None = None
        """Why no step will ever be made again."""

    @property
    def busy(self) -> bool:
        """Whether a step is due. False while paused: a parked engine owes nobody a step."""
        return self._may_step and bool(self._batch.running or self._batch.waiting)

    @property
    def free_slots(self) -> deque[int]:
        """Whose right end has been free for longest."""
        return self._batch.free

    @property
    def usage(self) -> float:
        """Share of slots in use, 0 to 1."""
        return self._batch.running / self._batch.slots

    @property
    def work(self) -> Work:
        """The accelerator's."""
        return self._batch.work

    @property
    def counts(self) -> dict[str, int]:
        """Requests that run and that wait, and tokens of the KV cache that are taken."""
        batch = self._batch
        return {"running": batch.running, "waiting": batch.waiting, "kv_tokens": batch.kv_tokens}

    def submit(
        self, prompt: list[int], *, max_tokens: int, generated: Sequence[int] = (), dies_after: int | None = None
    ) -> Generation:
        """Start generating ``max_tokens`` tokens for a prompt, or what is missing of them: at least one more than
        those that another engine has ``generated``. ``dies_after`` is a fault (:mod:`.poison`)."""
        request = SimRequest(
            digest=prompt_digest(prompt),
            prompt_tokens=len(prompt),
            max_tokens=max_tokens,
            generated=generated,
            dies_after=dies_after,
            prompt=prompt,
        )
        generation = Generation(self, request)
        self._generations[request] = generation
        self._batch.add(request, now=asyncio.get_running_loop().time())
        self._changed.set()
        return generation

    def discard(self, generation: Generation) -> None:
        """Forget a request; its slot is free at once."""
        request = generation.request
        if self._generations.pop(request, None) is not None:
            if not request.complete and len(self._aborted) < MOST_ABORTED:
                self._aborted[str(id(request))] = self._mark(request)
            self._batch.remove(generation.request, now=asyncio.get_running_loop().time())

    def resume(self) -> None:
        """Steps may be made from now on, unless the engine failed."""
        self._may_step = self.failure is None
        if self._may_step:
            self._batch.go_on(now=asyncio.get_running_loop().time())
        self._changed.set()

    def pause(self) -> None:
        """No step after this call returns (steps run on the loop, so none is half done; what an accelerator has under
        way comes to nothing). Requests keep waiting."""
        self._may_step = False
        self._under_way = None

    def recompute(self) -> None:
        """The pages are about to go: what runs begins with its prefill once steps may be made again."""
        self._batch.recompute(now=asyncio.get_running_loop().time())

    def stall(self) -> None:
        """Fault: make no step any more while requests run."""
        self._stalled = True

    def starve(self) -> None:
        """Fault: make steps, and no token in any of them."""
        self._starved = True

    def marks(self) -> dict[str, int]:
        """For each request that a step is due for how far it is: its tokens first, and below them the steps of its
        prefill, each of which gets it on."""
        if not self._may_step:
            return {}
        return {str(id(request)): self._mark(request) for request in self._batch.requests()}

    def aborted(self) -> dict[str, int]:
        """The same for requests that were given up since this was asked last."""
        aborted, self._aborted = self._aborted, {}
        return aborted

    def _mark(self, request: SimRequest) -> int:
        steps = 0 if self._starved or len(request.tokens) > request.given else self.steps
        return len(request.tokens) << 40 | steps

    def fail(self, error: Exception) -> None:
        """End every request with ``error``; nothing is generated any more."""
        self._may_step = False
        self.failure = self.failure or error
        for generation in self._generations.values():
            generation.notify()

    async def run(self) -> None:
        """Make steps until cancelled, or until one fails (then ``failure`` says why)."""
        if self._accelerator is not None:
            await self._run_timed(self._accelerator)
            return
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

    async def _run_timed(self, accelerator: Accelerator) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        while self.failure is None:
            if not self.busy or self._stalled:
                self._changed.clear()
                await self._changed.wait()
                began = clock()
                continue
            step = self._under_way = self._batch.compose(accelerator)
            due = began + step.seconds
            await asyncio.sleep(max(0.0, due - clock()))
            now = clock()
            if self._under_way is step:
                try:
                    self._finish(step, now)
                except Exception as error:
                    self.fail(error)
                    return
            after = max(due, now - CATCH_UP_SECONDS)
            self.work.timed(wanted=step.seconds, took=after - began, late=now - due)
            began = after

    def _finish(self, step: Composed, now: float) -> None:
        self._under_way = None
        self.steps += 1
        if not self._starved:
            for request in self._batch.finish(step, self._make_token, now=now):
                self._generations[request].notify()

    def _pace(self) -> float:
        if self._batch.prefill_until() is None:
            return self._token_seconds
        return max(self._token_seconds, PREFILL_STEP_SECONDS)

    def _step(self, now: float) -> None:
        self.steps += 1
        if self._starved:
            return
        for request in self._batch.step(self._make_token, now=now):
            self._generations[request].notify()
