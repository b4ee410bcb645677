"""[P] What changed in a pod since the last look, as one line each: for a person who watches a failover happen.

Looks are far apart (a quarter of a second), events are not. So times come from what the engines say about themselves
(since when, when the lock was granted), and a new pid is a death even if nobody saw the engine gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from app.cli.drain_words import waiting_to_hand_over
from app.cli.reports import Absence, EngineAnswer
from workers.contract import Role
from workers.state import EngineState

_TOLD: frozenset[Role] = frozenset({Role.HANDOVER, Role.DRAINING, Role.STOPPED, Role.FAILED})


class News(NamedTuple):
    """One event; ``at`` is seconds of the machine's monotonic clock."""

    at: float
    text: str


class _Loss(NamedTuple):
    """When a pod was last seen with all its spares, and whose death changed that."""

    since: float
    role: Role


class PodNews:
    """Fed with every look at one pod."""

    def __init__(self, pod: str) -> None:
        self._pod = pod
        self._last: dict[str, EngineState] = {}
        """The newest report of each living engine."""
        self._silent: set[str] = set()
        """Living engines that do not answer: they count for nothing until they do."""
        self._back: dict[str, float] = {}
        """Engines that were silent once, and when they answered again."""
        self._complete = False
        """An active engine, and all others parked."""
        self._spares = 0
        """How many engines are not the active one."""
        self._loss: _Loss | None = None
        self._restored: set[str] = set()
        """Engines that a memory service which was started again has taken pages back from, and nobody was told."""

    @property
    def complete(self) -> bool:
        """Whether an active engine and every spare were there at the last look."""
        return self._complete

    @property
    def parked(self) -> int:
        """How many spares were parked at the last look."""
        standby = (engine for engine, report in self._last.items() if report.role is Role.STANDBY)
        return sum(engine not in self._silent for engine in standby)

    def look(self, answers: Mapping[str, EngineAnswer], *, now: float) -> list[News]:
        """What is new, in the order in which it happened. ``answers`` has an entry for each engine of the pod."""
        self._spares = len(answers) - 1
        granted = [
            answer.promotion.granted
            for answer in answers.values()
            if isinstance(answer, EngineState) and answer.promotion is not None
        ]
        # Deaths first: they are what everything else follows from.
        before = dict(self._last)
        news = [item for engine, answer in answers.items() for item in self._deaths(engine, answer, granted, now)]
        news += [item for engine, answer in answers.items() for item in self._changes(engine, answer, now)]
        news += self._service(before, now)
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
        self._back.pop(engine, None)
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
            self._back[engine] = now
            news.append(self._say(now, f"{engine} answers again"))
        if before is None or before.role is not answer.role:
            news += self._role(engine, answer)
        if (draining := answer.draining) is not None and draining.bound and not _waited(before):
            news.append(self._say(now, f"{engine} {waiting_to_hand_over(draining)}"))
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

    def _service(self, before: Mapping[str, EngineState], now: float) -> list[News]:
        """A memory service that was gone is back, for all of its engines."""
        links = {engine: report.memory_service for engine, report in self._last.items() if report.memory_service}
        for engine, link in links.items():
            was = before[engine].memory_service if engine in before else None
            if was is not None and self._last[engine].pid == before[engine].pid and link.restored > was.restored:
                self._restored.add(engine)
        if not self._restored or any(link.adrift_seconds is not None for link in links.values()):
            return []
        names, self._restored = " and ".join(sorted(self._restored)), set()
        return [self._say(now, f"the memory service is back, and has its pages again from {names}")]

    def _redundancy(self) -> list[News]:
        # Who is silent may answer again: nothing is lost before it is dead. But it makes no pod complete.
        silent = self._silent if not self._complete else ()
        there = [report for engine, report in self._last.items() if engine not in silent]
        active = [report for report in there if report.role is Role.ACTIVE]
        parked = [report for report in there if report.role is Role.STANDBY]
        was, self._complete = self._complete, bool(active and parked) and len(parked) >= self._spares
        if was or not self._complete:
            return []
        last = max(parked, key=self._there_since)
        at = max(self._there_since(active[0]), self._there_since(last))
        loss, self._loss = self._loss, None
        if loss is None:
            ready = "the spare is ready" if self._spares == 1 else f"all {self._spares} spares are ready"
            return [self._say(at, f"{last.engine} is parked, {ready}")]
        seconds = max(at - loss.since, 0.0)
        return [self._say(at, f"{last.engine} is parked again, redundancy restored after {seconds:.1f} s")]

    def _there_since(self, report: EngineState) -> float:
        return max(report.since, self._back.get(report.engine, 0.0))

    def _say(self, at: float, text: str) -> News:
        return News(at, f"{self._pod}: {text}")


def _waited(before: EngineState | None) -> bool:
    """Whether it was to hand over at the last look already, and waited for requests first."""
    return before is not None and before.draining is not None and bool(before.draining.bound)
