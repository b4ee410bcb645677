"""Real engines with real faults, active and parked: each is found, said, and replaced."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.process.workers.test_engine_life import Pair
from tests.support.processes import RESTART_SECONDS, Process, gone, until, until_in_line, until_role
from workers.contract import HEADER_REQUEST_ID, HEADER_STREAM, Role
from workers.ports import PortReservation

pytestmark = pytest.mark.process

FAULTY = """
import asyncio, os, resource, signal, sys, threading
from gms import libc
from workers import factory
from workers.engines.sim import SimFault
from workers.logs import configure_logging
from workers.settings import EngineSettings

build, kept = factory.build_engine, []
ANONYMOUS = libc.MAP_PRIVATE | libc.MAP_ANONYMOUS | libc.MAP_FIXED

def build_faulty(settings, service, *, runtime_dir):
    engine = build(settings, service, runtime_dir=runtime_dir)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, break_it, engine, settings)
    return engine

def break_it(engine, settings):
    kind = (settings.run_dir / "fault").read_text()
    weights, kv = engine._weights._memory, engine._kv._pages
    match kind:
        case "unmapped":
            libc.mmap(weights._range.address, libc.PAGE_BYTES, libc.PROT_NONE, ANONYMOUS)
        case "other pages":
            libc.mmap(weights._range.address + libc.PAGE_BYTES, libc.PAGE_BYTES, libc.PROT_READ, ANONYMOUS)
        case "other content":
            rotation = weights._rotation
            rotation._digests = (b"x" * 16, *rotation._digests[1:])
        case "kv not free":
            libc.mmap(kv.range.address, libc.PAGE_BYTES, libc.PROT_READ, ANONYMOUS)
        case "no custodian":
            weights._custody.close()
        case "test hangs":
            engine.self_test = asyncio.Event().wait
        case "descriptors":
            soft = len(os.listdir("/proc/self/fd")) + 32
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            kept.extend(os.dup(0) for _ in range(28))
        case "threads":
            for _ in range(260):
                threading.Thread(target=threading.Event().wait, daemon=True).start()
        case fault:
            engine.inject(SimFault(fault))

factory.build_engine = build_faulty
configure_logging(form="console", level="info")
sys.exit(factory.run_engine_process(EngineSettings()))
"""
"""An engine under its keeper that breaks on SIGUSR1, in the way that a file names."""


class FaultyPair(Pair):
    def start(self) -> None:
        self.gms()
        for name in self.admin:
            other = self.admin["b" if name == "a" else "a"]
            settings = {
                "HOTSPARE_ENGINE_ID": name,
                "HOTSPARE_ADMIN_PORT": str(self.admin[name]),
                "HOTSPARE_STANDBY_ADMIN_PORTS": str(other),
                "HOTSPARE_SELF_TEST_SECONDS": "0.2",
                "HOTSPARE_SELF_TEST_TIMEOUT_SECONDS": "3",
                "HOTSPARE_HEALTH_CHECK_SECONDS": "0.2",
                "HOTSPARE_BEAT_TIMEOUT_SECONDS": "2.5",
                "HOTSPARE_STEP_TIMEOUT_SECONDS": "3.5",
                "HOTSPARE_TOKEN_TIMEOUT_SECONDS": "5",
                "HOTSPARE_PRIVATE_MEMORY_LIMIT_BYTES": str(160 << 20),
                "HOTSPARE_DRAIN_TIMEOUT_SECONDS": "0.5",
                "HOTSPARE_SIM_TOKEN_SECONDS": "0.02",
                "HOTSPARE_SIM_RESTART_SECONDS": RESTART_SECONDS,
            }
            log = self.run_dir / f"faulty-{name}.log"
            process = Process(name, [sys.executable, "-c", FAULTY], env={**self.env, **settings}, log=log)
            self.stack.callback(process.end)
            until_role(self.admin[name], Role.ACTIVE if name == "a" else Role.STANDBY)

    def find(self, role: Role) -> tuple[str, dict[str, Any]]:
        """The engine that is ``role``, once there is one."""

        def look() -> tuple[str, dict[str, Any]] | None:
            for name, port in self.admin.items():
                with contextlib.suppress(httpx.HTTPError):
                    state = httpx.get(f"http://127.0.0.1:{port}/state", timeout=2, trust_env=False).json()
                    if state["role"] == role:
                        return name, state
            return None

        return until(look, saying=f"an engine is {role}")

    def break_engine(self, role: Role, fault: str) -> tuple[str, int]:
        """Returns which one, and its pid."""
        name, state = self.find(role)
        (self.run_dir / "fault").write_text(fault)
        pid: int = state["pid"]
        os.kill(pid, signal.SIGUSR1)
        return name, pid

    def said(self, name: str, words: str) -> None:
        log = self.run_dir / f"faulty-{name}.log"
        until(lambda: words in log.read_text(), saying=f"{words!r} in the log of engine {name}")

    def stream(self) -> threading.Thread:
        """A long answer from whoever is active now, until it is cut."""

        def read() -> None:
            body = {"prompt": "hello", "max_tokens": 100_000, "stream": True}
            headers = {HEADER_REQUEST_ID: "a", HEADER_STREAM: "1"}  # another engine can go on with it
            url = f"{self.url}/v1/completions"
            with (
                contextlib.suppress(httpx.HTTPError),
                httpx.stream("POST", url, json=body, headers=headers, timeout=30, trust_env=False) as answer,
            ):
                for _ in answer.iter_bytes():
                    begun.set()

        begun = threading.Event()
        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        assert begun.wait(20)
        return thread


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyPair]:
    with started(tmp_path_factory.mktemp("faulty")) as made:
        yield made


@contextlib.contextmanager
def started(folder: Path) -> Iterator[FaultyPair]:
    folder.chmod(0o700)
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(PortReservation("127.0.0.1")).port for _ in range(3)]
        pair = FaultyPair(folder, ports, stack)
        pair.start()
        yield pair


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("unmapped", "its weights are not mapped as they were"),
        ("other pages", "has the access r--p, and should have r--s"),
        ("other content", "is not what was committed"),
        ("kv not free", "the addresses of its KV cache are not free"),
        ("no custodian", "nobody watches over weights/"),
        ("test hangs", "it hangs"),
        ("descriptors", "open descriptors of at most"),
        ("threads", "threads, and had"),
        ("dead", "a fault was injected: dead"),
    ],
)
def test_a_parked_engine_that_is_broken_is_found_and_replaced(pair: FaultyPair, fault: str, said: str) -> None:
    _, serving = pair.find(Role.ACTIVE)
    name, pid = pair.break_engine(Role.STANDBY, fault)
    assert gone(pid, within=20)
    pair.said(name, said)
    again, state = pair.find(Role.STANDBY)
    assert (again, state["pid"] != pid) == (name, True)
    assert pair.find(Role.ACTIVE)[1]["pid"] == serving["pid"]
    pair.complete()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("hang_loop", "its event loop gave no sign of life"),
        ("spin_loop", "its event loop gave no sign of life"),
        ("stall_steps", "it has requests and made no step"),
        ("livelock", "has got a token further"),
        ("leak", "leaves, to be replaced: it has"),
        ("descriptors", "leaves, to be replaced: it has"),
    ],
)
def test_an_active_engine_that_is_broken_is_found_and_replaced(pair: FaultyPair, fault: str, said: str) -> None:
    _, before = pair.find(Role.ACTIVE)
    until_in_line(pair.admin[pair.find(Role.STANDBY)[0]])
    stream = pair.stream()
    name, pid = pair.break_engine(Role.ACTIVE, fault)
    assert gone(pid, within=20)
    pair.said(name, said)
    other, promoted = pair.find(Role.ACTIVE)
    assert (other != name, promoted["epoch"]) == (True, before["epoch"] + 1)
    assert pair.find(Role.STANDBY)[0] == name
    pair.complete()
    stream.join(20)


def test_a_lock_file_that_was_replaced_ends_with_all_engines_at_the_new_one(tmp_path: Path) -> None:
    with started(tmp_path) as pair:
        path = pair.run_dir / "pod-0" / "active.lock"
        before = path.stat().st_ino
        held = path.open()  # so that its number is not given to the next
        path.unlink()
        path.touch(0o600)
        assert path.stat().st_ino != before
        held.close()

        def at_the_new_one() -> bool:
            pids = [pair.find(role)[1]["pid"] for role in (Role.ACTIVE, Role.STANDBY)]
            return all(path.stat().st_ino in _inodes(pid) for pid in pids)

        until(at_the_new_one, saying="both engines have the new lock file open")
        pair.complete()


def _inodes(pid: int) -> set[int]:
    found = set()
    with contextlib.suppress(OSError):  # it, or one of its descriptors, is gone meanwhile
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            found.add(entry.stat().st_ino)
    return found
