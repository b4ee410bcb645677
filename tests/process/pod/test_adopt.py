"""A real pod whose memory service dies: nobody notices, nothing is loaded twice, and the shadow still takes over."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gms.client import LeaseMode
from tests.process.pod.sim_pods import COUNT, PROMPT, SimPod, supervised
from tests.support.processes import gone, state_of, until
from workers.engines.sim.tokens import expected_text

pytestmark = pytest.mark.process

LONG = 400


def kill(pid: int | None) -> None:
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert gone(pid)


def pages(pid: int) -> set[tuple[str, str]]:
    """Inode and name of the memory service's pages that a process has mapped: the same ones are the same memory."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return set(re.findall(r" (\d+) +(/memfd:gms\S*) ", maps))


def until_restored(pod: SimPod, times: int) -> None:
    """Both engines have handed their pages back this often, and are connected."""

    def look() -> bool:
        states = [state_of(port) for port in pod.admin]
        links = [state["memory_service"] for state in states if state and state["memory_service"]]
        return len(links) == 2 and all(link["connected"] and link["restored"] == times for link in links)

    until(look, saying=f"both engines were restored {times} times")


@contextmanager
def stream(pod: SimPod, count: int) -> Iterator[Iterator[str]]:
    """The texts of a completion as they come."""
    body = {"prompt": PROMPT, "max_tokens": count, "stream": True}
    url = f"http://127.0.0.1:{pod.serving}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=10, trust_env=False) as answer:

        def texts() -> Iterator[str]:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))["choices"][0]["text"]

        yield texts()


def test_a_stream_goes_on_and_the_shadow_takes_over_what_was_handed_back(pod: SimPod, tmp_path: Path) -> None:
    with supervised(pod, tmp_path, HOTSPARE_SIM_TOKEN_SECONDS="0.01") as process:
        active, parked = pod.until_pair()
        weights, kv, total = pod.pool("weights"), pod.pool("kv"), pod.memory().total_bytes
        before = {pid: pages(pid) for pid in (active["pid"], parked["pid"])}
        assert len(before[active["pid"]]) == 3  # weights, KV pages and their index
        with stream(pod, LONG) as texts:
            said = [next(texts) for _ in range(10)]
            kill(pod.gms_pid())
            until_restored(pod, 1)
            said += [next(texts)]  # it is still under way
            assert {pid: pages(pid) for pid in before} == before
            after_weights, after_kv = pod.pool("weights"), pod.pool("kv")
            said += list(texts)
        assert "".join(said) == expected_text(PROMPT, LONG)
        assert (after_weights.state, after_weights.generation) == ("READ", weights.generation)
        assert (after_kv.state, after_kv.generation, after_kv.epoch) == ("WRITING", kv.generation, kv.epoch)
        assert pod.memory().total_bytes == total

        kill(active["pid"])
        promoted, third = pod.until_pair()
        assert (promoted["pid"], promoted["epoch"]) == (parked["pid"], active["epoch"] + 1)
        assert pages(promoted["pid"]) == before[active["pid"]]  # the old KV pages among them
        assert third["memory"]["weights_role"] == "reader"
        assert pages(third["pid"]) == before[parked["pid"]]
        assert (pod.pool("kv").generation, pod.memory().total_bytes) == (kv.generation, total)
        assert pod.complete() == expected_text(PROMPT, COUNT)
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        assert not pod.folder.exists()


def test_the_service_and_the_active_engine_die_together(pod: SimPod, tmp_path: Path) -> None:
    with supervised(pod, tmp_path):
        active, parked = pod.until_pair()
        weights = pod.pool("weights")
        service = pod.gms_pid()
        os.kill(active["pid"], signal.SIGKILL)
        kill(service)
        promoted, third = pod.until_pair()
        assert promoted["pid"] == parked["pid"]
        assert third["memory"]["weights_role"] == "reader"
        assert pod.pool("weights").generation == weights.generation
        assert pod.complete() == expected_text(PROMPT, COUNT)


def test_a_spare_that_is_forked_again_while_pages_are_handed_back_reads_them(pod: SimPod, tmp_path: Path) -> None:
    with supervised(pod, tmp_path):
        active, parked = pod.until_pair()
        weights = pod.pool("weights")
        service = pod.gms_pid()
        os.kill(parked["pid"], signal.SIGKILL)
        kill(service)
        same, third = pod.until_pair()
        assert same["pid"] == active["pid"]
        assert third["memory"]["weights_role"] == "reader"
        assert pages(third["pid"]) < pages(active["pid"])
        assert pod.pool("weights").generation == weights.generation


def test_killed_twice_and_what_is_told_meanwhile(pod: SimPod, tmp_path: Path) -> None:
    with supervised(pod, tmp_path) as process:
        active, parked = pod.until_pair()
        before = pages(active["pid"])
        port = next(port for port in pod.admin if (state := state_of(port)) and state["pid"] == active["pid"])
        admin = f"http://127.0.0.1:{port}"
        kill(first := pod.gms_pid())
        kill(until(lambda: None if (pid := pod.gms_pid()) == first else pid, saying="it is started again"))

        def adrift() -> dict[str, Any] | None:
            link = (state_of(port) or {}).get("memory_service")
            return link if link and link["adrift_seconds"] else None

        link = until(adrift, saying="the engine says that the service is gone")
        assert not link["connected"]
        health = httpx.get(f"{admin}/health", trust_env=False)
        assert health.status_code == 200
        assert re.fullmatch(r"gone for \d+\.\d s|connected", health.json()["memory_service"])
        until(lambda: all(_connected(pod, engine) for engine in pod.admin), saying="both are connected again")
        assert pages(active["pid"]) == before
        metrics = httpx.get(f"{admin}/metrics", trust_env=False).text
        assert "hotspare_engine_memory_service_connected 1.0" in metrics
        assert re.search(r"^hotspare_engine_memory_service_restores [12]\.0$", metrics, re.MULTILINE)
        assert "Traceback" not in process.output()
        kill(active["pid"])
        assert pod.until_pair()[0]["pid"] == parked["pid"]


def _connected(pod: SimPod, port: int) -> bool:
    link = (state_of(port) or {}).get("memory_service")
    return bool(link and link["connected"] and link["restored"])


def test_an_engine_whose_pages_went_to_a_newer_epoch_stops(pod: SimPod, tmp_path: Path) -> None:
    """It was stopped while the service came back and somebody else asked for the pages."""
    with supervised(pod, tmp_path, HOTSPARE_BEAT_TIMEOUT_SECONDS="60") as process:
        active, parked = pod.until_pair()
        os.kill(active["pid"], signal.SIGSTOP)
        service = pod.gms_pid()
        kill(service)
        until(lambda: pod.gms_pid() not in (None, service), saying="the service is started again")
        with pod.connect() as client:
            lease = client.attach("kv", LeaseMode.RW, epoch=active["epoch"] + 1, timeout_seconds=0.2)
            assert lease.fresh
            lease.release(quiesced=True)
        os.kill(active["pid"], signal.SIGCONT)
        assert gone(active["pid"])
        until(lambda: "the engine is gone (exit code 75)" in process.output(), saying="it says why")
        promoted, _ = pod.until_pair()
        assert promoted["pid"] == parked["pid"]
        assert pod.complete() == expected_text(PROMPT, COUNT)
