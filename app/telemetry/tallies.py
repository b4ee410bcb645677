"""What each relayed request counts in: too often for metric objects with labels."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Final

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)


class _Tally:
    """A histogram as three plain fields: counting in one costs a tenth of what a labelled metric object does, and
    nobody else counts at the same time."""

    __slots__ = ("_bounds", "_buckets", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._buckets = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._buckets[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def fold(self, into: HistogramMetricFamily, labels: Sequence[str]) -> None:
        names = [*map(str, self._bounds), "+Inf"]
        counts = accumulate(self._buckets)
        into.add_metric(labels, list(zip(names, map(float, counts), strict=True)), self._sum)


class _RouteSeries:
    __slots__ = ("duration", "inter_token", "ttft")

    def __init__(self) -> None:
        self.duration = _Tally(SECONDS)
        self.ttft = _Tally(SECONDS)
        self.inter_token = _Tally(TOKEN_SECONDS)


class RequestTallies(Collector):
    """What each relayed request counts in, kept as plain numbers and made into metrics when they are read."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, int], int] = {}
        self._routes: dict[str, _RouteSeries] = {}

    def request(
        self,
        *,
        route: str,
        model: str,
        status: int,
        seconds: float,
        first_token_seconds: float | None,
        inter_token_seconds: float | None,
    ) -> None:
        """``None`` where an answer was not streamed, or had too few events to tell."""
        key = (route, model, status)
        self._counts[key] = self._counts.get(key, 0) + 1
        series = self._routes.get(route)
        if series is None:
            series = self._routes[route] = _RouteSeries()
        series.duration.observe(seconds)
        if first_token_seconds is not None:
            series.ttft.observe(first_token_seconds)
            if inter_token_seconds is not None:
                series.inter_token.observe(inter_token_seconds)

    def collect(self) -> Iterator[Metric]:
        """Called in another thread: it reads copies."""
        requests = CounterMetricFamily("hotspare_requests", "Requests answered.", labels=["route", "model", "status"])
        for (route, model, status), count in list(self._counts.items()):
            requests.add_metric([route, model, str(status)], count)
        yield requests
        routes = list(self._routes.items())
        for name, explanation, tally in (
            (
                "hotspare_request_duration_seconds",
                "From the request's head to the last byte of its answer.",
                attrgetter("duration"),
            ),
            (
                "hotspare_time_to_first_token_seconds",
                "From the request's head to the first event of a streamed answer.",
                attrgetter("ttft"),
            ),
            (
                "hotspare_inter_token_latency_seconds",
                "Mean time between the events of a streamed answer, one observation a stream.",
                attrgetter("inter_token"),
            ),
        ):
            family = HistogramMetricFamily(name, explanation, labels=["route"])
            for route, series in routes:
                tally(series).fold(family, [route])
            yield family
