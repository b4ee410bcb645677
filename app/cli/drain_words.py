"""[P] What an engine waits for that is on its way out, in words that the status, the terminal and commands share."""

from __future__ import annotations

from workers.state import DrainState


def waiting_to_hand_over(draining: DrainState) -> str:
    """What an engine waits for that is to hand over and serves on until then (``DrainState.bound``)."""
    count = sum(draining.remaining.values())
    routes = ", ".join(f"{count} {route}" for route, count in draining.remaining.items())
    then = "they are cut" if draining.cut else "it is called off"
    left = "" if draining.left_seconds is None else f"; {then} in {draining.left_seconds:.0f} s"
    what = "1 request that no other engine" if count == 1 else f"{count} requests that no other engine"
    more = " …" if count > len(draining.bound) else ""
    return f"waits for {what} could resume ({routes}), then it hands over{left}: {'; '.join(draining.bound)}{more}"
