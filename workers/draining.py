"""A terminating engine waits for its requests: ``workers.drain_plan`` decides, this acts and says how far it is."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final

from workers import metrics
from workers.change import Change
from workers.drain_plan import DrainFacts, DrainPlan, Phase
from workers.in_flight import named
from workers.route_groups import RouteGroup
from workers.serving_port import ServingPort
from workers.settings import EngineSettings
from workers.state import DrainState
from workers.vitals import Vitals

logger = logging.getLogger(__name__)

PROGRESS_SECONDS: Final = 10.0
"""Between two lines of the log while requests are waited for."""


async def drain(
    ports: Sequence[ServingPort], *, settings: EngineSettings, vitals: Vitals, ended: Change, since: float
) -> bool:
    """Let the requests of all ports come to their end, the current one first in ``ports``; whether they did in time.

    ``ended`` tells when one has ended; ``since``: when this engine was told to go.
    """
    plan = DrainPlan(
        now=since,
        grace_seconds=settings.grace_period_seconds,
        timeout_seconds=settings.shutdown_timeout_seconds,
        waits_for=frozenset(RouteGroup).difference(settings.graceful_shutdown_except),
    )
    phase, said_at = None, time.monotonic()
    while True:
        now = time.monotonic()
        requests = _by_group(ports)
        look = plan.look(DrainFacts(watches=ports[0].app.watches, requests=requests), now=now)
        vitals.draining = DrainState(
            phase=look.phase,
            seconds=now - since,
            left_seconds=look.left_seconds,
            remaining=(remaining := {group.value: count for group, count in requests.items()}),
        )
        metrics.record_draining(remaining)
        if look.refuse:
            for port in ports:
                port.app.refuse("it is shutting down")
        for port in ports:
            if count := port.cut_groups(look.cut):
                logger.info("%d requests are cut, of routes that are not waited for", count)
        if look.phase is not phase or now - said_at >= PROGRESS_SECONDS:
            phase, said_at = look.phase, now
            logger.info("draining, %s: %s in flight, %.0f s left", look.phase, _said(requests), look.left_seconds)
        if look.over:
            if look.phase is Phase.OVERRUN:
                _say_overrun(ports, settings.shutdown_timeout_seconds)
                for port in ports:
                    port.cut()
            return look.phase is Phase.DRAINED
        await ended.wait(timeout_seconds=min(look.again_in, max(0.001, said_at + PROGRESS_SECONDS - now)))


def _by_group(ports: Sequence[ServingPort]) -> dict[RouteGroup, int]:
    total = Counter[RouteGroup]()
    for port in ports:
        total.update(port.app.requests.by_group())
    return dict(total)


def _said(requests: dict[RouteGroup, int]) -> str:
    return ", ".join(f"{count} {group}" for group, count in sorted(requests.items())) or "nothing"


def _say_overrun(ports: Sequence[ServingPort], timeout_seconds: float) -> None:
    left = [request for port in ports for request in port.app.requests.all()]
    logger.warning(
        "%d requests did not end within the shutdown timeout of %g s and are cut: %s",
        len(left),
        timeout_seconds,
        named(left),
    )
