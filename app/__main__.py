"""``python -m app``: the gateway process. Signals are held before anything heavy is imported."""

from __future__ import annotations

import sys

from app.processes.stop_signals import hold


def main() -> int:
    hold()
    from app.start import main as start

    return start()


if __name__ == "__main__":
    sys.exit(main())
