"""A killed engine's prefix cache goes on at the next one: what the pages hold is used, and is right."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from tests.engine.vllm.conftest import memory_service
from tests.engine.vllm.harness import Driver, EngineProcess
from workers.engines.vllm.arguments import ASYNC_SCHEDULER
from workers.memory import MemoryService
from workers.settings import MIB

pytestmark = [pytest.mark.engine, pytest.mark.timeout(120)]

BLOCK_TOKENS = 32
"""vLLM's default on a CPU."""
PROMPT_TOKENS = 300
FULL = PROMPT_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
LONG = 1000
KV_BYTES = 64 * MIB
DETAILS = ("--enable-prompt-tokens-details",)

BODY = {"model": "smollm2", "temperature": 0, "ignore_eos": True}
"""The name that all engines here serve their model by, which is small and random but in one test."""
NAMES = itertools.count()


class Answer(NamedTuple):
    tokens: list[int]
    cached: int


def prompt(seed: int, count: int = PROMPT_TOKENS) -> list[int]:
    """Token ids that say nothing, different for each seed from the first one on."""
    return [1000 + (seed * 7919 + number * 104729) % 40000 for number in range(count)]


def ask(engine: EngineProcess, ids: list[int], *, max_tokens: int = 24) -> Answer:
    body = {**BODY, "prompt": ids, "max_tokens": max_tokens, "return_token_ids": True}
    answer = engine.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    details = document["usage"]["prompt_tokens_details"] or {}
    return Answer(document["choices"][0]["token_ids"], details.get("cached_tokens", 0))


def refusal(engine: EngineProcess) -> str | None:
    """Why its cache was empty when it was promoted last; None: it was taken over."""
    answer: str | None = engine.status()["refusal"]
    return answer


class Pod:
    """Engines of one pod, one active after the other."""

    def __init__(self, driver: Driver, service: MemoryService, model: Path) -> None:
        self._driver = driver
        self._model = model
        self._service = service
        self._engines: list[EngineProcess] = []
        self._usual: list[EngineProcess] = []
        """Of these, those without settings of their own."""
        self._kept: list[EngineProcess] = []
        """Parked, and of no test."""
        self.epochs = itertools.count(1)

    def fork(self, **settings: Any) -> EngineProcess:
        """A parked engine; a usual one may be what another test has left."""
        if not settings and self._kept:
            return self._kept.pop()
        engine = self._fork(**settings)
        if not settings:
            self._usual.append(engine)
        return engine

    def _fork(self, **settings: Any) -> EngineProcess:
        number = next(NAMES)
        service = msgspec.structs.replace(self._service, engine="ab"[number % 2])
        settings = {"model": str(self._model), "engine_args": DETAILS, "kv_cache_bytes": KV_BYTES, **settings}
        engine = self._driver.fork(f"carry-{number}", service, **settings)
        self._engines.append(engine)
        return engine

    def wake(self, engine: EngineProcess) -> float:
        return engine.wake(next(self.epochs))

    def tidy(self) -> None:
        """After a test: usual engines that live are kept for the next one."""
        self._kept = [engine for engine in self._usual if engine.lives]
        for engine in self._engines:
            if engine in self._kept:
                engine.park()
            else:
                engine.kill()  # or close what is left of one that is dead
        self._engines, self._usual = list(self._kept), list(self._kept)

    def end(self) -> None:
        for engine in self._engines:
            engine.kill()


@contextmanager
def pod_of(driver: Driver, model: Path, folder: Path) -> Iterator[Pod]:
    with memory_service(folder) as service:
        pod = Pod(driver, service, model)
        try:
            yield pod
        finally:
            pod.end()


@pytest.fixture(scope="module")
def shared_pod(driver: Driver, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    with pod_of(driver, tiny_model, tmp_path_factory.mktemp("pod")) as pod:
        yield pod


@pytest.fixture
def pod(shared_pod: Pod) -> Iterator[Pod]:
    """Prompts of other tests may be in its cache: each has its own."""
    yield shared_pod
    shared_pod.tidy()


def test_a_killed_engines_prefixes_are_found_by_the_next_one(
    driver: Driver, model_folder: Path, tmp_path: Path
) -> None:
    """With a real model."""
    with pod_of(driver, model_folder, tmp_path) as pod:
        first, second = (pod.fork(kv_cache_bytes=256 * MIB) for _ in range(2))
        pod.wake(first)
        asked = prompt(1)
        cold = ask(first, asked)
        assert cold.cached == 0
        first.kill()
        pod.wake(second)
        warm = ask(second, asked)
        assert warm.cached >= 0.9 * (len(asked) // BLOCK_TOKENS) * BLOCK_TOKENS
        assert warm.tokens == cold.tokens


def test_a_parked_engine_leaves_its_prefixes_too(pod: Pod) -> None:
    first, second = pod.fork(), pod.fork()
    pod.wake(first)
    asked = prompt(2)
    cold = ask(first, asked)
    first.park()
    pod.wake(second)
    assert ask(second, asked) == Answer(cold.tokens, FULL)
    second.park()
    pod.wake(first)
    assert ask(first, asked) == Answer(cold.tokens, FULL)
    assert ask(first, prompt(3)).cached == 0


def test_after_a_segmentation_fault_nothing_is_believed(pod: Pod) -> None:
    first, second, third = pod.fork(), pod.fork(), pod.fork()
    pod.wake(first)
    asked = prompt(4)
    cold = ask(first, asked)
    os.kill(first.pid, signal.SIGSEGV)
    first.wait_gone()
    pod.wake(second)
    assert refusal(second) == "fault"
    assert ask(second, asked) == Answer(cold.tokens, 0)
    second.kill()
    pod.wake(third)
    assert ask(third, asked) == Answer(cold.tokens, FULL)


def test_engines_that_are_configured_in_another_way_start_empty(pod: Pod) -> None:
    first = pod.fork()
    other = pod.fork(engine_args=(*DETAILS, "--max-num-batched-tokens=512"))
    off = pod.fork(kv_carry_over=False)
    again = pod.fork()
    pod.wake(first)
    asked = prompt(5)
    cold = ask(first, asked)
    first.kill()
    pod.wake(other)
    assert refusal(other) == "configuration"
    assert ask(other, asked).cached == 0
    other.kill()
    pod.wake(off)
    assert refusal(off) == "off"
    assert ask(off, asked) == Answer(cold.tokens, 0)
    off.kill()
    pod.wake(again)
    assert refusal(again) == "no_index"
    assert ask(again, asked) == Answer(cold.tokens, 0), "it is not told of pages that were used without an index"


def test_a_hash_whose_seed_vllm_draws_gives_the_same_names_in_all_engines(pod: Pod) -> None:
    arguments = (*DETAILS, "--prefix-caching-hash-algo=xxhash")
    first, second = pod.fork(engine_args=arguments), pod.fork(engine_args=arguments)
    pod.wake(first)
    asked = prompt(6)
    cold = ask(first, asked)
    first.kill()
    pod.wake(second)
    assert ask(second, asked) == Answer(cold.tokens, FULL)


@pytest.mark.parametrize(
    "unable",
    [
        {"engine_args": (*DETAILS, "--no-enable-prefix-caching")},
        {"engine_args": (*DETAILS, "--scheduling-policy=priority")},
        {"scheduler": ASYNC_SCHEDULER},
    ],
)
def test_engines_that_cannot_say_so(pod: Pod, unable: dict[str, Any]) -> None:
    engine = pod.fork(**unable)
    pod.wake(engine)
    assert ask(engine, prompt(7)).cached == 0
    assert refusal(engine) == "unsupported"


def kills() -> int:
    """How many times; ``make test-long`` asks for more."""
    return 50 if os.environ.get("HOTSPARE_TEST_LONG") else 3


@pytest.mark.timeout(3600)
def test_whatever_the_moment_of_a_kill_the_next_answer_is_right(pod: Pod) -> None:
    """Kills in the middle of a prefill and of an answer. What is cached of the repeated prompt is what the one before
    had computed, and the answer is an uninterrupted engine's to the last token."""
    chance = random.Random(18)
    spare, active = pod.fork(), pod.fork()
    pod.wake(active)
    filled = prompt(8, LONG)
    full = LONG // BLOCK_TOKENS * BLOCK_TOKENS
    right = ask(active, filled).tokens
    for number in range(kills()):
        body = {**BODY, "prompt": prompt(100 + number), "max_tokens": 200, "stream": True}
        with active.client.stream("POST", "/v1/completions", json=body) as answer:
            events = answer.iter_raw() if chance.random() < 0.8 else iter(())  # the others die in their prefill
            for _ in range(chance.randrange(1, 40)):
                next(events, None)
            os.kill(active.pid, signal.SIGKILL)
        active.wait_gone()
        active, spare = spare, pod.fork()
        pod.wake(active)
        again = ask(active, filled)
        assert again.tokens == right, f"after kill {number}"
        assert again.cached >= 0.9 * full, f"after kill {number}"


def test_a_wrong_block_would_show(pod: Pod) -> None:
    """The same comparison, with an entry that says of another prompt's block that it is this one's."""
    first, second = pod.fork(), pod.fork()
    pod.wake(first)
    asked = prompt(9)
    right = ask(first, asked)
    ask(first, prompt(10))
    first.control("plant")
    first.kill()
    pod.wake(second)
    wrong = ask(second, asked)
    assert wrong.cached == FULL
    assert wrong.tokens != right.tokens
