"""The seam between an engine's life and the engine itself.

``workers.life`` drives an engine through these calls and never looks inside; ``workers.engines.sim`` and
``workers.engines.vllm`` implement them. All methods run on the event loop of the engine's process and must not block
it: what takes long (weights, kernels) belongs in a thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, Protocol

import msgspec

from gms.custody_phases import CustodyState

ASGIApp = Callable[
    [
        MutableMapping[str, Any],
        Callable[[], Awaitable[MutableMapping[str, Any]]],
        Callable[[MutableMapping[str, Any]], Awaitable[None]],
    ],
    Awaitable[None],
]


RELEASE_SECONDS: Final = 30.0
"""How long ``Engine.quiesce`` may take once the step in hand is over; an engine that takes longer hangs."""


class EngineMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Where an engine's bytes are, measured and not planned.

    ``weights_bytes`` counts all parameters once; ``weights_outside_gms_bytes`` those whose storage does not lie in
    pages of the memory service; ``other_bytes`` the model's other tensors, which each engine has its own of;
    ``kv_mapped`` is whether KV pages are behind the reserved range now.
    """

    weights_bytes: int
    weights_outside_gms_bytes: int
    weights_role: str
    """``writer`` (loaded and committed), ``reader`` (mapped what another loaded) or ``private`` (no service)."""
    kv_bytes: int
    kv_mapped: bool
    other_bytes: int = 0
    kv_index_bytes: int = 0
    """Of the index beside the KV pages, which says what they hold."""


class EngineDeadError(Exception):
    """The engine can no longer serve; only a new process helps."""


class MemoryLostError(EngineDeadError):
    """This engine's pages went to a newer epoch, or are not what was committed: it must not serve on (exit code 75)."""


class EngineConfigError(Exception):
    """The engine cannot start with these settings, and would not on a second try either (exit code 2)."""


class Engine(Protocol):
    """One inference engine in this process."""

    models: tuple[str, ...]
    """Served model names; known once initialised."""

    max_model_len: int
    """The longest that prompt and answer may be together, in tokens; 0 before it is initialised."""

    @property
    def steps(self) -> int:
        """Engine steps taken so far; advances while work is done."""

    @property
    def busy(self) -> bool:
        """Whether requests are running or waiting, so that a step is due."""

    @property
    def dead(self) -> bool:
        """Whether it can serve no more. True before any request notices, so that no answer speaks of it."""

    async def initialize(self) -> None:
        """Attach weights, warm up, reserve the KV range without memory behind it, and stay parked.

        Raises:
            EngineConfigError: wrong settings, missing model.
        """

    async def wake(self, *, epoch: int) -> None:
        """Map the KV pages for ``epoch`` and be ready to serve. Requests that a ``quiesce`` has kept go on, recomputed
        from their tokens: another engine may have written into the pages meanwhile.

        Raises:
            Exception: nothing stays mapped; the engine is parked as before.
        """

    async def park(self) -> None:
        """Release the KV pages quiesced (no step is running, none will start) and keep the address range."""

    async def self_test(self) -> None:
        """Prove, while parked, that this engine could wake: run what it would run, over scratch memory and never over
        KV pages, and look at its memory. It is cancelled when the lock is granted, and must then be over within a step,
        the engine parked as before; ``wake`` is not called earlier.

        Raises:
            EngineDeadError: it could not wake; the message says what is broken.
        """

    async def quiesce(self, *, timeout_seconds: float) -> None:
        """Finish the step in hand and start no other, then release the KV pages like ``park``, but keep the requests:
        nobody is told anything. ``wake`` goes on with them, ``shutdown`` ends them. It is not cancelled, and it is over
        ``RELEASE_SECONDS`` after ``timeout_seconds``.

        Raises:
            TimeoutError: the step in hand is not over in time; nothing was released, and the engine serves on.
            EngineDeadError: the pages could not be released.
        """

    def app(self) -> ASGIApp:
        """The engine's own OpenAI application; the caller serves it while the engine is active."""

    async def check_health(self) -> None:
        """Raises EngineDeadError if the engine cannot serve any more, MemoryLostError if it must not."""

    def kv_usage(self) -> float:
        """Share of KV blocks in use, 0 to 1."""

    def memory(self) -> EngineMemory:
        """Where the bytes are now."""

    def custody(self) -> tuple[CustodyState, ...]:
        """How each custody of the memory service's pages stands; empty without one. Cheap, and never stale."""

    async def shutdown(self) -> None:
        """Stop, and release what is held. May be called at any time, more than once."""
