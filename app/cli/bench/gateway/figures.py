"""[P] What is measured, by what names, and how figures become a report: medians, ratios, a table."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

OURS: Final = "hotspare"
DIRECT: Final = "direct"
"""The base line: the load straight to one worker."""
BUSY: Final = 0.3
"""From this load average per core on, what else runs there decides about wall-clock figures."""


class Quantiles(msgspec.Struct, frozen=True):
    """Of one run of the generator, microseconds."""

    p50: float
    p99: float


class Failed(msgspec.Struct, frozen=True):
    """Requests without a whole and right answer, by kind."""

    status: int = 0
    closed: int = 0
    connect: int = 0
    short: int = 0
    content: int = 0
    timeout: int = 0

    @property
    def total(self) -> int:
        return self.status + self.closed + self.connect + self.short + self.content + self.timeout


class Load(msgspec.Struct, frozen=True):
    """What the generator says of one run."""

    seconds: float
    completed: int
    events: int
    failed: Failed
    last_status: int
    latency_us: Quantiles | None = None
    first_event_us: Quantiles | None = None

    @property
    def sound(self) -> bool:
        """Whether its numbers mean anything: something was answered, and nothing failed."""
        return self.completed > 0 and not self.failed.total

    @property
    def requests_per_second(self) -> float:
        return self.completed / self.seconds

    @property
    def events_per_second(self) -> float:
        return self.events / self.seconds


def parse_load(line: str) -> Load:
    """The generator's last line.

    Raises:
        msgspec.DecodeError: it is something else.
    """
    return msgspec.json.decode(line, type=Load)


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One run against one gateway. Without figures if a request failed: a fast failure is not a speed."""

    gateway: str
    measure: str
    round: int
    figures: dict[str, float]
    completed: int
    failed: int
    problem: str = ""


class Ratio(msgspec.Struct, frozen=True):
    """One key of ``vs`` and the figure that it compares; ``digits`` are the table's."""

    key: str
    figure: str
    meaning: str
    digits: int


RATIOS: Final = (
    Ratio("rps_c1", "rps_c1", "requests/s, 1 connection", 0),
    Ratio("rps_c32", "rps_c32", "requests/s, 32 connections", 0),
    Ratio("rps_c256", "rps_c256", "requests/s, 256 connections", 0),
    Ratio("cpu_per_request", "cpu_per_request_us", "CPU µs/request, 32 connections", 1),
    Ratio("added_ttft", "added_ttft_us", "added time to first token, µs", 0),
    Ratio("paced_cpu", "paced_cpu_us", "CPU µs/event, 128 streams of 50 events/s", 1),
    Ratio("events_per_s", "events_per_s", "events/s at saturation", 0),
    Ratio("cpu_per_event", "cpu_per_event_us", "CPU µs/event at saturation", 1),
)


def stream_ratios(streams: Sequence[int]) -> tuple[Ratio, ...]:
    """Those of the memory measurement. The most streams give ``kib_per_stream``, the others carry their number."""
    most = max(streams, default=0)
    return tuple(
        Ratio("kib_per_stream" if count == most else f"kib_per_stream_{count}", memory_figure(count), meaning, 1)
        for count in sorted(streams)
        for meaning in (f"KiB/stream, {count:,} slow streams",)
    )


def memory_figure(streams: int) -> str:
    return f"kib_per_stream_{streams}"


def medians(samples: Iterable[Sample]) -> dict[str, dict[str, float]]:
    """Each gateway's figures over its sound samples."""
    values: dict[str, dict[str, list[float]]] = {}
    for sample in samples:
        of_gateway = values.setdefault(sample.gateway, {})
        for name, value in sample.figures.items():
            of_gateway.setdefault(name, []).append(value)
    return {
        gateway: {name: statistics.median(found) for name, found in of_gateway.items()}
        for gateway, of_gateway in values.items()
    }


def with_added_ttft(figures: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """What each gateway adds to the time to the first token of a worker that is asked directly."""
    base = figures.get(DIRECT, {}).get("ttft_us")
    added = {gateway: dict(of_gateway) for gateway, of_gateway in figures.items()}
    for gateway, of_gateway in added.items():
        if base is not None and gateway != DIRECT and "ttft_us" in of_gateway:
            of_gateway["added_ttft_us"] = of_gateway["ttft_us"] - base
    return added


def compare(figures: Mapping[str, Mapping[str, float]], ratios: Sequence[Ratio]) -> dict[str, dict[str, float | None]]:
    """``vs``: ours ÷ the peer's, by peer; None where one of the two is missing or has nothing to divide by."""
    ours = figures.get(OURS, {})
    return {
        peer: {ratio.key: _quotient(ours.get(ratio.figure), theirs.get(ratio.figure)) for ratio in ratios}
        for peer, theirs in figures.items()
        if peer not in (OURS, DIRECT)
    }


def _quotient(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or theirs is None or theirs <= 0 else round(ours / theirs, 3)


def summarise(
    samples: Sequence[Sample], ratios: Sequence[Ratio], versions: Mapping[str, str], about: Mapping[str, Any]
) -> dict[str, Any]:
    """The report. ``failed`` counts over all samples of a gateway, those without figures included."""
    figures = with_added_ttft(medians(samples))
    gateways: dict[str, dict[str, Any]] = {}
    for name, version in versions.items():
        own = [sample for sample in samples if sample.gateway == name]
        gateways[name] = {
            "version": version,
            "requests": sum(sample.completed for sample in own),
            "failed": sum(sample.failed for sample in own),
            **{figure: round(value, 3) for figure, value in figures.get(name, {}).items()},
        }
    return {
        **about,
        "gateways": gateways,
        "vs": compare({name: figures.get(name, {}) for name in versions}, ratios),
        "problems": [f"{s.gateway}, {s.measure}: {s.problem}" for s in samples if s.problem],
        "samples": [msgspec.to_builtins(sample) for sample in samples],
    }


def table(report: Mapping[str, Any], ratios: Sequence[Ratio]) -> list[str]:
    """The report for people, as two Markdown tables: figures, and ours ÷ theirs."""
    gateways: Mapping[str, Mapping[str, Any]] = report["gateways"]
    shown = [ratio for ratio in ratios if any(ratio.figure in figures for figures in gateways.values())]
    rows = _markdown(
        ["", *gateways],
        [
            [ratio.meaning, *(_number(figures.get(ratio.figure), ratio.digits) for figures in gateways.values())]
            for ratio in shown
        ],
    )
    vs: Mapping[str, Mapping[str, float | None]] = report["vs"]
    if vs:
        rows += ["", "Hotspare ÷ peer:", ""]
        rows += _markdown(
            ["", *vs], [[ratio.meaning, *(_number(vs[peer][ratio.key], 2) for peer in vs)] for ratio in shown]
        )
    rows += ["", "; ".join(f"{name} {figures['version']}" for name, figures in gateways.items() if figures["version"])]
    rows += [f"{name}: {figures['failed']} requests failed" for name, figures in gateways.items() if figures["failed"]]
    machine = report["machine"]
    if machine["load_average_before"][0] > BUSY * machine["cores"]:
        rows.append(
            f"The machine was busy with other things (load average {machine['load_average_before'][0]:.1f} on "
            f"{machine['cores']} cores): CPU time holds more or less, requests/s and times do not."
        )
    rows += [f"not measured: {name}: {reason}" for name, reason in report["skipped"].items()]
    rows += [f"problem: {problem}" for problem in report["problems"]]
    return rows


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
