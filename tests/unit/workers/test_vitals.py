from __future__ import annotations

from typing import cast

import pytest

from workers.contract import Role
from workers.engine import Engine
from workers.role import RoleEvent
from workers.settings import EngineSettings
from workers.vitals import Kept, Vitals


class Unfinished:
    """An engine that knows its models already, and is not initialised."""

    models = ("m",)
    steps = 0
    busy = False

    def memory(self) -> None:
        raise RuntimeError("the engine is not initialised")

    def custody(self) -> None:
        raise RuntimeError("the engine is not initialised")


@pytest.mark.parametrize("event", [None, RoleEvent.STOPPED, RoleEvent.FAILED])
def test_an_engine_that_never_was_initialised_is_asked_nothing(event: RoleEvent | None) -> None:
    vitals = Vitals(EngineSettings(), cast(Engine, Unfinished()), kept=Kept(None, restarts=0))
    if event is not None:
        vitals.handle(event)
    state = vitals.state()
    assert (state.models, state.memory, state.memory_service) == ((), None, None)
    assert not vitals.beat().busy


def test_one_that_was_is_asked_until_its_end() -> None:
    vitals = Vitals(EngineSettings(), cast(Engine, Unfinished()), kept=Kept(None, restarts=0))
    vitals.handle(RoleEvent.INITIALIZED)
    assert vitals.role is Role.STANDBY
    with pytest.raises(RuntimeError, match="not initialised"):
        vitals.state()


def test_one_that_has_given_its_pages_away_is_not_expected_to_make_steps() -> None:
    """Its requests wait; and a hand-over may take longer than the keeper's patience with an engine that makes none."""
    engine = Unfinished()
    vitals = Vitals(EngineSettings(), cast(Engine, engine), kept=Kept(None, restarts=0))
    for event in (RoleEvent.INITIALIZED, RoleEvent.LOCK_GRANTED, RoleEvent.PROMOTED):
        vitals.handle(event)
    engine.busy = True
    assert vitals.beat().busy
    vitals.handle(RoleEvent.HANDOVER_STARTED)
    assert vitals.beat().busy  # the step in hand may hang
    vitals.quiesced = True
    assert not vitals.beat().busy
    vitals.handle(RoleEvent.HANDOVER_REVERTED)
    assert vitals.beat().busy
