"""[P] Plots over time as SVG text: points or lines, two axes, a mark for the kill. Colours are CSS classes.

A plot is a ``<g>`` that can stand alone in a picture or share one with others; ``STYLE`` gives the classes their
colours, in light and in dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Final

import msgspec

WIDTH: Final = 760
HEIGHT: Final = 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 30, 34
_KEY: Final = 112
"""Width of a curve's name."""
_TICKS: Final = 5

STYLE: Final = """
.plot { --ink: #1b1f24; --faint: #d5dae0; --soft: #59636e; --kill: #b3261e; --paper: #ffffff;
  --a: #b4540a; --b: #1f6fb2; --c: #1a7f4b; --d: #7a52b3; }
@media (prefers-color-scheme: dark) {
  .plot { --ink: #e6e9ed; --faint: #3a424c; --soft: #9aa5b1; --kill: #ff8a80; --paper: #14181d;
    --a: #f0a35e; --b: #6cb6f5; --c: #5fce92; --d: #c3a3f0; }
}
.plot text { font: 12px system-ui, sans-serif; fill: var(--soft); }
.plot .title { font-weight: 600; font-size: 13px; fill: var(--ink); }
.plot .paper { fill: var(--paper); }
.plot .grid { stroke: var(--faint); stroke-width: 1; }
.plot .kill { stroke: var(--kill); stroke-width: 1.5; stroke-dasharray: 5 3; }
.plot .killed { fill: var(--kill); }
.plot .limit { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 2 3; }
.plot .line { fill: none; stroke-width: 1.8; }
.plot .dot { opacity: 0.75; }
.plot .a { --own: var(--a); }
.plot .b { --own: var(--b); }
.plot .c { --own: var(--c); }
.plot .d { --own: var(--d); }
.plot .line { stroke: var(--own); }
.plot .dot, .plot .key { fill: var(--own); }
"""


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """``kind`` is one of the classes a to d."""

    name: str
    kind: str
    points: Sequence[Sequence[float]]
    dots: bool = False


class Plot(msgspec.Struct, frozen=True, kw_only=True):
    """One pair of axes. Times are seconds from the kill on."""

    title: str
    first: float
    last: float
    curves: Sequence[Curve]
    limit: float | None = None
    """A level to be drawn, with ``limit_name``."""
    limit_name: str = ""
    top: float | None = None
    """Where the values' axis ends; None: above the highest."""
    marks: Sequence[tuple[float, str]] = ()
    """Further moments, and what they are."""


def ticks(last: float, *, first: float = 0.0, most: int = _TICKS) -> list[float]:
    """Round numbers from ``first`` to ``last``, about so many."""
    span = last - first
    if span <= 0:
        return [first]
    raw = span / most
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw * 0.999)
    begin = math.ceil(first / step)
    return [number * step for number in range(begin, math.floor(last / step + 1e-9) + 1)]


def drawn(plot: Plot, *, at: int = 0) -> str:
    """The plot as a group, so many units from the top."""
    values = [value for curve in plot.curves for _, value in curve.points]
    top = plot.top if plot.top is not None else max([*values, plot.limit or 0.0, 1e-9]) * 1.08
    wide, high = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM

    def x(time: float) -> float:
        return round(_LEFT + (time - plot.first) / (plot.last - plot.first) * wide, 1)

    def y(value: float) -> float:
        return round(_TOP + high - min(value, top) / top * high, 1)

    parts = [f'<g class="plot" transform="translate(0 {at})">']
    parts.append(f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>')
    parts.append(f'<text class="title" x="{_LEFT}" y="18">{escape(plot.title)}</text>')
    for value in ticks(top):
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(value)}" y2="{y(value)}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(value) + 4}" text-anchor="end">{value:g}</text>')
    for time in ticks(plot.last, first=plot.first, most=8):
        anchor = "end" if x(time) > WIDTH - 2 * _RIGHT else "middle"
        parts.append(f'<text x="{x(time)}" y="{HEIGHT - 16}" text-anchor="{anchor}">{time:g} s</text>')
    parts.append(_mark(x(0.0), "kill", "SIGKILL"))
    parts += [_mark(x(time), "limit", name) for time, name in plot.marks if plot.first <= time <= plot.last]
    if plot.limit is not None:
        level = y(plot.limit)
        parts.append(f'<line class="limit" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{level}" y2="{level}"/>')
        parts.append(f'<text x="{WIDTH - _RIGHT}" y="{level - 4}" text-anchor="end">{escape(plot.limit_name)}</text>')
    for number, curve in enumerate(plot.curves):
        inside = [(x(time), y(value)) for time, value in curve.points if plot.first <= time <= plot.last]
        if curve.dots:
            parts += [f'<circle class="dot {curve.kind}" cx="{cx}" cy="{cy}" r="2"/>' for cx, cy in inside]
        elif inside:
            path = " ".join(f"{cx},{cy}" for cx, cy in inside)
            parts.append(f'<polyline class="line {curve.kind}" points="{path}"/>')
        right = WIDTH - _RIGHT - _KEY * (len(plot.curves) - number)
        parts.append(f'<rect class="key {curve.kind}" x="{right}" y="9" width="10" height="10"/>')
        parts.append(f'<text x="{right + 14}" y="18">{escape(curve.name)}</text>')
    parts.append("</g>")
    return "\n".join(parts)


def _mark(at: float, kind: str, name: str) -> str:
    label = " killed" if kind == "kill" else ""
    return (
        f'<line class="{kind}" x1="{at}" x2="{at}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>'
        f'<text class="{label.strip()}" x="{at + 4}" y="{_TOP + 10}">{escape(name)}</text>'
    )


def picture(plots: Sequence[Plot], *, style: bool, label: str) -> str:
    """All of them below each other, as one picture; ``style``: which brings its colours along."""
    high = HEIGHT * len(plots)
    inner = "\n".join(drawn(plot, at=HEIGHT * number) for number, plot in enumerate(plots))
    css = f"<style>{STYLE}</style>" if style else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {high}" width="{WIDTH}" height="{high}" '
        f'role="img" aria-label="{escape(label, quote=True)}">\n{css}{inner}\n</svg>\n'
    )
