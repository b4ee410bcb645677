"""[P] From judged answers to the report."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from app.cli.bench.chaos.answers import Fate
from app.cli.bench.loadtest.histogram import Histogram
from app.cli.bench.loadtest.limits import judged
from app.cli.bench.loadtest.records import Answered, Ended
from app.cli.bench.loadtest.scenario import Scenario

MAX_PROBLEMS: Final = 20


class Tally:
    """Of some requests."""

    def __init__(self, stall_seconds: float) -> None:
        self._stall_seconds = stall_seconds
        self.fates: Counter[Fate] = Counter()
        self.ttft, self.itl, self.total, self.stalls = Histogram(), Histogram(), Histogram(), Histogram()
        self.tokens = 0

    def add(self, fate: Fate, answer: Answered) -> None:
        """Times are of answers that came whole; pauses, of all."""
        self.fates[fate] += 1
        self.tokens += answer.tokens
        gaps = array("f", answer.gaps)
        self.itl.add_all(gaps)
        self.stalls.add_all(gap for gap in gaps if gap >= self._stall_seconds)
        if answer.first is not None:
            self.ttft.add(answer.first)
        if fate is Fate.GOOD:
            self.total.add(answer.total)

    def report(self, seconds: float | None) -> dict[str, Any]:
        """``seconds``: over which the answers came; None: nobody knows, since some came later."""
        count = self.fates.total()
        return {
            "requests": count,
            "failures": sum(self.fates[fate] for fate in (Fate.LOST, Fate.WRONG, Fate.REFUSED)),
            **{fate.value: self.fates[fate] for fate in Fate},
            "ttft_seconds": self.ttft.spread(),
            "itl_seconds": self.itl.spread(),
            "total_seconds": self.total.spread(),
            "tokens": self.tokens,
            "tokens_per_second": round(self.tokens / seconds, 1) if seconds else None,
            "stall_seconds": self.stalls.spread(),
        }


class Figures:
    """Of a run, as answers come."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._all = Tally(scenario.stall_seconds)
        self._kinds = {kind: Tally(scenario.stall_seconds) for kind, weight in scenario.mix.items() if weight}
        self._phases = [Tally(scenario.stall_seconds) for _ in scenario.phases]
        self._late = Histogram()
        self._refused: Counter[str] = Counter()
        self._problems: list[tuple[bool, str]] = []
        self.count = 0

    def add(self, kind: str, fate: Fate, detail: str, answer: Answered) -> None:
        self.count += 1
        for tally in (self._all, self._kinds[kind], self._phases[answer.phase]):
            tally.add(fate, answer)
        self._late.add(answer.late)
        if fate is Fate.REFUSED:
            self._refused[detail] += 1
        if fate in (Fate.LOST, Fate.WRONG) and len(self._problems) < MAX_PROBLEMS:
            self._problems.append((fate is Fate.LOST, f"{fate}: request {answer.number}, {kind}: {detail}"))

    def report(self, ended: Ended, events: Sequence[dict[str, Any]], *, about: dict[str, Any]) -> dict[str, Any]:
        """``about`` comes first. Requests without a record of their own are lost."""
        missing = ended.sent - self.count
        problems = [problem for _, problem in sorted(self._problems, key=lambda one: one[0])]
        if missing:
            problems.append(f"lost: {missing} requests without any end when all was over")
        found: dict[str, Any] = {
            **about,
            "took_seconds": round(ended.seconds, 3),
            "requests": ended.sent,
            "good": self._all.fates[Fate.GOOD],
            "left": self._all.fates[Fate.LEFT],
            "lost": self._all.fates[Fate.LOST] + missing,
            "wrong": self._all.fates[Fate.WRONG],
            "refused": dict(self._refused),
            "all": self._all.report(ended.seconds),
            "kinds": {kind: tally.report(ended.seconds) for kind, tally in self._kinds.items()},
            "phases": [
                {"name": phase.name or str(number), "rate": [phase.rate, phase.end_rate], **tally.report(None)}
                for number, (phase, tally) in enumerate(zip(self._scenario.phases, self._phases, strict=True))
            ],
            "generator": {
                "late_seconds": self._late.spread(),
                "processor_share": round(ended.processor_seconds / ended.seconds, 3) if ended.seconds else 0.0,
                "most_outstanding": ended.most_outstanding,
                "unsent": ended.unsent,
            },
            "events": list(events),
            "problems": problems,
        }
        found["limits"] = judged(self._scenario.limits, found)
        found["passed"] = not failings(found)
        return found


def failings(report: dict[str, Any]) -> list[str]:
    """Why a run counts as failed, a sentence each; none: it does not."""
    found = []
    for limit in report["limits"]:
        if not limit["kept"]:
            value = "there is none" if limit["value"] is None else f"{limit['value']:g}"
            found.append(f"the limit {limit['name']} is {limit['limit']:g}, and was broken: {value}")
    found += [
        f"the event {event['do']} of pod {event['pod']} at {event['at']:g} s failed: {event['problem']}"
        for event in report["events"]
        if event["problem"]
    ]
    if unsent := report["generator"]["unsent"]:
        found.append(f"{unsent} requests were not sent: more than most_outstanding were out already")
    return found
