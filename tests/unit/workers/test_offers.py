"""Whoever would take over is asked with all others, and the silent ones are waited for only as long as nobody would."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from workers.offers import answers_of


class Spares:
    """Each answers once it is told to, if ever."""

    def __init__(self, count: int) -> None:
        loop = asyncio.get_running_loop()
        self.said: list[asyncio.Future[str]] = [loop.create_future() for _ in range(count)]
        self.given_up = 0

    async def _answer(self, said: asyncio.Future[str]) -> str:
        try:
            return await said
        except asyncio.CancelledError:
            self.given_up += 1
            raise

    def asked(self, *, seconds: float) -> asyncio.Task[list[str | BaseException | None]]:
        questions: list[Coroutine[Any, Any, str]] = [self._answer(said) for said in self.said]
        return asyncio.create_task(answers_of(questions, promises=lambda said: said == "yes", seconds=seconds))


async def test_answers_come_in_the_order_of_the_questions() -> None:
    spares = Spares(3)
    asked = spares.asked(seconds=60)
    spares.said[2].set_result("no")
    spares.said[0].set_result("yes")
    broken = OSError("refused")
    spares.said[1].set_exception(broken)
    assert await asyncio.wait_for(asked, 10) == ["yes", broken, "no"]


async def test_with_a_promise_a_silent_one_is_waited_for_no_longer() -> None:
    spares = Spares(2)
    spares.said[1].set_result("yes")
    assert await asyncio.wait_for(spares.asked(seconds=0.01), 10) == [None, "yes"]
    assert spares.given_up == 1


async def test_without_a_promise_it_is_waited_for() -> None:
    spares = Spares(2)
    spares.said[0].set_result("no")
    asked = spares.asked(seconds=0.01)
    assert not (await asyncio.wait({asked}, timeout=0.1))[0]
    spares.said[1].set_result("yes")
    assert await asyncio.wait_for(asked, 10) == ["no", "yes"]


async def test_a_late_promise_ends_the_wait_for_the_others() -> None:
    spares = Spares(2)
    asked = spares.asked(seconds=0.01)
    assert not (await asyncio.wait({asked}, timeout=0.1))[0]
    spares.said[1].set_result("yes")
    assert await asyncio.wait_for(asked, 10) == [None, "yes"]


async def test_nobody_to_ask() -> None:
    assert await Spares(0).asked(seconds=60) == []


async def test_cancelled_it_leaves_no_question_behind() -> None:
    spares = Spares(2)
    asked = spares.asked(seconds=60)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert spares.given_up == 2
