"""[P] What each request saw, and what that makes over time. Seconds and tokens are those of the run, unscaled."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import ClassVar

import msgspec


class Record(msgspec.Struct, kw_only=True):
    """One request, for its client; ``time.monotonic()`` seconds."""

    WHOLE: ClassVar[str] = "whole"

    number: int
    due: float
    """When it was to be sent."""
    sent: float = 0.0
    at: list[float] = []
    """When each token came."""
    end: str = ""
    """``whole``, or what went wrong; empty while it goes on."""
    resumes: int = 0
    """How often another engine went on with it."""
    retries: int = 0
    """How often it was run again, unseen."""

    @property
    def lost(self) -> bool:
        return self.end != self.WHOLE

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token, from when it was to be sent: what made it late is no excuse."""
        return self.at[0] - self.due if self.at else None

    @property
    def rate(self) -> float | None:
        """Tokens a second from the first to the last, pauses included."""
        if len(self.at) < 2 or self.at[-1] <= self.at[0]:
            return None
        return (len(self.at) - 1) / (self.at[-1] - self.at[0])

    def stall(self, since: float) -> float | None:
        """The longest silence between two tokens of which the later one came after ``since``; None: it had had none
        before, or none came after."""
        if not self.at or self.at[0] >= since or self.at[-1] < since:
            return None
        return max(after - before for before, after in itertools.pairwise(self.at) if after >= since)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The service level."""

    ttft: float
    """Seconds."""
    rate: float
    """Tokens a second."""

    def slow_start(self, record: Record) -> bool:
        """Whether the first token came too late, or never."""
        return record.ttft is None or record.ttft > self.ttft

    def slow_tokens(self, record: Record) -> bool:
        """Whether its tokens came too slowly."""
        return record.rate is not None and record.rate < self.rate


def spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Median, 90th and 99th percentile (the value that so many percent do not exceed), and both ends."""
    there = sorted(value for value in values if value is not None)
    if not there:
        return None

    def percentile(share: float) -> float:
        return there[max(0, math.ceil(share * len(there)) - 1)]

    return {
        "min": there[0],
        "p1": percentile(0.01),
        "median": statistics.median(there),
        "p90": percentile(0.9),
        "p99": percentile(0.99),
        "max": there[-1],
    }


def edges(first: float, last: float, width: float) -> list[float]:
    """Of bins of this width that cover this time, one of them beginning at 0."""
    begin, end = math.floor(first / width), math.ceil(last / width)
    return [number * width for number in range(begin, end + 1)]


def user_rates(records: Sequence[Record], bins: Sequence[float], *, zero: float) -> list[tuple[float, float]]:
    """(middle of a bin, tokens a second of a user who is being answered then), of bins in which somebody is.

    A user is being answered from the first token to the last, so that pauses count."""
    count = len(bins) - 1
    tokens, seconds = [0] * count, [0.0] * count
    width = bins[1] - bins[0] if count else 0.0
    for record in records:
        if len(record.at) < 2:
            continue
        first, last = record.at[0] - zero, record.at[-1] - zero
        for at in record.at[1:]:
            where = math.floor((at - zero - bins[0]) / width)
            if 0 <= where < count:
                tokens[where] += 1
        for where in range(count):
            seconds[where] += max(0.0, min(last, bins[where + 1]) - max(first, bins[where]))
    return [
        (bins[where] + width / 2, tokens[where] / seconds[where])
        for where in range(count)
        if seconds[where] > width / 10
    ]


def shares(
    records: Sequence[Record], bins: Sequence[float], limits: Limits, *, zero: float
) -> list[tuple[float, float]]:
    """(middle of a bin, share of the requests due then that missed the service level), of bins with requests."""
    found = []
    for begin, end in itertools.pairwise(bins):
        inside = [record for record in records if begin <= record.due - zero < end]
        if inside:
            missed = sum(limits.slow_start(one) or limits.slow_tokens(one) for one in inside)
            found.append(((begin + end) / 2, missed / len(inside)))
    return found


def thinned(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """No more than about so many, evenly chosen, the highest of those that stand for others."""
    step = max(1, math.ceil(len(points) / most))
    return [max(points[at : at + step], key=lambda point: point[1]) for at in range(0, len(points), step)]
