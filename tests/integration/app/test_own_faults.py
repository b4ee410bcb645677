"""A bug of ours ends its request, and says so: no event is missing from an answer, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
import pytest

from app.relay.attempt import Attempt
from app.relay.delivery import Delivery
from app.relay.exchange import Exchange
from app.relay.recovery import Recovery
from app.relay.search import Search
from tests.integration.app.conftest import one_shell, run_gateway
from tests.integration.app.fake_worker import Call, chunk
from tests.integration.app.generating import NOTED_HEAD, Story, is_resume
from tests.integration.app.test_resume import error_of, sample

STORY = Story()


def fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a bug")


def failing_at(call: int, whole: Callable[..., Any]) -> Callable[..., Any]:
    """What raises when it is called for the time that is named."""
    calls = 0

    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise RuntimeError("a bug, once")
        return whole(*args, **kwargs)

    return called


async def unit_by_unit(call: Call) -> None:
    """Each unit in a read of its own."""
    if is_resume(call):
        await STORY.told()(call)
        return
    await call.send(NOTED_HEAD)
    for number in range(len(STORY.units)):
        if STORY.unit(number):
            await call.send(chunk(STORY.unit(number)))
            await asyncio.sleep(0.02)
    await call.send(b"0\r\n\r\n")


@one_shell
@pytest.mark.parametrize("call", [1, 3])
async def test_what_could_not_be_delivered_is_not_gone_on_with(
    workers: Any, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """Its notes are written down already: another worker would go on behind it."""
    one, two = await workers("pod-0", "pod-1")
    one.default = two.default = unit_by_unit
    monkeypatch.setattr(Delivery, "events", failing_at(call, Delivery.events))
    async with run_gateway(one, two) as running:
        answer = await running.chat(stream=True)
        delivered = b"".join(STORY.units[: call - 1])
        assert answer.content.startswith(delivered)
        assert answer.status_code == (500 if call == 1 else 200)
        error = answer.json()["error"] if call == 1 else error_of(answer.content)
        assert error["code"] == "internal_error"
        assert len(one.calls) + len(two.calls) == 1
        assert await sample(running, "hotspare_resumes_total") == 0


@one_shell
async def test_a_bad_note_among_good_ones_costs_no_event(workers: Any) -> None:
    one, two = await workers("pod-0", "pod-1")

    async def bad(call: Call) -> None:
        if is_resume(call):
            await STORY.told()(call)
            return
        await call.send(NOTED_HEAD)
        await call.send(chunk(STORY.unit(0)))
        await asyncio.sleep(0.02)
        await call.send(chunk(STORY.unit(1) + STORY.unit(3).replace(b" n=", b" m=", 1) + STORY.unit(4)))
        await call.closed.wait()

    one.default = two.default = bad
    async with run_gateway(one, two) as running:
        assert (await running.chat(stream=True)).content == STORY.stream


@one_shell
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("owner", "name"),
    [(Recovery, "broke"), (Recovery, "settle"), (Recovery, "over"), (Search, "broke"), (Search, "end")],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
async def test_a_bug_after_a_break_ends_the_request(
    workers: Any, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, stream: bool
) -> None:
    one, two = await workers("pod-0", "pod-1")
    cut = STORY.told(cut=0 if name == "settle" else 2)
    one.default = two.default = cut
    if name in ("over", "end"):
        two.default = STORY.told()
        one.will(cut)
        two.will(cut)
    ended: list[bool] = []
    real = Exchange._end

    def end(self: Exchange, outcome: Any) -> None:
        on_end = self._on_end

        def told() -> None:
            ended.append(True)
            on_end()

        self._on_end = told
        real(self, outcome)

    monkeypatch.setattr(Exchange, "_end", end)
    monkeypatch.setattr(owner, name, fails)
    async with run_gateway(one, two, sse_keepalive_seconds=0.5) as running, asyncio.timeout(5):
        if name in ("over", "end"):  # what the client could not be told is a broken connection
            with suppress(httpx.HTTPError):
                await running.chat(stream=stream)
        else:
            assert b"internal_error" in (await running.chat(stream=stream)).content
        assert ended
        assert not running.gateway.relay.shared.exchanges


@one_shell
async def test_a_bug_at_a_deadline_ends_the_request(workers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (one,) = await workers("pod-0")
    one.default = STORY.told(wait=1)
    monkeypatch.setattr(Attempt, "give_up", fails)
    monkeypatch.setattr(Delivery, "keep_alive", fails)
    async with run_gateway(one, sse_keepalive_seconds=0.2) as running, asyncio.timeout(5):
        answer = await running.chat(stream=True)
        assert b"internal_error" in answer.content
