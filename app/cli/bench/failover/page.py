"""[P] The report as a page that needs nothing else, as Markdown, and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any, Final

from app.cli.bench.failover.svg import STYLE, Curve, Plot, picture
from app.cli.bench.failover.words import TITLE, about, findings, table

_KINDS: Final = {"cold": "a", "shadow": "b", "shadow_carry": "c"}

_CSS: Final = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
  background: #ffffff; color: #1b1f24; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 14px; display: block; overflow-x: auto; }
th, td { border-bottom: 1px solid #d5dae0; padding: 0.3rem 0.7rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
svg { max-width: 100%; height: auto; display: block; margin: 0.6rem 0; }
.warn { color: #b3261e; }
@media (prefers-color-scheme: dark) {
  body { background: #14181d; color: #e6e9ed; }
  th, td { border-color: #3a424c; }
  .warn { color: #ff8a80; }
}
"""


def overview(report: Mapping[str, Any]) -> list[Plot]:
    """The plots that compare the arms."""
    plan, arms = report["plan"], report["arms"]
    first, last = -plan["settle_seconds"], plan["observe_seconds"]

    def curves(name: str, *, dots: bool = False) -> list[Curve]:
        return [
            Curve(name=arm, kind=_KINDS.get(arm, "d"), points=one["series"][name], dots=dots)
            for arm, one in arms.items()
        ]

    return [
        Plot(
            title="Time to first token, s",
            first=first,
            last=last,
            curves=curves("ttft", dots=True),
            limit=plan["ttft_limit_seconds"],
            limit_name="limit",
        ),
        Plot(
            title="Tokens/s of a user",
            first=first,
            last=last,
            curves=curves("tokens_per_second"),
            limit=plan["rate_limit"],
            limit_name="limit",
        ),
        Plot(
            title="Share of requests below the service level",
            first=first,
            last=last,
            curves=curves("violations"),
            top=1.05,
        ),
    ]


def of_arm(name: str, report: Mapping[str, Any]) -> list[Plot]:
    """The plots of one arm's workers."""
    plan, arm = report["plan"], report["arms"][name]
    series = arm["series"]
    moments = (("routable_seconds", "routable"), ("spare_seconds", "spare again"))
    marks = [(arm[field], what) for field, what in moments if arm[field] is not None]
    plots = []
    for title, field in (("Requests at each worker", "inflight"), ("Of these, waiting at the engine", "waiting")):
        curves = [
            Curve(name=f"{worker}{', killed' if worker == series['victim'] else ''}", kind=kind, points=points)
            for (worker, points), kind in zip(series[field].items(), "ad", strict=False)
        ]
        if any(curve.points for curve in curves):
            plots.append(
                Plot(
                    title=f"{title}: {name}",
                    first=-plan["settle_seconds"],
                    last=plan["observe_seconds"],
                    curves=curves,
                    marks=marks,
                )
            )
    return plots


def page(report: Mapping[str, Any]) -> str:
    """One HTML document; nothing in it is fetched from anywhere."""
    head, *rows = table(report)
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8"/>',
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
        f"<title>{escape(TITLE)}</title><style>{_CSS}{STYLE}</style></head><body>",
        f"<h1>{escape(TITLE)}</h1>",
        *(f'<p class="{"" if report["held"] else "warn"}">{escape(line)}</p>' for line in findings(report)),
        *(f"<p>{escape(line)}</p>" for line in about(report)),
        "<table><thead><tr>",
        *(f"<th>{escape(cell)}</th>" for cell in head),
        "</tr></thead><tbody>",
        *("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows),
        "</tbody></table>",
        "<h2>Over time</h2>",
        "<p>Seconds from the kill on; a request counts at the time it was sent.</p>",
        *(picture([plot], style=False, label=plot.title) for plot in overview(report)),
    ]
    for name, arm in report["arms"].items():
        parts.append(f"<h2>{escape(name)}: {escape(arm['meaning'])}</h2>")
        parts += [picture([plot], style=False, label=plot.title) for plot in of_arm(name, report)]
    parts.append("</body></html>\n")
    return "\n".join(parts)


def markdown(report: Mapping[str, Any]) -> str:
    """The summary: sentences and the table."""
    head, *rows = table(report)
    lines = [f"# {TITLE}", ""]
    for line in (*findings(report), *about(report)):
        lines += [line, ""]
    lines += [f"| {' | '.join(head)} |", f"| --- |{' ---: |' * (len(head) - 1)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def image(report: Mapping[str, Any]) -> str:
    """The plots that compare the arms, as an SVG file."""
    return picture(overview(report), style=True, label=TITLE)
