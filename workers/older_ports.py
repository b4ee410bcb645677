"""The serving ports of an engine's earlier epochs: a hand-over that was taken back began a new one.

New requests come over the new port. Those of before end on the connections that they have, with the watches by which
gateways know that they live; with the last of them their port is closed, and with it the connections that clients would
have used again.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Self

from workers.change import Change
from workers.serving import ServingApp
from workers.serving_port import ServingPort
from workers.tasks import logged


class OlderPorts:
    """A context: at its end all of them are closed."""

    def __init__(self, apps: list[ServingApp], *, ended: Change) -> None:
        """``apps``: where their applications are kept for as long as they are here; ``ended`` tells of each request's
        end."""
        self.ports: list[ServingPort] = []
        self._apps = apps
        self._ended = ended
        self._closing: set[asyncio.Task[None]] = set()
        self._over = False

    def add(self, port: ServingPort, stack: AsyncExitStack) -> None:
        """Take ``port`` over; ``stack`` closes it."""
        self.ports.append(port)
        self._apps.append(port.app)
        port.app.retire()
        task = asyncio.create_task(self._close_when_empty(port, stack), name=f"older-port-{port.epoch}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        logged(task, f"the serving port of epoch {port.epoch} was not closed in order")

    async def _close_when_empty(self, port: ServingPort, stack: AsyncExitStack) -> None:
        try:
            while port.app.requests and not self._over:
                await self._ended.wait(timeout_seconds=None)
        finally:
            try:
                await stack.aclose()
            finally:
                self.ports.remove(port)
                self._apps.remove(port.app)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._over = True
        self._ended.notify()
        if self._closing:
            await asyncio.wait(set(self._closing))
