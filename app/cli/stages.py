"""[P] How far ``hotspare up`` is: the steps of a start, each with its time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from app.cli.reports import EngineAnswer
from workers.contract import Role
from workers.state import EngineState


class Stage(StrEnum):
    """What a pod does one after the other; a stage begins when the one before it is done."""

    MEMORY = "memory service"
    ENGINES = "imports"
    """Interpreter and imports, until an engine's admin port answers."""
    WEIGHTS = "weights"
    ACTIVE = "active engine"


def stages_of(*, gms: bool) -> tuple[Stage, ...]:
    return tuple(stage for stage in Stage if gms or stage is not Stage.MEMORY)


def is_done(stage: Stage, *, socket_is_there: bool, answers: Mapping[str, EngineAnswer]) -> bool:
    """Whether what was seen of a pod means that ``stage`` is over."""
    roles = {answer.role for answer in answers.values() if isinstance(answer, EngineState)}
    match stage:
        case Stage.MEMORY:
            return socket_is_there or bool(roles - {Role.INIT})
        case Stage.ENGINES:
            return bool(roles)
        case Stage.WEIGHTS:
            return bool(roles & {Role.STANDBY, Role.PROMOTING, Role.ACTIVE})
        case Stage.ACTIVE:
            return Role.ACTIVE in roles


@dataclass
class Step:
    """One line of the progress display; times are seconds of a monotonic clock."""

    name: str
    began: float
    ended: float | None = None
    note: str = ""


class Board:
    """All steps, in the order in which they were planned."""

    def __init__(self) -> None:
        self._steps: dict[str, Step] = {}

    def begin(self, name: str, *, now: float) -> None:
        """Once; a step that began before is left as it is."""
        self._steps.setdefault(name, Step(name, now))

    def end(self, name: str, *, now: float) -> None:
        """Once; ends a step that has begun."""
        step = self._steps[name]
        if step.ended is None:
            step.ended = now

    def note(self, name: str, text: str) -> None:
        """What is shown beside a step, once it has begun."""
        if name in self._steps:
            self._steps[name].note = text

    def advance(self, names: Iterable[tuple[str, bool]], *, now: float) -> None:
        """Steps that follow one another: (name, done?) each."""
        for name, done in names:
            self.begin(name, now=now)
            if not done:
                return
            self.end(name, now=now)

    @property
    def pending(self) -> tuple[Step, ...]:
        """Begun, and not ended."""
        return tuple(step for step in self._steps.values() if step.ended is None)

    @property
    def changed(self) -> float:
        """When a step last began or ended; minus infinity before there is one."""
        return max((max(step.began, step.ended or step.began) for step in self._steps.values()), default=-math.inf)

    @property
    def steps(self) -> tuple[Step, ...]:
        return tuple(self._steps.values())
