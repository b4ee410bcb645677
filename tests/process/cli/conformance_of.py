"""Tries engines, each in the checks that it is named with, and says what came of them, a JSON object a line.

Started as ``python -m tests.process.cli.conformance_of CLASS:CHECK,…:gms:SETTLE`` or ``…::SETTLE``, with settings in
the environment. ``SETTLE``: seconds that the engine has for what it does soon after a call.
"""

from __future__ import annotations

import sys

import msgspec

from app.cli.conformance.checks import Life
from app.cli.conformance.lives import LIVES
from app.cli.conformance.run import Patience, conform
from workers.settings import EngineSettings

SILENCE_SECONDS = 4.0
CHECK_SECONDS = 8.0


def main() -> None:
    for order in sys.argv[1:]:
        name, checks, gms, settle = order.split(":")
        patience = Patience(silence_seconds=SILENCE_SECONDS, settle_seconds=float(settle))
        lives = [picked for life in LIVES if (picked := _picked(life, checks.split(","))) is not None]
        settings = EngineSettings(engine=f"tests.support.broken_engines:{name}", gms=gms == "gms")
        report = conform(settings, lives=lives, patience=patience)
        print(msgspec.json.encode({"order": order, "results": report.results}).decode(), flush=True)


def _picked(life: Life, names: list[str]) -> Life | None:
    """The first check of a life always: it makes the engine what the others need. None if no other is wanted."""
    if not {check.name for check in life.checks}.intersection(names):
        return None
    checks = [check for check in life.checks if check is life.checks[0] or check.name in names]
    return Life(name=life.name, checks=[msgspec.structs.replace(check, seconds=CHECK_SECONDS) for check in checks])


if __name__ == "__main__":
    main()
