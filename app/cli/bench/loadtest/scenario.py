"""[P] What a scenario says, checked: phases of arrivals, what is asked, which limits hold, what is done to the pods."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec

from app.cli.bench.loadtest.limits import LIMITS
from app.cli.variables import meant

KINDS: Final[Mapping[str, tuple[str, bool]]] = {
    "chat-stream": ("/v1/chat/completions", True),
    "chat": ("/v1/chat/completions", False),
    "completions-stream": ("/v1/completions", True),
    "completions": ("/v1/completions", False),
    "responses-stream": ("/v1/responses", True),
    "responses": ("/v1/responses", False),
    "messages-stream": ("/v1/messages", True),
    "messages": ("/v1/messages", False),
    "realtime": ("/v1/realtime", True),
}
"""Kind of request → its path, and whether its answer comes in pieces."""

LONGEST: Final = 131_072
"""Words or tokens, as many as the sim takes."""

Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Length = Annotated[int, msgspec.Meta(ge=1, le=LONGEST)]

GOES: Final = frozenset({"stop-pod", "lose-pod", "restart-pod"})
"""What ends a pod's supervisor."""


class ScenarioError(ValueError):
    """The scenario cannot be run; the message says what to change."""


class Uniform(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Each length from ``least`` to ``most`` is as likely as any other."""

    least: Length
    most: Length

    def __post_init__(self) -> None:
        if self.least > self.most:
            raise ValueError("least is more than most")


class Lognormal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Many short ones and a few long ones: half are below ``median``, and none is above ``most``."""

    median: Length
    sigma: Annotated[float, msgspec.Meta(gt=0, le=4)] = 0.7
    most: Length


class Lengths(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of these."""

    uniform: Uniform | None = None
    lognormal: Lognormal | None = None

    def __post_init__(self) -> None:
        if (self.uniform is None) == (self.lognormal is None):
            raise ValueError("it takes either uniform or lognormal (or a number instead)")


class Phase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """So many requests a second for so long; with ``to``, a rate that changes evenly from one to the other."""

    seconds: Positive
    rate: NotNegative
    to: NotNegative | None = None
    name: str = ""

    @property
    def end_rate(self) -> float:
        return self.rate if self.to is None else self.to


class Event(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is done to a pod, ``at`` seconds after the first phase began."""

    at: NotNegative
    do: Literal[
        "kill-active",
        "kill-shadow",
        "kill-gms",
        "stop-active",
        "stop-shadow",
        "stop-gms",
        "handover",
        "roll",
        "stop-pod",
        "lose-pod",
        "start-pod",
        "restart-pod",
    ]
    pod: Annotated[int, msgspec.Meta(ge=0, le=99)] = 0


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole of it; docs/load-tests.md says what each key means."""

    about: str = ""
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0
    pods: Annotated[int, msgspec.Meta(ge=1, le=100)] = 1
    arrivals: Literal["poisson", "constant"] = "poisson"
    phases: Annotated[list[Phase], msgspec.Meta(min_length=1)]
    mix: dict[str, NotNegative]
    prompt_words: Length | Lengths = 16
    answer_tokens: Length | Lengths = 32
    cancels: Share = 0.0
    slow_readers: Share = 0.0
    stall_seconds: Positive = 0.5
    timeout_seconds: Positive = 120.0
    most_outstanding: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 2000
    limits: dict[str, float] = {}
    events: list[Event] = []

    @property
    def seconds(self) -> float:
        """From the beginning of the first phase to the end of the last one."""
        return math.fsum(phase.seconds for phase in self.phases)

    @property
    def expected(self) -> float:
        """How many requests, on an average."""
        return math.fsum(phase.seconds * (phase.rate + phase.end_rate) / 2 for phase in self.phases)

    def __post_init__(self) -> None:
        for kind in self.mix:
            if kind not in KINDS:
                raise ValueError(f"mix has a kind {kind!r}{_instead(kind, KINDS)}")
        if not any(self.mix.values()):
            raise ValueError("mix asks for nothing: give at least one kind a weight")
        if self.cancels + self.slow_readers > 1:
            raise ValueError("cancels and slow_readers together are more than 1, which is all requests")
        if not self.expected:
            raise ValueError("no phase has a rate above 0")
        for name, limit in self.limits.items():
            if name not in LIMITS:
                raise ValueError(f"limits has {name!r}{_instead(name, LIMITS)}")
            if not math.isfinite(limit) or limit < 0:
                raise ValueError(f"limits has {limit} for {name}: a number of at least 0 is needed")
        for number, event in enumerate(self.events):
            if event.at > self.seconds * (1 + 1e-9):  # times that were scaled are rounded
                raise ValueError(f"events[{number}] comes at {event.at:g} s, and all is over at {self.seconds:g} s")
            if event.pod >= self.pods:
                raise ValueError(f"events[{number}] is for pod {event.pod}, and pods count from 0 to {self.pods - 1}")
        if len({event.pod for event in self.events if event.do in GOES}) >= self.pods:
            raise ValueError(
                f"one pod must be left that no event ends ({', '.join(sorted(GOES))}): "
                "`hotspare up` ends with the last pod that it started; raise pods"
            )


_STRUCTS: Final[Mapping[str, type[msgspec.Struct]]] = {
    "$": Scenario,
    "$.phases[...]": Phase,
    "$.events[...]": Event,
    **{f"$.{name}": Lengths for name in ("prompt_words", "answer_tokens")},
    **{f"$.{name}.uniform": Uniform for name in ("prompt_words", "answer_tokens")},
    **{f"$.{name}.lognormal": Lognormal for name in ("prompt_words", "answer_tokens")},
}
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(.*)`")
_WHERE: Final = re.compile(r"(?s)(.*) - at `(.*)`$")


def parse(document: Any, *, name: str) -> Scenario:
    """A scenario from what YAML or JSON made of it; ``name`` is what messages call it.

    Raises:
        ScenarioError: something in it does not fit; nothing is ignored.
    """
    if not isinstance(document, dict):
        raise ScenarioError(
            f"{name} is no scenario: it must consist of keys and values, as docs/load-tests.md has them"
        )
    try:
        return msgspec.convert(document, Scenario)
    except msgspec.ValidationError as error:
        raise ScenarioError(f"{name}: {_sentence(str(error))}") from None


def scaled(scenario: Scenario, *, rate: float, time: float) -> Scenario:
    """The same with rates and times multiplied; limits stay what they are."""
    return msgspec.structs.replace(
        scenario,
        phases=[
            msgspec.structs.replace(
                phase,
                seconds=phase.seconds * time,
                rate=phase.rate * rate,
                to=None if phase.to is None else phase.to * rate,
            )
            for phase in scenario.phases
        ],
        events=[msgspec.structs.replace(event, at=event.at * time) for event in scenario.events],
    )


def _sentence(message: str) -> str:
    found = _WHERE.match(message)
    what, where = (found[1], found[2]) if found else (message, "$")
    place = where.removeprefix("$").removeprefix(".")
    if unknown := _UNKNOWN.match(what):
        struct = _STRUCTS.get(re.sub(r"\[\d+\]", "[...]", where))
        known = [] if struct is None else [field.encode_name for field in msgspec.structs.fields(struct)]
        what = f"the key {unknown[1]!r} is unknown{_instead(unknown[1], known)}"
    return f"{place}: {what}" if place else what


def _instead(word: str, known: Mapping[str, Any] | list[str]) -> str:
    """What to write instead, as the rest of a sentence."""
    near = meant(word.upper(), [name.upper() for name in known])
    if near:
        return f"; did you mean {' or '.join(name.lower() for name in near)}?"
    return f"; these are known: {', '.join(sorted(known))}" if known else ""
