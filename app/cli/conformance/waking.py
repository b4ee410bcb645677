"""Checks of ``initialize``, ``wake``, ``park`` and what the engine says of itself in each state."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import httpx

from app.cli.conformance import leftovers
from app.cli.conformance.answering import texts
from app.cli.conformance.outcomes import Failed, Skipped
from app.cli.conformance.subject import CALL_SECONDS, QUIET_SECONDS, State, Subject
from gms.protocol import ErrorCode, GmsError
from workers.engine import EngineMemory
from workers.memory import KV_POOL

ROUNDS: Final = 5
"""Times that an engine is woken and parked in a row; the first may still make what is kept."""
CANCELLED_AFTER_SECONDS: Final = (0.0, *(0.001 * 2**power for power in range(10)))
"""When a self-test is cancelled: in its first wait, and at later and later moments of it, up to half a second."""
QUIESCED_TOKENS: Final = 64
NOT_KEPT: Final = "a request that was running at quiesce() did not go on to the same answer"
ROLES: Final = ("writer", "reader", "private")


async def initialize(subject: Subject) -> str:
    await subject.initialize()
    return f"the event loop was held up for {subject.longest_pause:.2f} s at most"


async def beats(subject: Subject) -> str | None:
    limit = subject.settings.beat_timeout_seconds
    if subject.longest_pause > limit:
        raise Failed(
            f"the event loop stood still for {subject.longest_pause:.1f} s, and a keeper kills after {limit:g} s; what "
            "takes long belongs in a thread"
        )
    return None


async def facts(subject: Subject) -> str:
    engine = subject.engine
    models: Any = engine.models
    if not isinstance(models, tuple) or not models or not all(isinstance(name, str) and name for name in models):
        raise Failed(f"models is {models!r}, and must be a tuple of names")
    if not _is_whole(engine.max_model_len) or engine.max_model_len < 1:
        raise Failed(f"max_model_len is {engine.max_model_len!r}, and must be at least 1 once it is initialised")
    if not _is_whole(engine.steps) or engine.steps < 0:
        raise Failed(f"steps is {engine.steps!r}, and must be a count")
    if engine.busy is not False:
        raise Failed(f"busy is {engine.busy!r} while it has no request")
    if engine.dead is not False:
        raise Failed(f"dead is {engine.dead!r} right after it was initialised")
    if not 0.0 <= engine.kv_usage() <= 1.0:
        raise Failed(f"kv_usage() is {engine.kv_usage()!r}, and must be from 0 to 1")
    return f"{', '.join(models)}, {engine.max_model_len} tokens"


async def memory(subject: Subject) -> str:
    found = subject.engine.memory()
    if not isinstance(found, EngineMemory):
        raise Failed(f"memory() gives {type(found).__name__}, and must give EngineMemory")
    if found.weights_role not in ROLES:
        raise Failed(f"weights_role is {found.weights_role!r}, and must be one of {', '.join(ROLES)}")
    if not 0 <= found.weights_outside_gms_bytes <= found.weights_bytes or found.kv_bytes < 0:
        raise Failed(f"its sizes contradict each other: {found}")
    private = found.weights_outside_gms_bytes == found.weights_bytes
    if found.weights_bytes and (found.weights_role == "private") is not private:
        raise Failed(
            f"weights_role is {found.weights_role}, and {found.weights_outside_gms_bytes} of {found.weights_bytes} "
            "bytes are outside of the memory service"
        )
    if subject.service is None and not private:
        raise Failed("it says that weights are in a memory service, and there is none")
    return f"weights {found.weights_role}, {found.weights_outside_gms_bytes} of {found.weights_bytes} bytes private"


async def parked(subject: Subject) -> None:
    await subject.require_no_kv("while it is parked")


async def wake(subject: Subject) -> None:
    await subject.wake()
    if not subject.engine.memory().kv_mapped:
        raise Failed("memory() says that no KV pages are mapped after wake()")
    await subject.within("check_health()", subject.engine.check_health())
    if subject.engine.dead:
        raise Failed("dead is true after wake()")


async def custody(subject: Subject) -> str:
    states = subject.engine.custody()
    if subject.service is None:
        if states:
            raise Failed(f"custody() names {', '.join(state.pool for state in states)}, and there is no memory service")
        return "none, as there is no service"
    held = {state.pool for state in states}
    if subject.engine.memory().weights_role != "private" and held <= {KV_POOL}:
        raise Failed("its weights are the memory service's, and custody() does not say how they stand")
    pool = await subject.kv_pool()
    leased = pool is not None and bool(pool.leases)
    if leased is not (KV_POOL in held):
        raise Failed(f"custody() {'has' if KV_POOL in held else 'lacks'} the KV pages, whose lease says otherwise")
    return ", ".join(sorted(held)) or "it keeps all memory to itself"


async def wake_twice(subject: Subject) -> str:
    try:
        await subject.within("a second wake()", subject.engine.wake(epoch=await subject.next_epoch()))
    except Failed:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    else:
        raise Failed("a second wake() while it was awake was taken")
    if not subject.engine.memory().kv_mapped:
        raise Failed(f"a second wake() was refused ({said}) and took the KV pages away")
    await subject.within("check_health()", subject.engine.check_health())
    return said


async def stale_epoch(subject: Subject) -> None:
    if subject.service is None:
        raise Skipped("epochs are fenced by a memory service")
    await subject.to(State.AWAKE)
    pool = await subject.kv_pool()
    if pool is None or not pool.leases:
        raise Skipped("its KV pages are not the memory service's")
    await subject.park()
    try:
        await subject.within("wake() for an old epoch", subject.engine.wake(epoch=pool.epoch - 1))
    except GmsError as error:
        if error.code != ErrorCode.STALE_EPOCH:
            raise Failed(
                f"wake() for an epoch that is over raised {error.code}, and must pass on stale_epoch"
            ) from None
    except Failed:
        raise
    except Exception as error:
        raise Failed(
            f"wake() for an epoch that is over raised {type(error).__name__}, not the service's error"
        ) from None
    else:
        subject.state = State.AWAKE
        raise Failed("wake() for an epoch that is over was taken")
    await subject.require_no_kv("after a wake() that failed")
    await subject.park()  # what a roll-back does
    await subject.wake()


async def park_twice(subject: Subject) -> None:
    await subject.to(State.PARKED)
    await subject.park()
    await subject.require_no_kv("after a second park()")


async def rounds(subject: Subject) -> str:
    await subject.to(State.PARKED)
    held: leftovers.Held | None = None
    for round_ in range(ROUNDS):
        await subject.wake()
        if not subject.engine.memory().kv_mapped:
            raise Failed(f"no KV pages were mapped after wake() number {round_ + 1}")
        await subject.park()
        await subject.require_no_kv(f"after park() number {round_ + 1}")
        held = held or leftovers.look()
    if held is None:
        raise AssertionError("no rounds")
    await subject.nothing_since(held, f"{ROUNDS - 1} rounds of wake() and park() leave")
    return f"{ROUNDS} times"


async def park_with_requests(subject: Subject) -> None:
    async with subject.client() as client, subject.running_stream(client):
        await subject.park()
        await subject.require_no_kv("after park() with a request in flight")
        before = subject.engine.steps
        await asyncio.sleep(QUIET_SECONDS)
        if subject.engine.steps != before:
            raise Failed(f"{subject.engine.steps - before} steps were made after park()")
        if subject.engine.dead:
            raise Failed("park() with a request in flight left it dead")
    await subject.wake()
    await subject.until(lambda: not subject.engine.busy, "it is busy with a request whose client has left")


async def quiesce(subject: Subject) -> str:
    async with subject.client() as client:
        body = await subject.completion(client, tokens=QUIESCED_TOKENS, stream=True)
        whole = texts((await client.post("/v1/completions", json=body)).content)
        before = subject.engine.steps
        answer = asyncio.ensure_future(client.post("/v1/completions", json=body))
        try:
            await subject.until(lambda: subject.engine.steps > before + 2, "no step was made for a request")
            refused = await _quiesce(subject)
            steps = subject.engine.steps
            if answer.done():
                raise Skipped("the answer was over before quiesce() was")
            if not refused:
                await asyncio.sleep(QUIET_SECONDS)
                if subject.engine.steps != steps:
                    raise Failed("steps were made after quiesce()")
                await subject.wake()
            try:
                again = await subject.within("the answer that was under way at quiesce()", answer)
            except httpx.HTTPError as error:
                raise Failed(f"{NOT_KEPT}: {error}") from None
        finally:
            answer.cancel()
            await asyncio.wait({answer})
    if again.status_code != 200 or texts(again.content) != whole:
        raise Failed(NOT_KEPT)
    if refused:
        raise Skipped(f"it serves on, and refuses: {refused}")
    return f"{steps - before} steps before it"


async def _quiesce(subject: Subject) -> str:
    """Why it was refused, nothing having been released, or ""."""
    quiescing = asyncio.ensure_future(subject.engine.quiesce(timeout_seconds=CALL_SECONDS))
    done, _ = await asyncio.wait({quiescing}, timeout=2 * CALL_SECONDS)
    if not done:
        raise Failed(f"quiesce(timeout_seconds={CALL_SECONDS:g}) was not over after {2 * CALL_SECONDS:g} s")
    try:
        quiescing.result()
    except TimeoutError as error:
        if not subject.engine.memory().kv_mapped:
            raise Failed("quiesce() raised TimeoutError, and the KV pages are gone all the same") from None
        return str(error) or "TimeoutError"
    subject.state = State.PARKED
    await subject.require_no_kv("after quiesce()")
    return ""


async def self_test_cancelled(subject: Subject) -> str:
    interrupted: list[float] = []
    for delay in CANCELLED_AFTER_SECONDS:
        if await _interrupt_self_test(subject, delay):
            interrupted.append(delay)
        elif delay:
            break  # it was over by then, and would be later on
    if not interrupted:
        raise Skipped("it was over before it could be cancelled")
    return f"{len(interrupted)} times, after {interrupted[0] * 1000:g} to {interrupted[-1] * 1000:g} ms"


async def _interrupt_self_test(subject: Subject, delay: float) -> bool:
    """Whether it was still under way then. Whatever it was doing, it must leave the engine as it was."""
    testing = asyncio.ensure_future(subject.engine.self_test())
    await asyncio.sleep(0)  # its beginning, up to where it waits
    await asyncio.wait({testing}, timeout=delay)
    under_way = testing.cancel()
    done, _ = await asyncio.wait({testing}, timeout=CALL_SECONDS)
    when = f"cancelled after {delay * 1000:g} ms"
    if not done:
        raise Failed(f"self_test() was not over {CALL_SECONDS:g} s after it was {when}")
    if not testing.cancelled() and (error := testing.exception()) is not None:
        raise Failed(f"self_test() that was {when} raised {type(error).__name__}: {error}")
    await subject.require_no_kv(f"after a self_test() that was {when}")
    await subject.within("check_health()", subject.engine.check_health())
    await subject.wake()
    await subject.park()
    return under_way


async def self_test(subject: Subject) -> None:
    await subject.within("self_test()", subject.engine.self_test())
    await subject.require_no_kv("after self_test()")
    if subject.engine.dead:
        raise Failed("self_test() left it dead")
    await subject.wake()
    await subject.park()


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
