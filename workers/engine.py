"""The seam between an engine's life and the engine itself.

``workers.life`` drives an engine through these calls and never looks inside; ``workers.engines.sim`` and
``workers.engines.vllm`` implement them. All methods run on the event loop of the engine's process and must not block
it: what takes long (weights, kernels) belongs in a thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

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


class EngineMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Where an engine's bytes are, measured and not planned.

    ``weights_bytes`` counts all parameters once; ``weights_outside_gms_bytes`` those whose storage does not lie in
    pages of the memory service; ``kv_mapped`` is whether KV pages are behind the reserved range now.
    """

    weights_bytes: int
    weights_outside_gms_bytes: int
    weights_role: str
    """``writer`` (loaded and committed), ``reader`` (mapped what another loaded) or ``private`` (no service)."""
    kv_bytes: int
    kv_mapped: bool


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
        """Map the KV pages for ``epoch`` and be ready to serve.

        Raises:
            Exception: nothing stays mapped; the engine is parked as before.
        """

    async def park(self) -> None:
        """Release the KV pages quiesced (no step is running, none will start) and keep the address range."""

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
