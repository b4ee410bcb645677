"""When to believe a probe, and when to start again what died.

Pure counters, fed with times in seconds of whatever monotonic clock the caller uses. The pod's supervisor asks
``Liveness`` whether an engine must be killed and ``Backoff`` how long to wait before it starts a process again; an
engine's keeper asks ``CrashLoop`` whether forking again makes sense at all.
"""

from __future__ import annotations

import math
from collections import deque
from enum import Enum
from typing import Final

import msgspec


class Threshold:
    """A yes or no that changes only after several observations in a row agree, as the kubelet's prober counts."""

    def __init__(self, *, success: int = 1, failure: int = 3, healthy: bool = False) -> None:
        if success < 1 or failure < 1:
            raise ValueError("thresholds count observations, so they are at least 1")
        self._success = success
        self._failure = failure
        self._run = 0
        self.healthy = healthy

    def observe(self, ok: bool) -> bool:
        """Take one result in, and return whether the subject is healthy now."""
        if ok == self.healthy:
            self._run = 0
            return self.healthy
        self._run += 1
        if self._run >= (self._success if ok else self._failure):
            self.healthy = ok
            self._run = 0
        return self.healthy


class LivenessVerdict(Enum):
    """What a liveness probe's result means for the process."""

    KEEP = "keep"
    KILL_SILENT = "kill_silent"
    """Answered before, and failed as often in a row as is allowed."""
    KILL_NEVER_STARTED = "kill_never_started"
    """Gave no good answer within the start-up time."""


REFORK_SECONDS: Final = 60.0
"""A keeper that has imported everything forks within seconds; one that does not is stuck itself."""


STUCK_LOOKS: Final = 2
"""One may fall into the moment between an engine's death and its being reaped."""


class Sighting(msgspec.Struct, frozen=True, kw_only=True):
    """One result of a liveness probe."""

    ok: bool
    pid: int = 0
    """The process that answered; 0: it did not say, or nobody answered."""
    initialising: bool = False
    """It said that it is not initialised yet."""
    refused: bool = False
    """Nobody listens, and yet the supervised process lives: its keeper is about to fork the next engine."""
    stuck: bool = False
    """The supervised process forks none: it is stopped, or leaves the dead one unreaped."""
    stopped: bool = False
    """The supervised process does not run (SIGSTOP): time passes, and it starts nothing in it."""


class Liveness:
    """Whether one process must be killed, from the results of its liveness probe.

    A starting process is not a hung one: while an engine initialises, silence does not count, for at most
    ``startup_seconds``, unless the process is stopped and so starts nothing. Behind one keeper engines follow each
    other; each of them gets this time anew, from when the probe first sees that there is another one (its pid). Between
    two there may be none (the port refuses), for at most ``REFORK_SECONDS``. Make a new one for each start of the
    process that is supervised.
    """

    def __init__(self, *, started: float, startup_seconds: float, failures: int) -> None:
        self._startup_seconds = startup_seconds
        self._failures = failures
        self._pid = 0
        self._starting = True
        self._stuck = 0
        self.answered = False
        self.allowed_seconds = startup_seconds
        """How long the engine that is expected now may take to answer."""
        self._begin(started, startup_seconds)

    def observe(self, seen: Sighting, *, now: float) -> LivenessVerdict:
        """Take one result in."""
        self._stuck = self._stuck + 1 if seen.stuck else 0
        if self._stuck >= STUCK_LOOKS:
            return LivenessVerdict.KILL_SILENT
        another = bool(seen.pid and self._pid and seen.pid != self._pid)
        if another:
            self._begin(now, self._startup_seconds)
        elif seen.refused and self.answered:
            self._begin(now, min(self._startup_seconds, REFORK_SECONDS))
        self._pid = seen.pid or self._pid
        if seen.ok:
            self.answered = True
            self._starting = self._starting and seen.initialising
            self._threshold.observe(True)
            return LivenessVerdict.KEEP
        if seen.stopped:
            return LivenessVerdict.KEEP if self._threshold.observe(False) else LivenessVerdict.KILL_SILENT
        if self._starting and now < self._deadline:
            return LivenessVerdict.KEEP
        if not self.answered:
            return LivenessVerdict.KILL_NEVER_STARTED
        return LivenessVerdict.KEEP if self._threshold.observe(False) else LivenessVerdict.KILL_SILENT

    def _begin(self, now: float, seconds: float) -> None:
        self.allowed_seconds = seconds
        self._deadline = now + seconds
        self._threshold = Threshold(success=1, failure=self._failures, healthy=True)
        self._starting = True
        self.answered = False


class Backoff:
    """How long to wait before a process is started again.

    The first death costs nothing: it is restarted at once. Each further one doubles the wait, from
    ``initial_seconds`` up to ``maximum_seconds``; a life of ``reset_seconds`` or more starts the count over.
    """

    def __init__(self, *, initial_seconds: float, maximum_seconds: float, reset_seconds: float) -> None:
        if not 0 < initial_seconds <= maximum_seconds:
            raise ValueError("a backoff needs 0 < initial_seconds <= maximum_seconds")
        self._initial = initial_seconds
        self._maximum = maximum_seconds
        self._reset = reset_seconds
        self._next = 0.0

    def forget(self) -> None:
        """Start the count over."""
        self._next = 0.0

    def died(self, *, lived_seconds: float) -> float:
        """Seconds to wait now, given how long the process lived."""
        if lived_seconds >= self._reset:
            self._next = 0.0
        delay = self._next
        self._next = min(max(2 * delay, self._initial), self._maximum)
        return delay


class Decision(Enum):
    RESTART = "restart"
    GIVE_UP = "give_up"


class Verdict(msgspec.Struct, frozen=True):
    """Start again after ``delay_seconds``, or give up (the delay is 0 then)."""

    decision: Decision
    delay_seconds: float = 0.0


QUICK_LIFE_SECONDS: Final = 2.0
"""An engine that lived this long after its fork is followed at once, however often that happens."""
QUICK_MAXIMUM_SECONDS: Final = 3.0
"""With it and a start there is a spare again within 5 s."""


class CrashLoop:
    """Whether an engine that died is worth forking again, and when.

    ``limit`` deaths within ``window_seconds``, each before the engine reached STANDBY, mean that it cannot start:
    give up. Until then such an engine is started again at once the first time, and after a wait that doubles the next
    times. Any other death is restarted at once, for a spare that is missing is the one thing the pod cannot afford. An
    engine that got as far as STANDBY proves that it can start, so it clears the count. Only one that again and again
    dies within ``QUICK_LIFE_SECONDS`` of its fork waits before the next, at most ``QUICK_MAXIMUM_SECONDS``: such deaths
    would load the machine with nothing but forks, and each promotion among them costs an epoch.
    """

    def __init__(
        self,
        *,
        limit: int = 5,
        window_seconds: float = 60.0,
        initial_seconds: float = 0.5,
        maximum_seconds: float = 4.0,
    ) -> None:
        if limit < 1 or window_seconds <= 0:
            raise ValueError("a crash loop needs a limit of at least 1 and a window longer than 0 s")
        self._window = window_seconds
        self._deaths: deque[float] = deque(maxlen=limit)
        self._backoff = Backoff(
            initial_seconds=initial_seconds, maximum_seconds=maximum_seconds, reset_seconds=window_seconds
        )
        self._quick = Backoff(
            initial_seconds=initial_seconds,
            maximum_seconds=min(maximum_seconds, QUICK_MAXIMUM_SECONDS),
            reset_seconds=QUICK_LIFE_SECONDS,
        )
        self._last = -math.inf

    def died(self, now: float, *, reached_standby: bool, lived_seconds: float = math.inf) -> Verdict:
        """Take one death in, ``lived_seconds`` after the fork."""
        since_last, self._last = now - self._last, now
        if reached_standby:
            self._deaths.clear()
            self._last = -math.inf
            if lived_seconds >= QUICK_LIFE_SECONDS:
                self._quick.forget()
                return Verdict(Decision.RESTART)
            return Verdict(Decision.RESTART, self._quick.died(lived_seconds=lived_seconds))
        self._deaths.append(now)
        full = len(self._deaths) == self._deaths.maxlen
        if full and now - self._deaths[0] <= self._window:
            return Verdict(Decision.GIVE_UP)
        return Verdict(Decision.RESTART, self._backoff.died(lived_seconds=since_last))
