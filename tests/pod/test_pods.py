"""The chart's pods, run: containers of their own for gateway, memory service and each engine, as a cluster would.

The tests go through one pod's life in the order in which they stand here; each leaves it with an active engine and a
spare.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.pod.fleet import Fleet, Stream
from tests.pod.kubelet import Container, Pod
from tests.support.processes import MS, gone, until
from workers.engines.sim.prefixes import BLOCK_TOKENS
from workers.engines.sim.tokens import encode, expected_text

pytestmark = [pytest.mark.pod, pytest.mark.timeout(600)]

PROMPT = "once upon a time there was a river by the sea " * 12
CACHED = (len(encode(PROMPT)) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
COUNT = 20
USER = 65532
ENGINES = ("engine-a", "engine-b")


@pytest.fixture
def worker(fleet: Fleet) -> Pod:
    """The first worker, with both engines where they should be."""
    pod = fleet.pods["worker-0"]
    pair(pod)
    return pod


def pair(pod: Pod) -> tuple[str, str]:
    """The containers of the active engine and of the spare, once there are both."""

    def look() -> tuple[str, str] | None:
        roles = {pod.role(name): name for name in ENGINES}
        return (roles["ACTIVE"], roles["STANDBY"]) if set(roles) == {"ACTIVE", "STANDBY"} else None

    with pod._explained():
        return until(look, saying="one engine is active and the other is parked")


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def engine_process(container: Container) -> int:
    """The engine that the container's keeper has forked, by its pid on this machine."""
    (pid,) = children(container.pid)
    return pid


def answer(fleet: Fleet) -> tuple[str, int]:
    """The text that the prompt leads to, and how much of the prompt was in the cache."""
    document = fleet.complete(PROMPT, COUNT)
    return document["choices"][0]["text"], document["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0)


def status_of(pid: int) -> dict[str, str]:
    """``/proc/PID/status``."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def is_zombie(pid: int) -> bool:
    try:
        return status_of(pid)["State"].startswith("Z")
    except (FileNotFoundError, ProcessLookupError):  # buried meanwhile
        return False


# --- what the containers are


def test_a_question_is_answered_through_the_gateway(fleet: Fleet, worker: Pod) -> None:
    text = expected_text(PROMPT, COUNT)
    assert answer(fleet) == (text, 0)
    assert answer(fleet) == (text, CACHED)

    def look() -> bool:
        (seen,) = fleet.status()["workers"]
        assert (seen["worker"], seen["routable"]) == (worker.manifest.name, True)
        return bool(seen["standby"] == "STANDBY")

    until(look, saying="the gateway has heard of the spare")


def test_processes_may_do_next_to_nothing(fleet: Fleet, worker: Pod) -> None:
    for pod in (worker, fleet.pods["gateway-0"]):
        for container in pod.containers.values():
            outside = status_of(container.pid)
            inside = pod.exec(container.name, "python3.11", "-c", "print(open('/proc/1/status').read())").stdout
            for name, value in {
                "Uid": f"{USER}\t{USER}\t{USER}\t{USER}",
                "Gid": f"{USER}\t{USER}\t{USER}\t{USER}",
                **dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), "0" * 16),
                "NoNewPrivs": "1",
                "Seccomp": "2",
            }.items():
                assert outside[name] == value, (container.name, name)
                assert f"{name}:\t{value}\n" in inside, (container.name, name)


def test_the_root_is_read_only(fleet: Fleet, worker: Pod) -> None:
    for pod in (worker, fleet.pods["gateway-0"]):
        for container in pod.containers.values():
            for path in ("/file", "/opt/hotspare/file", "/home/hotspare/file", "/var/tmp/file"):
                done = pod.exec(container.name, "python3.11", "-c", f"open({path!r}, 'w')")
                assert "Read-only file system" in done.stderr, (container.name, path, done.stderr)
            done = pod.exec(container.name, "python3.11", "-c", "open('/tmp/file', 'w')")
            assert done.returncode == 0, done.stderr


def test_each_container_has_pids_of_its_own_and_all_share_the_network(worker: Pod) -> None:
    found = [container.pid for container in worker.containers.values()]
    assert len({os.stat(f"/proc/{pid}/ns/pid").st_ino for pid in found}) == len(found)
    assert len({os.stat(f"/proc/{pid}/ns/net").st_ino for pid in found}) == 1
    for pid in found:
        assert status_of(pid)["NSpid"].split()[-1] == "1", "the program itself is process 1, without a shell or an init"
    # The two engines have the same pids, so nobody may go by them.
    first, second = (state_of(worker, name) for name in ENGINES)
    assert first["keeper_pid"] == second["keeper_pid"] == 1


def test_every_line_of_the_logs_is_a_whole_document(fleet: Fleet, worker: Pod) -> None:
    for pod in (worker, fleet.pods["gateway-0"]):
        for name in pod.containers:
            lines = pod.log(name)
            assert lines, name
            for line in lines:
                assert {"time", "level", "logger", "message", "pid"} <= json.loads(line).keys()


def test_the_first_process_buries_what_others_leave(fleet: Fleet, worker: Pod) -> None:
    orphan = "import os, sys\nif os.fork(): sys.exit()\nos.setsid()\nprint(os.getpid(), flush=True)"
    for pod in (worker, fleet.pods["gateway-0"]):
        for container in pod.containers.values():
            done = pod.exec(container.name, "python3.11", "-c", orphan)
            assert done.returncode == 0, done.stderr
            until(
                lambda pid=container.pid: not any(is_zombie(one) for one in children(pid)),
                saying=f"no zombie is left in {container.name}",
            )


# --- commands in a container


@pytest.mark.parametrize("name", [*ENGINES, "gms"])
def test_status_in_a_container(worker: Pod, name: str) -> None:
    active, spare = pair(worker)
    done = worker.exec(name, "hotspare", "status", "--json")
    assert done.returncode == 0, done.stderr
    (seen,) = json.loads(done.stdout)["pods"]
    assert (seen["pod"], seen["pid"], seen["stale"]) == (worker.manifest.name, None, False)
    assert {f"engine-{letter}": engine["role"] for letter, engine in seen["engines"].items()} == {
        active: "ACTIVE",
        spare: "STANDBY",
    }
    assert seen["gms"]["answers"]
    # What is behind a pid of another container is somebody else here.
    own = name.removeprefix("engine-")
    assert {letter for letter, engine in seen["engines"].items() if engine["private_bytes"] is not None} == (
        {own} if name != "gms" else set()
    )


def test_a_hand_over_is_asked_for_in_a_container(fleet: Fleet, worker: Pod) -> None:
    active, spare = pair(worker)
    stream = Stream(fleet, "tell me a story", 300)
    stream.until(100)
    done = worker.exec("gms", "hotspare", "handover")
    assert done.returncode == 0, done.stderr
    assert f"engine {spare[-1]} serves under epoch" in done.stdout
    stream.assert_whole()
    assert pair(worker) == (spare, active)
    assert [container.restarts for container in worker.containers.values()] == [0, 0, 0]


def test_what_needs_a_supervisor_is_refused_with_a_sentence(worker: Pod) -> None:
    active, spare = pair(worker)
    done = worker.exec(active, "hotspare", "handover", "--restart-keepers")
    assert (done.returncode, "StatefulSet" in done.stderr) == (1, True)
    done = worker.exec(spare, "hotspare", "fault", "kill-active", worker.manifest.name)
    assert (done.returncode, "is in a container of its own" in done.stderr) == (1, True)
    done = worker.exec(active, "hotspare", "fault", "kill-gms", worker.manifest.name)
    assert (done.returncode, "is in a container of its own" in done.stderr) == (1, True)
    assert pair(worker) == (active, spare)


# --- deaths


KILLS = 3
WITHIN_SECONDS = 1.0


def test_a_container_that_is_killed_is_followed_at_once(fleet: Fleet, worker: Pod) -> None:
    """The spare serves within a second. The best kill counts: it shows what a death takes, and a machine that was busy
    with something else shows nothing."""
    took: list[float] = []
    while len(took) < KILLS and min(took, default=WITHIN_SECONDS) >= WITHIN_SECONDS:
        active, spare = pair(worker)
        before = worker.container(active).restarts
        stream = Stream(fleet, f"a long one, {len(took)}", 400)
        stream.until(100)
        killed = time.monotonic()
        os.kill(worker.container(active).pid, signal.SIGKILL)
        state = worker.until_role(spare, "ACTIVE")
        took.append(state["monotonic"] - state["role_seconds"] - killed)  # one clock in all containers
        stream.assert_whole()
        assert answer(fleet) == (expected_text(PROMPT, COUNT), CACHED), "the KV pages went on to another PID namespace"
        assert pair(worker) == (spare, active)
        assert worker.container(active).restarts == before + 1
        assert worker.container(active).exit_codes[-1] == 128 + signal.SIGKILL
    assert min(took) < WITHIN_SECONDS, took


def test_an_engine_that_is_killed_is_forked_again_in_its_container(fleet: Fleet, worker: Pod) -> None:
    active, spare = pair(worker)
    container = worker.container(active)
    first, before = container.pid, container.restarts
    os.kill(engine_process(container), signal.SIGKILL)
    worker.until_role(spare, "ACTIVE")
    assert pair(worker) == (spare, active)
    assert (container.pid, container.restarts) == (first, before)
    assert answer(fleet) == (expected_text(PROMPT, COUNT), CACHED)


def test_an_engine_that_hangs_is_replaced_by_its_keeper(fleet: Fleet, worker: Pod) -> None:
    active, spare = pair(worker)
    container = worker.container(active)
    first, engine = container.pid, engine_process(container)
    stream = Stream(fleet, "another long one", 300)
    stream.until(100)
    os.kill(engine, signal.SIGSTOP)
    assert gone(engine, within=20_000 * MS), "nobody has killed it"
    worker.until_role(spare, "ACTIVE")
    stream.assert_whole()
    assert pair(worker) == (spare, active)
    assert container.pid == first


def test_a_container_that_hangs_as_a_whole_is_replaced_by_its_liveness_probe(fleet: Fleet, worker: Pod) -> None:
    active, spare = pair(worker)
    container = worker.container(active)
    first, before, engine = container.pid, container.restarts, engine_process(container)
    stream = Stream(fleet, "one more long one", 300)
    stream.until(100)
    os.kill(container.pid, signal.SIGSTOP)
    os.kill(engine, signal.SIGSTOP)
    assert gone(first, within=60_000 * MS), "nobody has killed it"
    worker.until_role(spare, "ACTIVE")
    stream.assert_whole()
    assert pair(worker) == (spare, active)
    assert container.restarts == before + 1
    assert any(event.container == active and event.what.startswith("liveness failed") for event in worker.events)


def test_a_memory_service_that_is_killed_gets_its_pages_back(fleet: Fleet, worker: Pod) -> None:
    active, spare = pair(worker)
    gms = worker.container("gms")
    epoch = epoch_of(worker, active)
    lives = {name: worker.container(name).pid for name in ENGINES}
    stream = Stream(fleet, "and yet one more", 300)
    stream.until(100)
    restored = {name: link(worker, name)["restored"] for name in ENGINES}
    os.kill(gms.pid, signal.SIGKILL)
    for name in ENGINES:
        until(
            lambda name=name: link(worker, name)["connected"] and link(worker, name)["restored"] > restored[name],
            saying=f"{name} has handed its pages back",
        )
        assert link(worker, name)["private"] == []
    stream.assert_whole()
    assert (epoch_of(worker, active), pair(worker)) == (epoch, (active, spare))
    assert {name: worker.container(name).pid for name in ENGINES} == lives
    # The service has everything again: the next engine goes on with the same pages.
    os.kill(engine_process(worker.container(active)), signal.SIGKILL)
    worker.until_role(spare, "ACTIVE")
    assert answer(fleet) == (expected_text(PROMPT, COUNT), CACHED)
    pair(worker)


def state_of(pod: Pod, name: str) -> dict[str, Any]:
    """An engine's state once it answers."""
    return until(lambda: pod.state(name), saying=f"{name} answers")


def epoch_of(pod: Pod, name: str) -> int:
    return int(state_of(pod, name)["epoch"])


def link(pod: Pod, name: str) -> dict[str, Any]:
    """How an engine stands with the memory service."""
    return dict(state_of(pod, name)["memory_service"])


# --- ends


def test_a_worker_that_is_stopped_leaves_its_streams_to_another(fleet: Fleet, worker: Pod) -> None:
    fleet.start("worker-1")
    pair(fleet.pods["worker-1"])
    until(
        lambda: sum(one["routable"] for one in fleet.status()["workers"]) == 2,
        saying="the gateway has found the second worker by its name",
    )
    streams = [Stream(fleet, f"stream {number}", 700) for number in range(4)]
    for stream in streams:
        stream.until(100)
    codes = fleet.stop("worker-0")
    assert codes == dict.fromkeys(("gms", *ENGINES), 0)
    for stream in streams:
        stream.assert_whole()
    assert answer(fleet)[0] == expected_text(PROMPT, COUNT)


def test_a_gateway_that_is_stopped_ends_its_streams_first(fleet: Fleet) -> None:
    stream = Stream(fleet, "the last one", 500)
    stream.until(100)
    gateway = fleet.pods["gateway-0"]
    codes = gateway.stop()
    stream.assert_whole()
    assert codes == {"gateway": 0}
    assert any(re.search("drain", line) for line in gateway.log("gateway"))
