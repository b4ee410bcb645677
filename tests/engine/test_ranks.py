"""vLLM engines of two ranks, each with a device and a memory service: a pair of them, and the death of either rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gms.client import GmsClient
from gms.protocol import PoolStatus
from tests.engine.killing import DEADLINE_SECONDS, Engine, Fleet, after_events, alike
from tests.engine.vllm import tiny_llama
from tests.engine.vllm.resume_rows import CHAT
from tests.engine.vllm.resuming import difference
from tests.support.machine import Machine
from tests.support.processes import gone
from workers.engines.vllm import exchange
from workers.settings import MIB

pytestmark = [pytest.mark.engine, pytest.mark.process, pytest.mark.timeout(240)]

PROMPT = "One, two, three, four. " * 48
BLOCK_TOKENS = 32


@dataclass
class Two:
    """One pod of two engines, of two ranks each."""

    machine: Machine
    fleet: Fleet
    model_bytes: int
    """Of all weights, as float32."""

    @property
    def folder(self) -> Path:
        return self.machine.run_dir / "pod-0"

    def kv(self) -> list[PoolStatus]:
        """Of both devices."""
        found = []
        for device in (0, 1):
            path = self.folder / f"gms-cpu-{device}.sock"
            with GmsClient.connect(path, engine="t", instance="t", client="test", device=f"cpu:{device}") as client:
                found.append(next(pool for pool in client.status().pools if pool.name == "kv"))
        return found

    def holders(self) -> list[tuple[str, int | None, int]]:
        """Of both devices' KV pages: engine, pid, and epoch."""
        return [(pool.leases[0].engine, pool.leases[0].pid, pool.epoch) for pool in self.kv() if pool.leases]

    def cached(self, prompt: str) -> tuple[int, int]:
        """Tokens of a prompt that were in the prefix cache, and how many it has."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0}
        usage = self.fleet.client.post("/v1/completions", json=body).json()["usage"]
        return (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0), usage["prompt_tokens"]


def ranks(engine: Engine) -> tuple[int, int]:
    """The pids of both ranks. There is no other process."""
    pid = engine.state["pid"]
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert not Path(f"/proc/{child}/task/{child}/children").read_text()
    return pid, int(child)


def chat(**more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Tell me a story about a cat."}]
    return {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 120, "ignore_eos": True, **more}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    folder = tmp_path_factory.mktemp("ranks")
    model = tiny_llama.make(tmp_path_factory.mktemp("tiny"))
    settings = {
        "HOTSPARE_LOG_FORMAT": "json",
        "HOTSPARE_TENSOR_PARALLEL_SIZE": "2",
        "HOTSPARE_MODEL": str(model),
        "HOTSPARE_SERVED_MODEL_NAME": "tiny",
        "HOTSPARE_DTYPE": "float32",
        "HOTSPARE_KV_CACHE_BYTES": str(16 * MIB),
        "HOTSPARE_MAX_MODEL_LEN": "1024",
        "HOTSPARE_CAPACITY": "4",
        "HOTSPARE_ENGINE_ARGS": "--enable-prompt-tokens-details",
    }
    machine = Machine(folder / "run", folder, ("--engine", "vllm"), settings, deadline_seconds=3 * DEADLINE_SECONDS)
    try:
        with closing((fleet := Fleet(machine)).client):
            yield Two(machine, fleet, model_bytes=2 * (model / "model.safetensors").stat().st_size)
    finally:
        machine.end()


@pytest.fixture(scope="module")
def uncut(two: Two) -> bytes:
    """The answer that others are cut in."""
    with two.fleet.stream(CHAT, chat(stream=True)) as stream:
        return stream.read_on()


def exchanged(two: Two) -> list[str]:
    """What vLLM's ranks have in /dev/shm under a name: an engine that is killed would leave it there."""
    return [name for engine in "ab" for name in exchange.names(exchange.prefix(two.folder / f"engine-{engine}"))]


def mapped_exchange(pid: int) -> int:
    """Bytes of it that a rank has mapped. Nothing there has a name any more."""
    found = [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/dev/shm/" in line]
    assert all(line.endswith("(deleted)") for line in found), found
    ends = [[int(end, 16) for end in line.split()[0].split("-")] for line in found if "/dev/shm/hotspare-" in line]
    return sum(end - start for start, end in ends)


def test_each_rank_has_its_share(two: Two) -> None:
    (active,) = two.fleet.whole()
    pids = ranks(active)
    assert two.holders() == [(active.state["engine"], pid, active.state["epoch"]) for pid in pids]
    memory = active.state["memory"]
    assert memory["weights_outside_gms_bytes"] == 0
    assert 0 < memory["weights_bytes"] < 0.6 * two.model_bytes
    assert exchanged(two) == []
    assert all(mapped_exchange(pid) > 0 for pid in pids)


def test_ranks_draw_the_same_numbers(two: Two) -> None:
    """Without a seed each draws for itself; if they differed once, the engine would end."""
    (active,) = two.fleet.whole()
    answer = two.fleet.client.post(CHAT, json=chat(temperature=1.0, n=3, max_tokens=64, logprobs=True))
    assert answer.status_code == 200, answer.text
    assert len({choice["message"]["content"] for choice in answer.json()["choices"]}) == 3
    (after,) = two.fleet.whole()
    assert after.state["pid"] == active.state["pid"]


@pytest.mark.parametrize(
    ("killed", "by"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSEGV)], ids=["0", "1", "1_faulty"]
)
def test_the_death_of_either_rank_promotes_the_other_pair(
    two: Two, uncut: bytes, killed: int, by: signal.Signals
) -> None:
    prompt = f"{killed}, {by}. {PROMPT}"
    two.cached(prompt)
    known, of = two.cached(prompt)
    assert known >= of - of % BLOCK_TOKENS - BLOCK_TOKENS > 0
    (active,) = two.fleet.whole()
    pids, pages = ranks(active), [pool.generation for pool in two.kv()]
    with two.fleet.stream(CHAT, chat(stream=True)) as stream:
        stream.read_until(after_events(5))
        os.kill(pids[killed], by)
        got = stream.read_on()
    assert not difference(alike(got), alike(uncut))
    line = two.fleet.line(stream.request_id)
    assert (line["status"], line["resumes"]) == (200, 1), line
    assert all(gone(pid, within=DEADLINE_SECONDS) for pid in pids)
    assert [pool.generation for pool in two.kv()] == pages
    # What the dead pair had computed is in the pages of both, but not to be believed after a memory fault.
    assert two.cached(prompt)[0] == (known if by == signal.SIGKILL else 0)
    (after,) = two.fleet.whole()
    assert after.state["engine"] != active.state["engine"]
    assert two.holders() == [(after.state["engine"], pid, after.state["epoch"]) for pid in ranks(after)]
    assert exchanged(two) == []


def test_an_engine_that_is_told_to_stop_hands_over(two: Two, uncut: bytes) -> None:
    (active,) = two.fleet.whole()
    pids, pages = ranks(active), [pool.generation for pool in two.kv()]
    with two.fleet.stream(CHAT, chat(stream=True)) as stream:
        stream.read_until(after_events(5))
        os.kill(pids[0], signal.SIGTERM)
        got = stream.read_on()
    assert not difference(alike(got), alike(uncut))
    assert all(gone(pid, within=DEADLINE_SECONDS) for pid in pids)
    assert [pool.generation for pool in two.kv()] == pages
    assert two.fleet.metric("hotspare_lost_requests_total") == 0


def test_nothing_is_left(two: Two) -> None:
    """Last: it ends the pod."""
    two.machine.descendants()
    two.machine.up.signal(signal.SIGINT)
    assert two.machine.up.wait(seconds=DEADLINE_SECONDS) == 0
    two.machine.assert_all_gone()
    assert two.machine.left() == []
    assert exchanged(two) == []
    assert "did not stop and is killed" not in two.machine.up.output()
