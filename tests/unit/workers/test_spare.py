"""What a parked engine's admin port says of its self-tests, and what its neighbours make of that."""

from __future__ import annotations

import asyncio
from typing import cast

import msgspec
import pytest

from tests.unit.workers.test_vitals import Unfinished
from workers.admin import AdminApp
from workers.binding import bind_when_free
from workers.contract import Role
from workers.engine import Engine
from workers.http_get import http_get
from workers.http_server import serve_http
from workers.neighbours import look_at_neighbours
from workers.role import RoleEvent
from workers.settings import EngineSettings
from workers.vitals import Kept, Vitals


class Parked(Unfinished):
    def memory(self) -> None:
        return None

    def custody(self) -> tuple[()]:
        return ()


def vitals(*, problem: str | None, tested: bool = True) -> Vitals:
    made = Vitals(EngineSettings(), cast(Engine, Parked()), kept=Kept(None, restarts=0))
    made.handle(RoleEvent.INITIALIZED)
    if tested:
        made.self_tests.passed(now=made.state().monotonic, took=0.01)
    if problem is not None:
        made.self_tests.failed(problem)
    return made


@pytest.mark.parametrize(
    ("problem", "tested", "status", "said"),
    [
        (None, True, 200, None),
        (None, False, 503, "it has not tested itself yet"),
        ("its weights are gone", True, 503, "its weights are gone"),
    ],
)
async def test_a_parked_engine_is_healthy_only_if_it_may_be_counted_on(
    problem: str | None, tested: bool, status: int, said: str | None
) -> None:
    made = vitals(problem=problem, tested=tested)
    sock = await bind_when_free("127.0.0.1", 0, timeout_seconds=0)
    port = sock.getsockname()[1]
    async with serve_http(AdminApp(made.state), sock):
        found, body = await http_get("127.0.0.1", port, "/health", timeout_seconds=5)
        health = msgspec.json.decode(body)
        assert (found, health["self_test_ok"], health["self_test_problem"]) == (status, status == 200, said)
        assert (health["role"], health["status"]) == (
            Role.STANDBY,
            "parked" if status == 200 else "not to be counted on",
        )
        _, body = await http_get("127.0.0.1", port, "/metrics", timeout_seconds=5)
        assert b"hotspare_engine_spare %.1f" % (status == 200) in body
        heard: asyncio.Future[Role | None] = asyncio.get_running_loop().create_future()
        settings = EngineSettings(standby_admin_ports=(port,))
        looking = asyncio.create_task(
            look_at_neighbours(settings, tell=lambda role: None if heard.done() else heard.set_result(role))
        )
        try:
            assert await asyncio.wait_for(heard, 5) is (Role.STANDBY if status == 200 else Role.FAILED)
        finally:
            looking.cancel()
            await asyncio.wait({looking})


def test_in_any_other_role_nothing_is_said_of_self_tests() -> None:
    made = vitals(problem=None)
    assert made.state().spare
    made.handle(RoleEvent.LOCK_GRANTED)
    state = made.state()
    assert (state.self_test, state.spare) == (None, False)
