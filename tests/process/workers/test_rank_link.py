"""What passes between rank 0 and another rank, each a process: long messages, and ends of every kind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.machine import ROOT

pytestmark = pytest.mark.process

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
from workers.failover_lock import FlockFailoverLock
from workers.ranks import MAX_MESSAGE_BYTES, STOP_SECONDS, Check, Map, Ranks, Step
from workers.waits import Waits

class Worker:
    waits = Waits()

    def attach(self): ...
    def map(self, *, epoch):
        with self.waits.waiting():
            time.sleep(2.5 if sys.argv[2] == "waits" else 0.3)
        time.sleep(epoch)

    def unmap(self): ...
    def close(self): ...
    def check(self):
        signal.pause()

    def step(self, work):
        if work.isdigit():
            os.kill(os.getpid(), int(work))
        return work[::-1]

def fail():
    raise ValueError("rank 0 cannot")

lock = FlockFailoverLock(Path(sys.argv[1]) / "active.lock")
ranks = Ranks.fork(lambda rank, others: Worker(), size=3, lock_fd=lock.fd, close=())
try:
    match sys.argv[2]:
        case "long":
            work = bytes(range(256)) * 20_000
            assert ranks.ask(Step(work), timeout_seconds=30) == [work[::-1]] * 2
            try:
                ranks.ask(Step(bytes(MAX_MESSAGE_BYTES)), timeout_seconds=30)
            except ValueError as error:
                said = [str(error), ranks.ask(Step(b"ab"), timeout_seconds=30) == [b"ba"] * 2]
        case "silent":
            try:
                ranks.ask(Check(), timeout_seconds=0.2)
            except Exception as error:
                said = [type(error).__name__, str(error)]
        case "waits":
            waits = Waits()
            ranks.ask(Map(0), timeout_seconds=2, wait_seconds=30, waits=waits)
            said = [waits.seconds]
        case "waits too long":
            try:
                ranks.ask(Map(0), timeout_seconds=0.1, wait_seconds=0.1)
            except Exception as error:
                said = [type(error).__name__, str(error)]
        case "hangs after a wait":
            began = time.monotonic()
            try:
                ranks.ask(Map(3600), timeout_seconds=0.2, wait_seconds=30)
            except Exception as error:
                said = [type(error).__name__, str(error), time.monotonic() - began < 10]
        case "failed":
            try:
                ranks.ask(Step(b"ab"), timeout_seconds=30, meanwhile=fail)
            except Exception as error:
                said = [type(error).__name__, ranks.lost]
        case number:
            try:
                ranks.ask(Step(number.encode()), timeout_seconds=30)
            except Exception as error:
                said = [type(error).__name__, str(error), type(ranks.death()).__name__]
finally:
    began, pids = time.monotonic(), ranks.pids
    ranks.close()
soon = time.monotonic() - began < STOP_SECONDS / 2
print(json.dumps([*said, soon, [os.path.exists(f"/proc/{pid}") for pid in pids]]))
"""


def run(tmp_path: Path, what: str) -> list[object]:
    """What the script says; last whether the ranks ended soon, and whether there are any left."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), what], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    *said, soon, left = json.loads(done.stdout)
    assert soon
    assert left == [False, False]
    return said


def test_a_message_may_be_long_and_not_too_long(tmp_path: Path) -> None:
    refused, goes_on = run(tmp_path, "long")
    assert "is the most" in str(refused)
    assert goes_on is True


@pytest.mark.parametrize(
    ("signal", "name", "error"), [(9, "SIGKILL", "EngineDeadError"), (11, "SIGSEGV", "RankFaultError")]
)
def test_a_rank_that_dies_in_a_step(tmp_path: Path, signal: int, name: str, error: str) -> None:
    """A memory fault is told from a kill, also by who comes later."""
    raised, message, later = run(tmp_path, str(signal))
    assert (raised, later) == (error, error)
    assert "rank 1 (process " in str(message)
    assert str(message).endswith(f"is gone: {name}")


def test_a_rank_that_says_nothing(tmp_path: Path) -> None:
    raised, message = run(tmp_path, "silent")
    assert raised == "EngineDeadError"
    assert str(message).endswith("does not answer")


def test_a_rank_that_waits_for_its_memory_service_has_the_time_for_it(tmp_path: Path) -> None:
    (seconds,) = run(tmp_path, "waits")
    assert isinstance(seconds, float)
    assert 2 < seconds < 10


def test_a_wait_has_an_end(tmp_path: Path) -> None:
    raised, message = run(tmp_path, "waits too long")
    assert raised == "EngineDeadError"
    assert str(message).endswith("does not answer")


def test_a_rank_that_hangs_after_its_wait_is_not_waited_for_any_longer(tmp_path: Path) -> None:
    raised, message, soon = run(tmp_path, "hangs after a wait")
    assert raised == "EngineDeadError"
    assert str(message).endswith("does not answer")
    assert soon


def test_rank_0_that_fails_waits_for_nobody(tmp_path: Path) -> None:
    raised, lost = run(tmp_path, "failed")
    assert raised == "ValueError"
    assert lost == "rank 0 failed: ValueError: rank 0 cannot"
