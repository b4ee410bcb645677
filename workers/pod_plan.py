"""[P] What the supervisor of a pod does next: decided here, done in ``workers.pod``.

    RUNNING ──► STOPPING_ENGINES ──► STOPPING_SERVICE ──► STOPPED
        └──────────────┴── a second signal ──► KILLING ──────┘

The rules are the kubelet's and no others: everything starts at once and waits for nobody, what dies is started again
with a backoff, and a stop is SIGTERM, a grace period, SIGKILL. The memory service goes last, since engines hand their
pages back to it. The one thing added: if nothing can start with this configuration, the pod ends and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final

import msgspec

from workers.exit_codes import ExitCode
from workers.probes import Backoff

RESTART_INITIAL_SECONDS: Final = 1.0
RESTART_MAXIMUM_SECONDS: Final = 30.0
RESTART_RESET_SECONDS: Final = 60.0
"""A process that lived this long is restarted at once again."""
SERVICE_RESTART_MAXIMUM_SECONDS: Final = 1.0
"""Of the memory service: it starts in half a second, and while it is away no engine can be followed by another."""
RESTART_SETTLED_SECONDS: Final = 2.0
"""So is one that got this far and was killed, for what ailed it need not be in it. What ends by itself waits."""

_TOLD: Final = frozenset({ExitCode.DRAINED, ExitCode.FORCED})
"""How an engine's process ends that somebody told to; the memory service knows the first of them only."""
_GAVE_UP: Final = frozenset({ExitCode.BAD_CONFIGURATION, ExitCode.ENGINE_DEAD, ExitCode.MEMORY_SERVICE_LOST})


class Phase(Enum):
    RUNNING = "running"
    STOPPING_ENGINES = "stopping_engines"
    STOPPING_SERVICE = "stopping_service"
    KILLING = "killing"
    STOPPED = "stopped"


class Start(msgspec.Struct, frozen=True):
    """Start a process after ``delay_seconds``; when they are over, ``PodPlan.start_due`` has the last word."""

    name: str
    delay_seconds: float = 0.0


class Terminate(msgspec.Struct, frozen=True):
    """SIGTERM to the process itself: it knows what it has started."""

    name: str


class Kill(msgspec.Struct, frozen=True):
    """SIGKILL to the process and to everything it started."""

    name: str


class Deadline(msgspec.Struct, frozen=True):
    """Call ``PodPlan.deadline_passed(phase)`` after ``seconds``."""

    phase: Phase
    seconds: float


Action = Start | Terminate | Kill | Deadline


class _Process:
    """What is known about one process over all its lives."""

    def __init__(self, *, maximum_seconds: float) -> None:
        self.lives = 0
        self.alive = False
        self.started = 0.0
        self.first_life_refused = False
        """It ended its first life itself, with a code that says: not with these settings, or not here."""
        self.backoff = Backoff(
            initial_seconds=RESTART_INITIAL_SECONDS,
            maximum_seconds=maximum_seconds,
            reset_seconds=RESTART_RESET_SECONDS,
        )


class PodPlan:
    """Fed with what happened and when (seconds of a monotonic clock); answers with what to do."""

    def __init__(
        self,
        *,
        service: str | None,
        engines: Sequence[str],
        grace_seconds: float,
        service_grace_seconds: float,
        kept: bool = True,
        more_services: Sequence[str] = (),
    ) -> None:
        """``more_services``: those of further devices, treated as ``service`` is. ``kept``: an engine's process is a
        keeper, which ends by itself only when its engine cannot be started."""
        self._services = (*((service,) if service else ()), *more_services)
        self._engines = tuple(engines)
        self._grace = grace_seconds
        self._service_grace = service_grace_seconds
        self._final = _GAVE_UP if kept else frozenset({ExitCode.BAD_CONFIGURATION})
        names = (*self._services, *engines)
        self._processes = {
            name: _Process(
                maximum_seconds=SERVICE_RESTART_MAXIMUM_SECONDS if name in self._services else RESTART_MAXIMUM_SECONDS
            )
            for name in names
        }
        self._was_ready = False
        self.phase = Phase.RUNNING
        self.exit_code = ExitCode.DRAINED

    @property
    def names(self) -> tuple[str, ...]:
        """All processes, the memory services first."""
        return tuple(self._processes)

    @property
    def finished(self) -> bool:
        return self.phase is Phase.STOPPED

    def restarts(self, name: str) -> int:
        """How often a process was started again."""
        return max(0, self._processes[name].lives - 1)

    def begin(self) -> list[Action]:
        return [Start(name) for name in self.names]

    def start_due(self, name: str) -> bool:
        """Whether a start whose time has come is still wanted."""
        return self.phase is Phase.RUNNING and not self._processes[name].alive

    def started(self, name: str, *, now: float) -> None:
        process = self._processes[name]
        process.lives += 1
        process.alive = True
        process.started = now

    def ready(self, name: str) -> None:
        """An engine is initialised: the pod can start with this configuration, whatever may follow."""
        self._was_ready = self._was_ready or name in self._engines

    def exited(self, name: str, code: int, *, now: float) -> list[Action]:
        """A process ended with ``code`` (minus the signal's number, as in subprocess) and was reaped."""
        process = self._processes[name]
        process.alive = False
        if self.phase is not Phase.RUNNING:
            return self._advance()
        final = self._final if name in self._engines else frozenset({ExitCode.BAD_CONFIGURATION})
        if process.lives == 1 and code in final:
            process.first_life_refused = True
            if self._cannot_start(name):
                self.exit_code = ExitCode(code)
                return self._stop_engines()
        lived = now - process.started
        told = code in _TOLD and (name in self._engines or code == ExitCode.DRAINED)
        ended_by_others = code < 0 or told  # by a signal, deadly or not
        if ended_by_others and lived >= RESTART_SETTLED_SECONDS:
            return [Start(name)]
        delay = process.backoff.died(lived_seconds=lived)
        if code == ExitCode.BAD_CONFIGURATION:
            delay = max(delay, RESTART_INITIAL_SECONDS)  # at once it would only end the same way
        return [Start(name, delay)]

    def hung(self, name: str) -> list[Action]:
        """A process shows no sign of life, or, in a stop, is not run so that it never hears of it."""
        if self.phase in (Phase.KILLING, Phase.STOPPED) or not self._processes[name].alive:
            return []
        if self.phase is not Phase.RUNNING:
            self.exit_code = ExitCode.FORCED
        return [Kill(name)]

    def stop(self) -> list[Action]:
        """A signal came: stop in order, or, when that is under way already, at once."""
        if self.phase is Phase.RUNNING:
            return self._stop_engines()
        if self.phase in (Phase.STOPPING_ENGINES, Phase.STOPPING_SERVICE):
            self.exit_code = ExitCode.FORCED
            self.phase = Phase.KILLING
            return [Kill(name) for name in self._alive(self.names)]
        return []

    def deadline_passed(self, phase: Phase) -> list[Action]:
        """The time for a phase is over: what is left of it is killed."""
        if phase is not self.phase:
            return []
        left = self._alive(self._engines if phase is Phase.STOPPING_ENGINES else self.names)
        if left:
            self.exit_code = ExitCode.FORCED
        return [Kill(name) for name in left]

    def _cannot_start(self, name: str) -> bool:
        if self._was_ready:
            return False
        if name in self._services:
            return True
        return all(self._processes[engine].first_life_refused for engine in self._engines)

    def _stop_engines(self) -> list[Action]:
        self.phase = Phase.STOPPING_ENGINES
        alive = self._alive(self._engines)
        if not alive:
            return self._advance()
        return [*(Terminate(name) for name in alive), Deadline(self.phase, self._grace)]

    def _advance(self) -> list[Action]:
        """Go on with the next phase if nothing of this one is left."""
        if self.phase is Phase.STOPPING_ENGINES and not self._alive(self._engines):
            self.phase = Phase.STOPPING_SERVICE
            if alive := self._alive(self._services):
                return [*(Terminate(name) for name in alive), Deadline(self.phase, self._service_grace)]
        if self.phase is not Phase.STOPPING_ENGINES and not self._alive(self.names):
            self.phase = Phase.STOPPED
        return []

    def _alive(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if self._processes[name].alive]
