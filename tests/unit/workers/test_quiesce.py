"""An engine that is to come to rest does, or says that it does not, or counts as dead."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from workers import handing_over
from workers.engine import Engine, EngineDeadError
from workers.handing_over import quiesce


class Quiescing:
    """An engine, of which only this is asked."""

    def __init__(self, *, how: str) -> None:
        self.how = how
        self.cancels = 0

    async def quiesce(self, *, timeout_seconds: float) -> None:
        if self.how == "refuses":
            raise TimeoutError(f"not within {timeout_seconds:g} s")
        while self.how == "hangs":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancels += 1
                if self.cancels > 1:
                    raise


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handing_over, "SLACK_SECONDS", 0.01)


async def at_rest(engine: Quiescing) -> None:
    async with asyncio.timeout(5):
        await quiesce(cast(Engine, engine), timeout_seconds=0.01, release_seconds=0.01)


async def test_it_comes_to_rest() -> None:
    await at_rest(Quiescing(how="rests"))


async def test_its_refusal_is_passed_on() -> None:
    with pytest.raises(TimeoutError, match=r"not within 0\.01 s"):
        await at_rest(Quiescing(how="refuses"))


async def test_one_that_does_neither_counts_as_dead_even_if_it_hears_no_cancellation() -> None:
    engine = Quiescing(how="hangs")
    with pytest.raises(EngineDeadError, match=r"neither came to rest nor went on within 0\.03 s"):
        await at_rest(engine)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
    assert engine.cancels == 2
