"""[P] What changed in a pod since the last look, as one line each: for a person who watches a failover happen.

Looks are far apart (a quarter of a second), events are not. So times come from what the engines say about themselves
(since when, when the lock was granted), and a new pid is a death even if nobody saw the engine gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from app.cli.reports import Absence, EngineAnswer
from workers.contract import Role
from workers.state import EngineState

_TOLD: frozenset[Role] = frozenset({Role.HANDOVER, Role.DRAINING, Role.STOPPED, Role.FAILED})


class News(NamedTuple):
    """One event; ``at`` is seconds of the machine's monotonic clock."""

    at: float
    text: str


class _Loss(NamedTuple):
    """When a pod was last seen with its spare, and whose death changed that."""

    since: float
    role: Role


class PodNews:
    """Fed with every look at one pod."""

    def __init__(self, pod: str) -> None:
        self._pod = pod
        self._last: dict[str, EngineState] = {}
        """The newest report of each living engine."""
        self._silent: set[str] = set()
        self._complete = False
        """An active engine and a parked one."""
        self._loss: _Loss | None = None

    @property
    def complete(self) -> bool:
        """Whether an active engine and a parked one were there at the last look."""
        return self._complete

    def look(self, answers: Mapping[str, EngineAnswer], *, now: float) -> list[News]:
        """What is new, in the order in which it happened."""
        granted = [
            answer.promotion.granted
            for answer in answers.values()
            if isinstance(answer, EngineState) and answer.promotion is not None
        ]
        # Deaths first: they are what everything else follows from.
        news = [item for engine, answer in answers.items() for item in self._deaths(engine, answer, granted, now)]
        news += [item for engine, answer in answers.items() for item in self._changes(engine, answer, now)]
        news += self._redundancy()
        return sorted(news, key=lambda item: item.at)

    def _deaths(self, engine: str, answer: EngineAnswer, granted: list[float], now: float) -> list[News]:
        before = self._last.get(engine)
        if before is None or answer is Absence.SILENT:
            return []
        if isinstance(answer, EngineState) and answer.pid == before.pid:
            return []
        del self._last[engine]
        self._silent.discard(engine)
        # Nobody saw it die. Another engine got the lock when it was dead; otherwise, the last sign of life must do.
        taken_over = [at for at in granted if at > before.monotonic] if before.role is Role.ACTIVE else []
        died = min(taken_over, default=before.monotonic)
        if self._complete:
            self._complete, self._loss = False, _Loss(died, before.role)
        reborn = [answer.since] if isinstance(answer, EngineState) else []
        return [self._say(min([now, *taken_over, *reborn]), f"{engine} is gone, it was {before.role}")]

    def _changes(self, engine: str, answer: EngineAnswer, now: float) -> list[News]:
        before = self._last.get(engine)
        if not isinstance(answer, EngineState):
            if answer is Absence.GONE or before is None or engine in self._silent:
                return []
            self._silent.add(engine)
            return [self._say(now, f"{engine} ({before.role}) does not answer")]
        self._last[engine] = answer
        news = []
        if engine in self._silent:
            self._silent.remove(engine)
            news.append(self._say(now, f"{engine} answers again"))
        if before is None or before.role is not answer.role:
            news += self._role(engine, answer)
        return news

    def _role(self, engine: str, report: EngineState) -> list[News]:
        if report.role is Role.ACTIVE:
            text = f"{engine} is active, epoch {report.epoch}"
            if (done := report.promotion) is not None:
                text += f", {(done.bound - done.granted) * 1000:.1f} ms after it got the lock"
                if self._loss is not None and self._loss.role is Role.ACTIVE:
                    self._loss = self._loss._replace(since=max(self._loss.since, done.granted))
            return [self._say(report.since, text)]
        if report.role in _TOLD:
            why = f": {report.failure}" if report.failure else ""
            return [self._say(report.since, f"{engine} is {report.role}{why}")]
        return []

    def _redundancy(self) -> list[News]:
        active = [report for report in self._last.values() if report.role is Role.ACTIVE]
        parked = [report for report in self._last.values() if report.role is Role.STANDBY]
        was, self._complete = self._complete, bool(active and parked)
        if was or not self._complete:
            return []
        at = max(active[0].since, parked[0].since)
        spare, loss = parked[0].engine, self._loss
        self._loss = None
        if loss is None:
            return [self._say(at, f"{spare} is parked, the spare is ready")]
        return [self._say(at, f"{spare} is parked again, redundancy restored after {max(at - loss.since, 0.0):.1f} s")]

    def _say(self, at: float, text: str) -> News:
        return News(at, f"{self._pod}: {text}")
