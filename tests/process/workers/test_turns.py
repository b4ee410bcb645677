"""Who is next: the kernel serves waiters for the lock in the order in which they came, and so do engines."""

from __future__ import annotations

import itertools
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.workers.crews import crew
from tests.support.processes import DEADLINE_SECONDS, until, until_role, waiters

pytestmark = pytest.mark.process

WAITER = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(fd, fcntl.LOCK_EX)
print("mine", flush=True)
sys.stdin.readline()
"""


def said_so(line: list[subprocess.Popen[str]], *, seconds: float) -> list[subprocess.Popen[str]]:
    """Those of the living who have said something that nobody has read."""
    living = {waiter.stdout: waiter for waiter in line if waiter.returncode is None}
    readable, _, _ = select.select(list(living), [], [], seconds)
    return [living[stream] for stream in readable]


def test_the_kernel_serves_waiters_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    """Half of them give up by dying in between: the order of the rest is what it was."""
    path = tmp_path / "lock"
    path.touch()
    line: list[subprocess.Popen[str]] = []
    try:
        for at in range(9):
            waiter = subprocess.Popen(
                [sys.executable, "-c", WAITER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            line.append(waiter)
            if at == 0:
                assert waiter.stdout is not None
                assert waiter.stdout.readline() == "mine\n"
            else:
                until(lambda pid=waiter.pid: pid in waiters(), saying="it waits in the kernel")
        for waiter in line[1:8:3]:
            waiter.kill()
            waiter.wait()
            # Whoever stood behind it has to run to get in line again, and another one must not die meanwhile.
            living = {other.pid for other in line[1:] if other.returncode is None}
            until(lambda living=living: living <= waiters(), saying="all others wait in the kernel")
        left = [line[at] for at in (0, 2, 3, 5, 6, 8)]
        for holder, following in itertools.pairwise(left):
            holder.kill()
            holder.wait()
            assert said_so(left, seconds=DEADLINE_SECONDS) == [following]
            assert following.stdout is not None
            assert following.stdout.readline() == "mine\n"
            assert said_so(left, seconds=0) == []
    finally:
        for waiter in line:
            waiter.kill()
            waiter.wait()
            for stream in (waiter.stdin, waiter.stdout):
                assert stream is not None
                stream.close()


def test_three_engines_have_their_turns_and_the_weights_are_there_once(tmp_path: Path) -> None:
    """Under a memory limit with room for weights and KV pages once, and for neither of them twice."""
    with crew(tmp_path, "abc") as three:
        three.gms("--memory-limit", "2560KiB")
        for name in "abc":
            three.engine(name)
            if name == "a":
                until_role(three.admin["a"], "ACTIVE")
            else:
                three.until_in_line(name)
        text, said = three.complete(), []
        for epoch in range(1, 8):
            active = three.until_active()
            said.append(active["engine"])
            assert (active["epoch"], three.complete()) == (epoch, text)
            for name in "abc":
                if name != active["engine"]:
                    state = three.until_in_line(name)
                    assert state["memory"]["weights_outside_gms_bytes"] == 0
                    assert state["memory"]["kv_mapped"] is False
            os.kill(active["pid"], signal.SIGKILL)
        assert "".join(said) == "abcabca"


def test_an_engine_that_failed_to_promote_goes_to_the_back_of_the_line(tmp_path: Path) -> None:
    with crew(tmp_path, "abc") as three:
        three.gms()
        three.engine("a")
        first = until_role(three.admin["a"], "ACTIVE")
        b = three.breakable("b")
        three.until_in_line("b")
        three.engine("c")
        three.until_in_line("c")
        three.break_("wake")
        os.kill(first["pid"], signal.SIGKILL)
        second = until_role(three.admin["c"], "ACTIVE")
        assert "engine b could not be promoted" in b.output()
        # a came back before b had waited its time, and stands before it or behind it; c is behind both.
        three.until_in_line("a")
        three.until_in_line("b")
        three.mend("wake")
        os.kill(second["pid"], signal.SIGKILL)
        third = three.until_active()
        assert third["engine"] in "ab"
        three.until_in_line("c")
        os.kill(third["pid"], signal.SIGKILL)
        fourth = three.until_active()
        assert {third["engine"], fourth["engine"]} == {"a", "b"}
