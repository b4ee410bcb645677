"""A real keeper that forks real (small) engines: killed, stopped, hung, crashing, told to leave."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import gone

pytestmark = pytest.mark.process

END_SECONDS = 60.0
"""How long an engine that has much to give back may take for it."""

KEEPER = """
import errno, os, signal, sys, time
from pathlib import Path
from workers.contract import Role
from workers.heartbeat import Beat, encode_beat
from workers.keeper import Keeper, KeeperTimeouts
from workers.logs import configure_logging

behaviour, runtime_dir = sys.argv[1], Path(sys.argv[2])
if behaviour == "no room":  # for two processes, and then for a descriptor
    fork, pidfd_open, refused = os.fork, os.pidfd_open, []

    def fork_later():
        if len(refused) < 2:
            refused.append(1)
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return fork()

    def open_later(pid, flags=0):
        if len(refused) < 3:
            refused.append(1)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return pidfd_open(pid, flags)

    os.fork, os.pidfd_open = fork_later, open_later
elif behaviour == "no process":
    def never():
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    os.fork = never
configure_logging(form="console", level="info")

def engine(fd, restarts):
    print("fork", restarts, "forked as", os.getpid(), flush=True)
    if behaviour == "crash":
        return 1
    if behaviour == "misconfigured":
        return 2
    if behaviour == "no-memory":
        return 75
    if behaviour == "failing":  # says FAILED for a while, as an engine whose shutdown takes its time
        for _ in range(5):
            os.write(fd, encode_beat(Beat(0, False, Role.FAILED)))
            time.sleep(0.02)
        return 1
    if behaviour == "leaves writers" and not restarts:
        for _ in range(3):
            if os.fork() == 0:
                until = time.monotonic() + 1
                while time.monotonic() < until:
                    try:
                        os.makedirs(runtime_dir / f"{os.getpid()}-{time.monotonic_ns()}")
                    except OSError:
                        pass
                os._exit(0)
        time.sleep(0.2)
        return 1
    left = []
    signal.signal(signal.SIGTERM, lambda *_: left.append(1))
    steps = 0
    while not left or behaviour == "stubborn":
        if behaviour != "hang" or steps < 3:
            stuck_in_step = behaviour == "no-step"
            os.write(fd, encode_beat(Beat(1 if stuck_in_step else steps, stuck_in_step, Role.STANDBY)))
        steps += 1
        time.sleep(0.02)
        if behaviour == "ready and dead" and steps == 5:
            return 1
        if steps == 3:
            (runtime_dir / "socket").touch()
            print("ready", flush=True)
    if behaviour == "slow end":  # its loop is over, and it has much to give back
        time.sleep(3.5)
    if behaviour == "no end":
        signal.pause()
    return 0

end = float(sys.argv[3]) if behaviour == "slow end" else 1.0
beat = {"hang": 0.5, "leaves writers": 8.0}.get(behaviour, 2.5)
sys.exit(Keeper(
    name="engine a", engine_main=engine, runtime_dir=runtime_dir,
    timeouts=KeeperTimeouts(beat=beat, init_beat=9.0, step=0.7, end=end),
).run())
"""


class Kept:
    """A keeper in a process of its own, and the lines it and its engines print."""

    def __init__(self, behaviour: str, runtime_dir: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", KEEPER, behaviour, str(runtime_dir), str(END_SECONDS)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
        )
        self._rest = b""
        self.seen: list[str] = []

    def line(self, start: str, *, timeout: float = 15.0) -> str:
        """The next line that contains ``start``."""
        assert self.process.stdout
        deadline = time.monotonic() + timeout
        while True:
            while b"\n" in self._rest:
                raw, self._rest = self._rest.split(b"\n", 1)
                self.seen.append(raw.decode())
                if start in self.seen[-1]:
                    return self.seen[-1]
            left = deadline - time.monotonic()
            assert left > 0, f"no line with {start!r} in {self.seen}"
            if select.select([self.process.stdout], [], [], left)[0]:
                data = os.read(self.process.stdout.fileno(), 65536)
                assert data, f"the keeper ended; no line with {start!r} in {self.seen}"
                self._rest += data

    def engine(self) -> int:
        return int(self.line("forked as ").split()[-1])

    def rest(self, *, timeout: float = 15.0) -> str:
        return self.process.communicate(timeout=timeout)[0].decode()


@pytest.fixture
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Kept]:
    kept = Kept(request.param, tmp_path / "engine-a")
    yield kept
    kept.process.kill()
    kept.process.wait()
    assert kept.process.stdout
    kept.process.stdout.close()


@pytest.mark.parametrize("kept", ["good"], indirect=True)
def test_a_killed_engine_is_forked_again_at_once(kept: Kept, tmp_path: Path) -> None:
    first = kept.engine()
    assert kept.seen[-1].startswith("fork 0 ")
    kept.line("ready")
    os.kill(first, signal.SIGKILL)
    assert kept.line("killed by SIGKILL").endswith("forking the next one")  # without "in ... s"
    second = kept.engine()
    assert kept.seen[-1].startswith("fork 1 ")
    assert second != first
    kept.line("ready")
    kept.process.send_signal(signal.SIGTERM)
    assert kept.process.wait(20) == 0
    assert gone(second)
    assert not (tmp_path / "engine-a").exists()


@pytest.mark.parametrize(
    ("kept", "reason"), [("hang", "no sign of life"), ("no-step", "made no step")], indirect=["kept"]
)
def test_a_stuck_engine_is_killed_and_replaced(kept: Kept, reason: str) -> None:
    first = kept.engine()
    kept.line("killing the engine")
    assert reason in kept.seen[-1]
    assert kept.engine() != first
    assert gone(first)


@pytest.mark.parametrize("kept", ["good"], indirect=True)
def test_a_stopped_engine_is_killed_and_replaced(kept: Kept) -> None:
    first = kept.engine()
    kept.line("ready")
    os.kill(first, signal.SIGSTOP)
    kept.line("no sign of life")
    assert kept.engine() != first
    assert gone(first)


@pytest.mark.parametrize("kept", ["slow end"], indirect=True)
def test_a_stopped_engine_that_is_told_to_stop_has_no_time_to_clean_up(kept: Kept) -> None:
    first = kept.engine()
    kept.line("ready")
    os.kill(first, signal.SIGSTOP)
    told = time.monotonic()
    kept.process.send_signal(signal.SIGTERM)
    kept.line("no sign of life")
    assert kept.process.wait(30) == 70
    assert time.monotonic() - told < END_SECONDS / 2
    assert gone(first)


@pytest.mark.parametrize(("kept", "code"), [("crash", 1), ("failing", 1), ("no-memory", 75)], indirect=["kept"])
def test_a_crash_loop_backs_off_and_gives_up(kept: Kept, code: int) -> None:
    output = kept.rest(timeout=30)
    assert kept.process.returncode == code
    lines = output.splitlines()
    assert sum("forked as " in line for line in lines) == 5
    assert "forking the next one in" in output
    assert "giving up" in lines[-1]


@pytest.mark.parametrize("kept", ["ready and dead"], indirect=True)
def test_one_that_dies_again_and_again_as_soon_as_it_is_ready_is_not_forked_without_a_pause(kept: Kept) -> None:
    assert kept.engine()
    assert kept.line("forking the next one").endswith("forking the next one")
    kept.line("forking the next one in 0.5 s")
    kept.line("forking the next one in 1 s")
    assert kept.process.poll() is None


@pytest.mark.parametrize("kept", ["misconfigured"], indirect=True)
def test_bad_configuration_is_not_tried_again(kept: Kept) -> None:
    output = kept.rest()
    assert kept.process.returncode == 2
    assert output.count("forked as ") == 1


@pytest.mark.parametrize("kept", ["slow end"], indirect=True)
def test_an_engine_that_was_told_to_stop_may_be_silent_for_longer(kept: Kept) -> None:
    engine = kept.engine()
    kept.line("ready")
    kept.process.send_signal(signal.SIGTERM)
    assert "killing" not in kept.rest()
    assert kept.process.returncode == 0
    assert gone(engine)


@pytest.mark.parametrize("kept", ["no end"], indirect=True)
def test_and_not_for_ever(kept: Kept) -> None:
    engine = kept.engine()
    kept.line("ready")
    kept.process.send_signal(signal.SIGTERM)
    assert "it was told to stop, fell silent, and did not end in its time" in kept.rest()
    assert kept.process.returncode == 70
    assert gone(engine)


@pytest.mark.parametrize("kept", ["stubborn"], indirect=True)
def test_a_second_signal_ends_it_now(kept: Kept) -> None:
    engine = kept.engine()
    kept.line("ready")
    kept.process.send_signal(signal.SIGTERM)
    kept.process.send_signal(signal.SIGINT)
    assert kept.process.wait(20) == 70
    assert gone(engine)


@pytest.mark.parametrize("kept", ["good"], indirect=True)
def test_a_killed_keeper_takes_its_engine_along(kept: Kept) -> None:
    engine = kept.engine()
    kept.line("ready")
    kept.process.kill()
    assert gone(engine)


@pytest.mark.parametrize("kept", ["leaves writers"], indirect=True)
def test_children_that_still_write_into_the_folder_keep_no_engine_from_following(kept: Kept) -> None:
    first = kept.engine()
    second = kept.engine()
    assert second != first
    kept.line("ready")
    kept.process.send_signal(signal.SIGTERM)
    assert kept.process.wait(20) == 0


@pytest.mark.parametrize("kept", ["no room"], indirect=True)
def test_a_machine_without_room_for_a_process_is_asked_again(kept: Kept) -> None:
    kept.line("no engine can be forked, tried again in 0.25 s: Resource temporarily unavailable")
    kept.line("no engine can be forked, tried again in 0.5 s: Resource temporarily unavailable")
    kept.line("no engine can be forked, tried again in 1 s: Too many open files")
    engine = kept.engine()
    kept.line("ready")
    kept.process.send_signal(signal.SIGTERM)  # which is not blocked after a fork that failed
    assert kept.process.wait(20) == 0
    assert gone(engine)


@pytest.mark.parametrize("kept", ["no process"], indirect=True)
def test_one_that_is_told_to_stop_meanwhile_does(kept: Kept) -> None:
    kept.line("tried again in 0.5 s")
    kept.process.send_signal(signal.SIGTERM)
    assert kept.process.wait(20) == 0
