"""Promotions that fail, in real processes: all is taken back, the next engine has its turn, and it is said why."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.workers.crews import Crew, crew
from tests.support.processes import gone, until, until_role
from workers.binding import bind

pytestmark = pytest.mark.process

UNHURRIED = {"HOTSPARE_HEARTBEAT_SECONDS": "1"}
"""For engines whose promotions fail until a test has looked: the wait after the first is as long."""


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Crew]:
    with crew(tmp_path, "ab") as two:
        yield two


def failed(pair: Crew, name: str, cause: str) -> float:
    return pair.metric(name, f'hotspare_engine_failed_promotions_total{{cause="{cause}"}}')


def until_obstacle(pair: Crew, name: str, text: str) -> None:
    until(
        lambda: text in str((pair.state(name) or {}).get("obstacle")),
        saying=f"{name} says that its promotion failed ({text}): {pair.state(name)}",
    )


def test_a_stranger_on_the_port_is_named_and_both_engines_have_their_turns_until_it_leaves(pair: Crew) -> None:
    pair.gms()
    stranger = bind("127.0.0.1", pair.serving)
    try:
        a, b = (pair.engine(name, HOTSPARE_BIND_TIMEOUT_SECONDS="0.05", **UNHURRIED) for name in "ab")
        for name in "ab":
            until_obstacle(pair, name, f"port: 127.0.0.1:{pair.serving} is in use by process {os.getpid()}")
            assert failed(pair, name, "port") >= 1
            assert pair.metric(name, "hotspare_engine_failed_promotions_in_a_row") >= 1
    finally:
        stranger.close()
    name = str(pair.until_active()["engine"])
    assert pair.complete()
    state = pair.state(name)
    assert state is not None
    assert state["obstacle"] is None
    assert pair.metric(name, "hotspare_engine_failed_promotions_in_a_row") == 0
    assert "could not be promoted (try 1 of 5) and gives the lock back" in a.output()
    assert "could not be promoted (try 1 of 5) and gives the lock back" in b.output()
    assert "Traceback" not in a.output() + b.output()


@pytest.mark.parametrize(
    ("how", "cause", "says"),
    [
        ("silent", "endpoint", "does not answer on its own serving port"),
        ("raises", "endpoint", "answers /v1/models on its own serving port with 500"),
        ("wake", "engine", "Cannot allocate memory"),
    ],
)
def test_an_engine_that_cannot_serve_never_counts_and_the_other_one_does(
    pair: Crew, how: str, cause: str, says: str
) -> None:
    pair.gms()
    pair.break_(how)
    a = pair.breakable("a")
    until_obstacle(pair, "a", f"{cause}: ")
    until_obstacle(pair, "a", says)
    pair.engine("b")
    assert until_role(pair.admin["b"], "ACTIVE")["epoch"] > 1
    assert pair.complete()
    assert "is active" not in a.output()
    state = pair.until_in_line("a")
    assert state["memory"]["kv_mapped"] is False
    pair.mend(how)
    os.kill(int(pair.until_active()["pid"]), signal.SIGKILL)
    assert until_role(pair.admin["a"], "ACTIVE")["obstacle"] is None
    assert pair.complete()


def test_an_engine_that_does_not_wake_in_time_is_ended_and_the_other_one_serves(pair: Crew) -> None:
    pair.break_("hang")
    a = pair.breakable("a", HOTSPARE_GMS="false", HOTSPARE_WAKE_TIMEOUT_SECONDS="0.3")
    waking = until_role(pair.admin["a"], "PROMOTING")
    pair.engine("b", "--no-gms")
    until_role(pair.admin["b"], "ACTIVE")
    assert gone(waking["pid"])
    assert "it did not wake in 0.3 s" in a.output()


def test_a_hang_beside_a_memory_service_is_no_wait_for_it(pair: Crew) -> None:
    """What it may wait for the service by default, 44 s, is not added."""
    pair.gms()
    pair.break_("hang")
    a = pair.breakable("a", HOTSPARE_WAKE_TIMEOUT_SECONDS="0.3")
    waking = until_role(pair.admin["a"], "PROMOTING")
    began = time.monotonic()
    pair.engine("b")
    assert gone(waking["pid"])
    assert time.monotonic() - began < 20
    until_role(pair.admin["b"], "ACTIVE")
    assert "it did not wake in 0.3 s" in a.output()
    assert pair.complete()


def test_a_wait_for_a_stopped_memory_service_is_not_taken_for_a_hang(pair: Crew) -> None:
    gms = pair.gms()
    pair.engine("a", "--no-keeper")
    first = until_role(pair.admin["a"], "ACTIVE")
    b = pair.engine("b", HOTSPARE_WAKE_TIMEOUT_SECONDS="2")
    parked = pair.until_in_line("b")
    gms.signal(signal.SIGSTOP)
    os.kill(first["pid"], signal.SIGKILL)

    def more_than_its_time_has_gone() -> bool:
        state = pair.state("b")
        return state is not None and state["role"] == "PROMOTING" and state["role_seconds"] > 3

    until(more_than_its_time_has_gone, saying="b has been waking for longer than it may")
    gms.signal(signal.SIGCONT)
    after = until_role(pair.admin["b"], "ACTIVE")
    assert after["pid"] == parked["pid"]
    assert "did not wake" not in b.output()
    assert pair.complete()


def test_an_engine_that_is_told_to_go_while_it_wakes_goes(pair: Crew) -> None:
    pair.break_("hang")
    a = pair.breakable("a", HOTSPARE_GMS="false")
    until_role(pair.admin["a"], "PROMOTING")
    a.signal(signal.SIGTERM)
    assert a.wait() == 0


def test_an_epoch_that_cannot_be_written_gives_the_lock_to_the_next(pair: Crew) -> None:
    """The same error path as a full disk: this process may not write any file."""
    pair.gms()
    pair.engine("a")
    first = until_role(pair.admin["a"], "ACTIVE")
    pair.engine("b")
    b = pair.until_in_line("b")
    _, hard = resource.prlimit(b["pid"], resource.RLIMIT_FSIZE)
    resource.prlimit(b["pid"], resource.RLIMIT_FSIZE, (0, hard))
    os.kill(first["pid"], signal.SIGKILL)
    until_obstacle(pair, "b", "epoch: cannot write the epoch")
    second = until_role(pair.admin["a"], "ACTIVE")
    assert pair.complete()
    resource.prlimit(b["pid"], resource.RLIMIT_FSIZE, (hard, hard))
    pair.until_in_line("b")
    os.kill(second["pid"], signal.SIGKILL)
    assert until_role(pair.admin["b"], "ACTIVE")["epoch"] > second["epoch"] > first["epoch"]


def test_no_room_for_the_lock_file_is_said_at_the_start(tmp_path: Path) -> None:
    script = (
        "import resource, sys; from pathlib import Path\n"
        "from workers.failover_lock import FlockFailoverLock, FailoverLockError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "try: FlockFailoverLock(Path(sys.argv[1]))\n"
        "except FailoverLockError as error: print(error)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "active.lock")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    assert "there is no room for the pod's lock file" in done.stdout


def test_a_lock_file_that_was_replaced_costs_a_new_process_and_no_more(pair: Crew) -> None:
    pair.gms()
    pair.engine("a")
    first = until_role(pair.admin["a"], "ACTIVE")
    b = pair.engine("b")
    parked = pair.until_in_line("b")
    lock = pair.pod_dir / "active.lock"
    lock.unlink()
    lock.touch(mode=0o600)
    os.kill(first["pid"], signal.SIGKILL)
    assert gone(parked["pid"])
    after = pair.until_active()
    assert after["epoch"] > first["epoch"]
    assert "was replaced while this engine waited on it" in b.output()
    assert pair.complete()


def test_a_memory_service_that_dies_in_the_middle_of_a_promotion_is_followed_by_another(pair: Crew) -> None:
    gms = pair.gms()
    pair.engine("a", "--no-keeper")
    first = until_role(pair.admin["a"], "ACTIVE")
    pair.engine("b")
    pair.until_in_line("b")
    gms.signal(signal.SIGSTOP)
    os.kill(first["pid"], signal.SIGKILL)
    until_role(pair.admin["b"], "PROMOTING")
    gms.signal(signal.SIGKILL)
    gms.wait()
    pair.gms()
    assert until_role(pair.admin["b"], "ACTIVE")["epoch"] == first["epoch"] + 1
    assert pair.complete()


def test_a_memory_service_that_is_away_for_longer_costs_tries_and_not_the_engine(pair: Crew) -> None:
    gms = pair.gms()
    pair.engine("a", "--no-keeper")
    first = until_role(pair.admin["a"], "ACTIVE")
    pair.engine("b", HOTSPARE_MEMORY_CONNECT_SECONDS="0.2", **UNHURRIED)
    parked = pair.until_in_line("b")
    gms.signal(signal.SIGKILL)
    gms.wait()
    os.kill(first["pid"], signal.SIGKILL)
    until_obstacle(pair, "b", "service: ")
    assert failed(pair, "b", "service") >= 1
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", pair.serving)) != 0
    pair.gms()
    after = until_role(pair.admin["b"], "ACTIVE")
    assert (after["pid"], after["obstacle"]) == (parked["pid"], None)
    assert pair.complete()


@pytest.mark.parametrize("garbage", ["nonsense", "x" * 100])
def test_a_lock_file_that_was_written_over_costs_no_outage_with_a_memory_service(pair: Crew, garbage: str) -> None:
    pair.gms()
    a = pair.engine("a")
    first = until_role(pair.admin["a"], "ACTIVE")
    b = pair.engine("b")
    pair.until_in_line("b")
    (pair.pod_dir / "active.lock").write_text(garbage)
    a.signal(signal.SIGKILL)
    assert until_role(pair.admin["b"], "ACTIVE")["epoch"] == first["epoch"] + 1
    assert (pair.pod_dir / "active.lock").read_text() == f"{first['epoch'] + 1:020d}\n"
    assert "does not hold an epoch" in b.output()
    assert pair.complete()


def test_without_a_memory_service_removing_a_lock_file_that_was_written_over_is_enough(pair: Crew) -> None:
    (pair.pod_dir / "active.lock").write_text("nonsense")
    a = pair.engine("a", "--no-gms")
    until_obstacle(pair, "a", "Remove it, and the engines start again with a new one")
    (pair.pod_dir / "active.lock").unlink()
    until_role(pair.admin["a"], "ACTIVE")
    assert pair.complete()
    assert "the pod need not be stopped" in a.output()
