"""The prefix cache of a sim pod over its engines' deaths: gone on with after a kill, and not after a memory fault."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.process.pod.sim_pods import SimPod, supervised
from tests.support.processes import until
from workers.engines.sim.prefixes import BLOCK_TOKENS
from workers.engines.sim.tokens import encode, expected_text

pytestmark = pytest.mark.process

PROMPT = "once upon a time there was a river by the sea " * 12
FULL = (len(encode(PROMPT)) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
COUNT = 40


def ask(pod: SimPod, prompt: str = PROMPT) -> tuple[str, int]:
    """The text, and how much of the prompt came from the cache."""
    body = {"prompt": prompt, "max_tokens": COUNT}
    answer = httpx.post(f"http://127.0.0.1:{pod.serving}/v1/completions", json=body, timeout=10, trust_env=False).json()
    return answer["choices"][0]["text"], answer["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0)


def die(pod: SimPod, number: signal.Signals) -> None:
    """Kill the active engine, and wait for the next one and its spare."""
    active, _ = pod.until_pair()
    os.kill(active["pid"], number)

    def followed() -> bool:
        now = pod.active()
        return now is not None and now["epoch"] > active["epoch"]

    until(followed, saying="the other engine is active")
    pod.until_pair()


def carry_overs(pod: SimPod) -> dict[str, float]:
    """Of the active engine, by outcome."""
    active = pod.active()
    assert active is not None
    port = next(port for port in pod.admin if f'role="{active["role"]}"}} 1.0' in _metrics(port))
    prefix = 'hotspare_engine_kv_carry_overs_total{outcome="'
    lines = [line.removeprefix(prefix) for line in _metrics(port).splitlines() if line.startswith(prefix)]
    return {line.partition('"')[0]: float(line.split()[-1]) for line in lines}


def _metrics(port: int) -> str:
    return httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10, trust_env=False).text


def test_what_was_cached_before_a_kill_is_cached_after_it(pod: SimPod, tmp_path: Path) -> None:
    text = expected_text(PROMPT, COUNT)
    with supervised(pod, tmp_path) as process:
        pod.until_pair()
        assert ask(pod) == (text, 0)
        assert ask(pod) == (text, FULL)
        die(pod, signal.SIGKILL)
        assert ask(pod) == (text, FULL)
        die(pod, signal.SIGKILL)
        longer = PROMPT + "and a bridge"
        assert ask(pod, longer) == (expected_text(longer, COUNT), FULL)
        assert carry_overs(pod) == {"new_pages": 1, "taken_over": 1}, "of both lives of the engine that is active again"
        process.until_said("prefix cache: 2 of 128 blocks taken over")


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT])
def test_after_a_fault_nothing_is_believed(pod: SimPod, tmp_path: Path, number: signal.Signals) -> None:
    text = expected_text(PROMPT, COUNT)
    with supervised(pod, tmp_path) as process:
        pod.until_pair()
        assert ask(pod) == (text, 0)
        die(pod, number)
        assert ask(pod) == (text, 0)
        assert carry_overs(pod) == {"fault": 1}
        process.until_said("the engine before died of a memory fault: Fatal Python error")
        process.until_said(number.name)  # the keeper saw the signal
        assert ask(pod) == (text, FULL)
        die(pod, signal.SIGKILL)
        assert ask(pod) == (text, FULL), "only the fault is not believed, and not what came after it"


def test_switched_off_every_engine_starts_empty(pod: SimPod, tmp_path: Path) -> None:
    with supervised(pod, tmp_path, HOTSPARE_KV_CARRY_OVER="false"):
        pod.until_pair()
        ask(pod)
        die(pod, signal.SIGKILL)
        assert ask(pod) == (expected_text(PROMPT, COUNT), 0)
        assert carry_overs(pod) == {"off": 1}


def test_the_index_is_handed_back_to_a_memory_service_that_was_started_again(pod: SimPod, tmp_path: Path) -> None:
    with supervised(pod, tmp_path):
        pod.until_pair()
        text, _ = ask(pod)
        first = pod.record()["gms"]["pid"]
        os.kill(first, signal.SIGKILL)

        def handed_back() -> bool:
            active = pod.active()
            return (
                active is not None
                and active["memory_service"]["restored"] > 0
                and active["memory_service"]["connected"]
            )

        until(handed_back, saying="the pages are the next service's")
        die(pod, signal.SIGKILL)
        assert ask(pod) == (text, FULL)
