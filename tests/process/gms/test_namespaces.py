"""Containers of a pod: the service and its clients each in a PID namespace of its own, where no pid means anything.

Whether a process is gone is told by its pidfd there, and by the lock on its lease file after a restart.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gms.client import GmsError, LeaseMode, PoolStatus
from tests.process.gms.bench import Agent, Bench, Device
from tests.process.gms.processes import Process, until

UNSHARE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


def refused() -> str:
    """Why this machine cannot; empty if it can."""
    try:
        done = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, timeout=10, check=False)
    except FileNotFoundError:
        return "there is no unshare command; install util-linux"
    return done.stderr.strip() if done.returncode else ""


pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(bool(reason := refused()), reason=f"PID namespaces cannot be made here: {reason}"),
]


def apart(arguments: list[str]) -> list[str]:
    """The same in a namespace of its own; what is started is a parent that waits for it and takes it along."""
    command = json.dumps([*UNSHARE, sys.executable, *arguments])
    return ["-c", f"import os; command = {command}; os.execvp(command[0], command)"]


def inner(process: Process) -> int:
    """The process in the namespace, by the pid that it has here."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    until(children.read_text, "it is started")
    return int(children.read_text())


class Containers(Bench):
    """Everyone lives apart: the service, each agent, and this process."""

    def start(self, *flags: str, **settings: object) -> Process:
        return super().start(*flags, wrap=apart, **settings)

    def container(self, engine: str) -> Agent:
        return self.agent(engine, wrap=apart)

    def signal_service(self, number: signal.Signals) -> None:
        os.kill(inner(self.service), number)

    def kill_service(self) -> None:
        self.signal_service(signal.SIGKILL)
        self.service.wait()


@pytest.fixture
def bench(device: Device) -> Iterator[Containers]:
    with Containers(device) as made:
        yield made


def kill(agent: Agent) -> None:
    os.kill(inner(agent.process), signal.SIGKILL)
    agent.process.wait()


def test_no_pid_is_known_on_either_side(bench: Containers) -> None:
    agent = bench.container("a")
    agent.hold_kv(1)
    with bench.connect() as client:
        (lease,) = client.status().pools[0].leases
        assert (lease.engine, lease.pid) == ("a", None)
        assert client.status().bytes_by_owner == {"engine a": bench.device.unit}
    namespaces = {os.readlink(f"/proc/{pid}/ns/pid") for pid in (inner(agent.process), inner(bench.service), "self")}
    assert len(namespaces) == 3


def test_a_killed_holders_pages_go_to_the_next_by_its_pidfd(bench: Containers) -> None:
    old, new = bench.container("a"), bench.container("b")
    old.hold_kv(1)
    old.write_kv("hello")
    new.ask("attach", pool="kv", mode="rw", epoch=2)
    waiting = bench.until_pool("kv", lambda pool: pool.waiting == 1)
    assert waiting.waits[0].startswith(
        "engine b, epoch 2, waits for kv as rw, because nothing proves yet that its last holder is gone (engine a); "
    )
    kill(old)
    assert new.answer()["fresh"] is False
    new.do("export", pool="kv", tag="pages")
    new.do("map", pool="kv", tag="pages", writable=True)
    assert new.kv(5) == "hello"


def test_a_container_that_ends_takes_its_engine_along(bench: Containers) -> None:
    """The first process of a namespace dies, and with it all others."""
    old, new = bench.container("a"), bench.container("b")
    old.hold_kv(1)
    old.process.kill()  # the parent outside, which has the kernel kill its child
    lease, created = new.hold_kv(2)
    assert (lease["fresh"], created) == (False, False)


def test_a_closed_connection_is_no_proof(bench: Containers) -> None:
    old, new = bench.container("a"), bench.container("b")
    old.hold_kv(1)
    old.write_kv("hello")
    old.do("disconnect")
    lease, created = new.hold_kv(2, timeout_seconds=0.02)
    assert (lease["fresh"], created) == (True, True)
    assert new.kv(5) != "hello"
    bench.until_pool("kv", lambda pool: pool.orphaned_bytes == bench.device.unit)
    kill(old)
    bench.until_pool("kv", lambda pool: pool.orphaned_bytes == 0)


def test_a_dead_writer_is_followed_by_the_next(bench: Containers) -> None:
    writer, heir = bench.container("a"), bench.container("b")
    writer.do("attach", pool="weights/w", mode="rw_or_ro")
    writer.do("allocate", pool="weights/w", tag="w", size_bytes=1)
    heir.ask("attach", pool="weights/w", mode="rw_or_ro")
    bench.until_pool("weights/w", lambda pool: pool.waiting == 1)
    kill(writer)
    assert heir.answer()["mode"] == "rw"
    bench.until_pool("weights/w", lambda pool: pool.bytes == 0)


def test_pages_are_handed_back_after_the_services_death(bench: Containers) -> None:
    """This process holds them; a service in yet another namespace takes them back, and hands them on."""
    agent = bench.container("b")
    generation = agent.write_weights("weights/w", "of a model")
    with bench.connect("a") as client:
        kv = client.attach("kv", LeaseMode.RW, epoch=1)
        weights = client.attach("weights/w", LeaseMode.RO)
        with kv.allocate("pages", 1) as kv_pages, weights.export("w") as pages:
            bench.kill_service()
            bench.start()
            assert {pool.state for pool in status(bench)} == {"ADOPTING"}
            with bench.connect("a") as again:
                held = again.adopt("kv", generation=kv.generation, mode=LeaseMode.RW, epoch=1, allocations=[kv_pages])
                again.adopt("weights/w", generation=generation, mode=LeaseMode.RO, epoch=0, allocations=[pages])
                assert {pool.name: pool.state for pool in status(bench)} == {"kv": "WRITING", "weights/w": "READ"}
                new = bench.container("c")
                assert new.do("attach", pool="weights/w", mode="rw_or_ro")["generation"] == generation
                assert new.read_weights("weights/w", 10) == "of a model"
                new.ask("attach", pool="kv", mode="rw", epoch=2)
                bench.until_pool("kv", lambda pool: pool.waiting == 1)  # this process lives, and so has them still
                held.release(quiesced=True)
                assert new.answer()["fresh"] is False


def status(bench: Bench) -> list[PoolStatus]:
    with bench.connect("status") as client:
        return client.status().pools


def test_nothing_is_waited_for_when_the_holder_died_with_the_service(bench: Containers) -> None:
    """Its lease file is free: the kernel says so across namespaces, and no pid could."""
    old = bench.container("a")
    old.hold_kv(1)
    kill(old)
    bench.kill_service()
    bench.start()
    lease, created = bench.container("b").hold_kv(2, timeout_seconds=0)
    assert (lease["fresh"], created) == (True, True)


def test_an_older_epoch_is_refused_by_the_next_service_too(bench: Containers) -> None:
    old = bench.container("a")
    old.hold_kv(5)
    kill(old)
    bench.kill_service()
    bench.start()
    with pytest.raises(GmsError, match="has seen epoch 5") as caught:
        bench.container("b").hold_kv(4)
    assert caught.value.code == "stale_epoch"
