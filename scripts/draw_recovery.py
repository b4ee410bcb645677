"""Draw what clients saw around a kill, for each arm of `hotspare bench recovery`: docs/img/recovery.svg.

    .venv/bin/python -m uv pip install --require-hashes -r requirements/pictures.txt
    .venv/bin/hotspare bench recovery --json > report.json
    .venv/bin/python scripts/draw_recovery.py report.json docs/img/recovery.svg

For each arm that ran under streams, the kill whose recovery was the median one: above, the time to the first token of
each request, where it was sent; below, tokens per second. Nothing is smoothed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot as plt

LINES: Final = {
    "stock": ("#d55e00", "s", "vllm serve, restarted"),
    "cold": ("#cc79a7", "D", "cold restart"),
    "cold_gms": ("#c9a100", "^", "cold restart, weights kept"),
    "keeper": ("#7f8fa6", "v", "keeper's fork"),
    "shadow": ("#009e73", "o", "shadow"),
    "shadow_carry": ("#3a86d8", "P", "shadow, KV cache kept"),
}
"""Colour, mark and name. The colours can be told apart on white and on black, and by most of the colour-blind; marks do
the same for the others."""
INK: Final = "#808890"
"""Of axes and text: contrast enough on white and on black."""
BEFORE_SECONDS: Final = 5


class NothingToDraw(Exception):
    """The message says why."""


def timelines(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By arm, in the order of ``LINES``.

    Raises:
        NothingToDraw: no arm has one.
    """
    arms = report.get("arms", {})
    found = {name: arms[name]["streams"]["timeline"] for name in LINES if "streams" in arms.get(name, {})}
    if not found:
        raise NothingToDraw("no arm of this report ran under streams: hotspare bench recovery --load streams")
    return found


def draw(report: dict[str, Any], target: Path) -> None:
    """Write the picture.

    Raises:
        NothingToDraw: see ``timelines``.
    """
    shown = timelines(report)
    plt.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "recovery",  # the same report gives the same file
            "font.family": "sans-serif",
            "font.size": 10,
            **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
        }
    )
    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(9, 6.2), layout="constrained")
    for name, line in shown.items():
        colour, mark, label = LINES[name]
        at, ttft = zip(*line["ttft"], strict=True) if line["ttft"] else ((), ())
        label = f"{label}: {_seconds(line['recovery'])}"
        above.plot(at, ttft, mark, color=colour, markersize=4, alpha=0.85, markeredgewidth=0, label=label)
        seconds, tokens = zip(*line["tokens"], strict=True)
        below.stairs(tokens, (*seconds, seconds[-1] + 1), color=colour, linewidth=1.8, baseline=None)
    for axes in (above, below):
        axes.axvline(0, color=INK, linewidth=1, linestyle=":")
        axes.grid(color=INK, alpha=0.25, linewidth=0.6)
        axes.set_facecolor("none")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    above.set_yscale("log")
    above.yaxis.set_major_formatter("{x:g}")
    above.yaxis.set_minor_formatter("")
    above.set_ylabel("seconds to the first token")
    below.set_ylabel("tokens per second")
    below.set_ylim(bottom=0)
    below.set_xlabel("seconds from the SIGKILL of the engine on")
    below.set_xlim(left=-BEFORE_SECONDS)
    figure.legend(
        loc="outside upper center", ncols=3, frameon=False, title="SIGKILL → next token, median kill", fontsize=9
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, transparent=True, metadata={"Date": None, "Creator": None})


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def main(source: Path, target: Path) -> None:
    """``source``: what the command printed; the report is its last line."""
    draw(json.loads(source.read_text().splitlines()[-1]), target)
    print(target)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    except NothingToDraw as error:
        sys.exit(f"draw_recovery: {error}")
