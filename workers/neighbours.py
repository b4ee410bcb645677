"""The pod's other engines, as their admin ports tell of them: whether the pod has a spare.

A neighbour that does not answer is none, and one that is parked and fails its self-tests is no spare.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import msgspec

from workers.contract import Role
from workers.hosts import reachable
from workers.http_get import GetFailed, http_get
from workers.settings import EngineSettings

HTTP_OK: Final = 200
LOOK_SECONDS: Final = 1.0
"""Between two looks, and the most that an answer may take."""


async def look_at_neighbours(settings: EngineSettings, *, tell: Callable[[Role | None], None]) -> None:
    """For ever: ``tell`` the best role among the pod's other engines, a STANDBY before all; None: nobody answers."""
    ports = settings.standby_admin_ports
    if not ports:
        return
    while True:
        roles = await asyncio.gather(*(_role_at(reachable(settings.host), port) for port in ports))
        tell(Role.STANDBY if Role.STANDBY in roles else next((role for role in roles if role), None))
        await asyncio.sleep(LOOK_SECONDS)


async def _role_at(host: str, port: int) -> Role | None:
    try:
        status, body = await http_get(host, port, "/health", timeout_seconds=LOOK_SECONDS)
        role = Role(msgspec.json.decode(body, type=dict[str, Any])["role"])
        return Role.FAILED if role is Role.STANDBY and status != HTTP_OK else role
    except (GetFailed, msgspec.DecodeError, KeyError, ValueError):
        return None
