from __future__ import annotations

import asyncio

import pytest

from app.admission import AdmissionController
from app.lifecycle import LifecycleEvent, LifecycleMachine
from app.openai.errors import GatewayError


def code_of(controller: AdmissionController) -> str:
    with pytest.raises(GatewayError) as caught:
        controller.admit()
    return caught.value.code


def test_the_limit() -> None:
    controller = AdmissionController(LifecycleMachine(), limit=2)
    with controller.admit(), controller.admit():
        assert controller.inflight == 2
        assert code_of(controller) == "overloaded"
    assert controller.inflight == 0
    controller.admit().release()


def test_a_token_is_released_once() -> None:
    controller = AdmissionController(LifecycleMachine(), limit=2)
    token, _other = controller.admit(), controller.admit()
    token.release()
    token.release()
    assert controller.inflight == 1


def test_released_when_the_request_fails() -> None:
    controller = AdmissionController(LifecycleMachine(), limit=1)
    with pytest.raises(KeyError), controller.admit():
        raise KeyError
    assert controller.inflight == 0


def test_draining_admits_nothing_more_even_when_full() -> None:
    lifecycle = LifecycleMachine()
    controller = AdmissionController(lifecycle, limit=1)
    with controller.admit():
        lifecycle.fire(LifecycleEvent.DRAIN)
        assert code_of(controller) == "draining"


async def test_waiting_for_the_last_one() -> None:
    controller = AdmissionController(LifecycleMachine(), limit=3)
    await controller.wait_idle()
    first, second = controller.admit(), controller.admit()
    waiting = [asyncio.create_task(controller.wait_idle()) for _ in range(2)]
    await asyncio.sleep(0)
    first.release()
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    second.release()
    await asyncio.gather(*waiting)


async def test_a_cancelled_wait_leaves_nothing() -> None:
    controller = AdmissionController(LifecycleMachine(), limit=1)
    with controller.admit():
        task = asyncio.create_task(controller.wait_idle())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await controller.wait_idle()
