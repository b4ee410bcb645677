"""A parked vLLM engine tests itself: what it finds, what it leaves behind, and how soon it gives way."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.engine.vllm.harness import Driver, EngineProcess
from tests.engine.vllm.test_pair import kv_mappings
from tests.process.workers.test_flat import PROMOTIONS, WARM_UP, Held, until_flat
from tests.support.processes import until
from workers.memory import MemoryService

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]

ROUND = 12
"""Self-tests that are enough to compare all weights with their checksums."""


@pytest.fixture(scope="module")
def parked(driver: Driver, service: MemoryService) -> Iterator[EngineProcess]:
    yield from fork(driver, service, "sound")


@pytest.fixture
def doomed(driver: Driver, service: MemoryService) -> Iterator[EngineProcess]:
    yield from fork(driver, service, "doomed")


def fork(driver: Driver, service: MemoryService, name: str) -> Iterator[EngineProcess]:
    engine = driver.fork(f"test-{name}", msgspec.structs.replace(service, engine="c", instance="self-test"))
    try:
        yield engine
    finally:
        engine.kill()


def test_it_passes_leaves_nothing_behind_and_gives_way_within_a_step(parked: EngineProcess) -> None:
    took = []
    for _ in range(ROUND):
        answer = parked.control("self-test")
        assert answer.status_code == 200, answer.text
        took.append(answer.json()["seconds"])
    assert kv_mappings(parked.pid) == []
    before = parked.status()["steps"]
    half = statistics.median(took) / 2
    delays = [parked.control("interrupt", str(half * at / 20)).json()["answer"] for at in range(20)]
    assert parked.status()["steps"] == before  # no step of vLLM's own was counted
    assert kv_mappings(parked.pid) == []
    print(f"self-test: {min(took) * 1e3:.0f} ms; given way: {sorted(round(delay * 1e3, 1) for delay in delays)} ms")
    assert statistics.median(delays) < half / 2  # if it went on to its end, each were as long as half of it, or longer


def test_waking_and_parking_in_a_row_leaves_nothing_behind(parked: EngineProcess, service: MemoryService) -> None:
    with service.connect() as client:
        epochs = itertools.count(1 + max(pool.epoch for pool in client.status().pools))
    before: Held | None = None
    for count in range(WARM_UP + PROMOTIONS):
        parked.wake(next(epochs))
        parked.token_ids(4)
        parked.park()
        answer = parked.control("self-test")  # of an engine that has served meanwhile
        assert answer.status_code == 200, answer.text
        if count == WARM_UP:
            before = Held.of(parked.pid)
    assert before is not None
    until_flat(parked.pid, before)
    assert kv_mappings(parked.pid) == []


def test_requests_that_their_clients_gave_up_are_told_from_those_that_were_answered(
    parked: EngineProcess, service: MemoryService
) -> None:
    """With the tokens that they had come to: among them those that a stop string ended, which is found outside of
    vLLM's core."""
    with service.connect() as client:
        parked.wake(1 + max(pool.epoch for pool in client.status().pools))
    body: dict[str, Any] = {"model": "smollm2", "prompt": [1000, 2000, 3000], "ignore_eos": True}
    parked.client.post("/v1/completions", json={**body, "max_tokens": 4}).raise_for_status()
    assert parked.control("aborted").json()["answer"] == []
    with parked.client.stream("POST", "/v1/completions", json={**body, "max_tokens": 900, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        next(answer.iter_raw())
    (tokens,) = until(lambda: parked.control("aborted").json()["answer"] or None, saying="its client has left")
    assert tokens >= 3
    parked.park()


def test_what_is_broken_is_found(doomed: EngineProcess) -> None:
    assert doomed.control("self-test").status_code == 200
    for what, said in (  # each is looked for before the one above it
        ("numbers", "gave other numbers than it did when the engine started"),
        ("digest", "is not what was committed"),
        ("mapping", "are not mapped as they were"),
    ):
        doomed.control("spoil", what)
        answers = (doomed.control("self-test") for _ in range(ROUND))
        broken = next(answer.json() for answer in answers if answer.status_code != 200 and said in answer.text)
        assert broken["error"] == "EngineDeadError"
    # And a core that hangs with nothing to do.
    assert doomed.control("health").status_code == 200
    doomed.control("hang")
    found = until(
        lambda: answer if (answer := doomed.control("health")).status_code != 200 else None,
        saying="the core is found to hang",
    )
    assert "hangs: it has nothing to do, and answers nothing" in found.json()["message"]
