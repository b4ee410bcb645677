"""Engines of the sim in real processes: elected, killed, stopped, told to leave, and what they say about it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from gms.journal import Journal
from tests.process.workers.slow_engine import OBEDIENT, hurry
from tests.support.processes import (
    RESTART_SECONDS,
    Process,
    gone,
    running,
    state_of,
    until,
    until_in_line,
    until_role,
)
from workers.contract import Role, WatchLine
from workers.ports import PortReservation

pytestmark = pytest.mark.process

INSTANCE = "test-instance"


DOOMED = """
import asyncio, signal, sys
from workers import factory
from workers.engines.sim import SimFault
from workers.logs import configure_logging
from workers.settings import EngineSettings

build = factory.build_engine

def build_doomed(settings, service, *, runtime_dir):
    engine = build(settings, service, runtime_dir=runtime_dir)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, engine.inject, SimFault.DEAD)
    return engine

factory.build_engine = build_doomed
configure_logging(form="console", level="info")
sys.exit(factory.run_engine_process(EngineSettings(keeper=False)))
"""
"""An engine that dies, without its process, on SIGUSR1."""


class Pair:
    """A memory service and engines of one pod, without a supervisor."""

    def __init__(self, run_dir: Path, ports: list[int], stack: contextlib.ExitStack) -> None:
        self.run_dir, self.stack = run_dir, stack
        self.serving, self.admin = ports[0], {"a": ports[1], "b": ports[2]}
        self.env = {
            "HOTSPARE_RUN_DIR": str(run_dir),
            "HOTSPARE_ENGINE": "sim",
            "HOTSPARE_INSTANCE": INSTANCE,
            "HOTSPARE_SERVING_PORT": str(self.serving),
            "HOTSPARE_HEARTBEAT_SECONDS": "0.2",
            "HOTSPARE_SIM_WEIGHTS_BYTES": "1048576",
            "HOTSPARE_SIM_KV_BYTES": "1048576",
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.serving}"

    def gms(self, *flags: str) -> Process:
        (self.run_dir / "pod-0").mkdir(mode=0o700, exist_ok=True)
        socket_path = self.run_dir / "pod-0" / "gms-cpu-0.sock"
        return self.stack.enter_context(
            running("gms", "gms", "--socket", str(socket_path), "--device", "cpu:0", *flags, log_dir=self.run_dir)
        )

    def engine(self, name: str, *flags: str, **env: str) -> Process:
        other = self.admin["b" if name == "a" else "a"]
        arguments = ["engine", "--engine-id", name, "--admin-port", str(self.admin[name])]
        arguments += ["--standby-admin-ports", str(other), *flags]
        return self.stack.enter_context(
            running(f"engine-{name}", "workers", *arguments, log_dir=self.run_dir, env={**self.env, **env})
        )

    def complete(self, prompt: str = "hello", n: int = 8) -> str:
        answer = httpx.post(
            f"{self.url}/v1/completions", json={"prompt": prompt, "max_tokens": n}, timeout=10, trust_env=False
        )
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(PortReservation("127.0.0.1")).port for _ in range(3)]
        yield Pair(tmp_path, ports, stack)


def test_a_killed_active_engine_is_followed_by_the_shadow(pair: Pair) -> None:
    pair.gms()
    pair.engine("a", HOTSPARE_SIM_RESTART_SECONDS=RESTART_SECONDS)
    first = until_role(pair.admin["a"], Role.ACTIVE)
    pair.engine("b")
    parked = until_in_line(pair.admin["b"])
    assert (first["epoch"], parked["epoch"]) == (1, 0)
    assert first["memory"]["weights_role"] == "writer"
    assert parked["memory"]["weights_role"] == "reader"
    assert (first["memory"]["kv_mapped"], parked["memory"]["kv_mapped"]) == (True, False)
    assert parked["memory"]["weights_outside_gms_bytes"] == first["memory"]["weights_outside_gms_bytes"] == 0
    before = pair.complete()

    os.kill(first["pid"], signal.SIGKILL)
    promoted = until_role(pair.admin["b"], Role.ACTIVE)
    assert promoted["epoch"] == 2
    assert promoted["pid"] == parked["pid"]
    assert pair.complete() == before
    moments = [promoted["promotion"][key] for key in ("granted", "epoch_written", "memory_mapped", "bound")]
    assert moments == sorted(moments)

    again = until_role(pair.admin["a"], Role.STANDBY)
    assert again["pid"] != first["pid"]
    assert again["keeper_pid"] == first["keeper_pid"]
    assert again["memory"]["weights_role"] == "reader"


def test_twenty_kills_in_a_row(pair: Pair) -> None:
    pair.gms()
    for name in pair.admin:
        pair.engine(name)
    text = None
    for epoch in range(1, 21):
        name, active = until(lambda: _active(pair), saying="an engine is active")
        assert active["epoch"] == epoch
        assert text in (None, pair.complete())
        text = pair.complete()
        until_role(pair.admin["b" if name == "a" else "a"], Role.STANDBY)
        os.kill(active["pid"], signal.SIGKILL)
        assert gone(active["pid"])


def _active(pair: Pair) -> tuple[str, dict[str, object]] | None:
    for name, port in pair.admin.items():
        state = state_of(port)
        if state and state["role"] == Role.ACTIVE:
            return name, state
    return None


def test_an_emptied_lock_file_costs_no_more_than_a_promotion(pair: Pair) -> None:
    pair.gms()
    for name in pair.admin:
        pair.engine(name)
    for epoch in range(1, 5):
        name, active = until(lambda: _active(pair), saying="an engine is active")
        assert active["epoch"] == epoch
        until_role(pair.admin["b" if name == "a" else "a"], Role.STANDBY)
        if epoch == 4:
            (pair.run_dir / "pod-0" / "active.lock").write_bytes(b"")
        os.kill(active["pid"], signal.SIGKILL)
        assert gone(active["pid"])
    _, active = until(lambda: _active(pair), saying="an engine is active")
    assert active["epoch"] == 5
    assert pair.complete()


def test_a_stopped_active_engine_is_killed_by_its_keeper(pair: Pair) -> None:
    pair.gms()
    pair.engine("a", HOTSPARE_BEAT_TIMEOUT_SECONDS="2.5", HOTSPARE_SIM_RESTART_SECONDS=RESTART_SECONDS)
    first = until_role(pair.admin["a"], Role.ACTIVE)
    pair.engine("b")
    until_in_line(pair.admin["b"])
    os.kill(first["pid"], signal.SIGSTOP)
    until_role(pair.admin["b"], Role.ACTIVE)
    assert gone(first["pid"])


def test_the_watch_says_what_happens(pair: Pair) -> None:
    pair.gms()
    a = pair.engine("a")
    until_role(pair.admin["a"], Role.ACTIVE)
    decoder = msgspec.json.Decoder(WatchLine)
    with httpx.stream("GET", f"{pair.url}/internal/watch", timeout=10, trust_env=False) as watch:
        assert watch.headers["content-type"] == "application/x-ndjson"
        lines = watch.iter_lines()
        first = decoder.decode(next(lines))
        assert (first.worker, first.instance, first.epoch, first.engine) == ("pod-0", INSTANCE, 1, "a")
        assert (first.state, first.standby, first.models, first.seq) == (Role.ACTIVE, None, ("sim",), 0)
        assert first.max_model_len == 131072
        pair.engine("b")
        spare = next(line for line in map(decoder.decode, lines) if line.standby is Role.STANDBY)
        assert spare.seq > first.seq
        until_in_line(pair.admin["b"])
        a.signal(signal.SIGTERM)
        rest = [decoder.decode(line) for line in lines]
        assert rest[-1].state is Role.HANDOVER
    assert a.wait() == 0
    until_role(pair.admin["b"], Role.ACTIVE)


def test_a_draining_engine_ends_its_streams_and_takes_no_new_requests(pair: Pair) -> None:
    pair.gms()
    a = pair.engine("a", HOTSPARE_ENGINE=OBEDIENT, HOTSPARE_SIM_TOKEN_SECONDS="0.02")
    until_role(pair.admin["a"], Role.ACTIVE)
    body = {"prompt": "a long story", "max_tokens": 1000, "stream": True}
    with httpx.stream("POST", f"{pair.url}/v1/completions", json=body, timeout=10, trust_env=False) as stream:
        lines = stream.iter_lines()
        next(lines)
        a.signal(signal.SIGTERM)
        until_role(pair.admin["a"], Role.DRAINING)
        refused = httpx.post(f"{pair.url}/v1/completions", json=body, timeout=10, trust_env=False)
        assert refused.status_code == 503
        assert refused.headers["x-hotspare-reselect"] == "1"
        assert refused.json()["error"]["code"] == "draining"
        hurry(pair.run_dir / "pod-0", "a")
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert a.wait() == 0


def test_an_engine_that_finds_itself_dead_ends_at_once_and_says_nothing_more(pair: Pair) -> None:
    pair.gms()
    env = {**pair.env, "HOTSPARE_ADMIN_PORT": str(pair.admin["a"]), "HOTSPARE_SIM_TOKEN_SECONDS": "0.05"}
    doomed = Process("doomed", [sys.executable, "-c", DOOMED], env=env, log=pair.run_dir / "doomed.log")
    pair.stack.callback(doomed.end)
    until_role(pair.admin["a"], Role.ACTIVE)
    pair.engine("b")
    until_in_line(pair.admin["b"])
    body = {"prompt": "a long story", "max_tokens": 1000, "stream": True}
    with httpx.stream("POST", f"{pair.url}/v1/completions", json=body, timeout=10, trust_env=False) as stream:
        lines = stream.iter_lines()
        next(lines)
        doomed.signal(signal.SIGUSR1)
        told = time.monotonic()
        said = []
        with pytest.raises(httpx.TransportError):
            said.extend(line for line in lines if line)
        assert time.monotonic() - told < 10  # the rest of the answer takes 50 s, an orderly end may take 30
    assert not [line for line in said if "error" in line or "[DONE]" in line]
    assert doomed.wait() == 1
    assert "cannot go on" in doomed.output()
    until_role(pair.admin["b"], Role.ACTIVE)


def test_over_its_capacity_an_engine_says_reselect(pair: Pair) -> None:
    pair.gms()
    pair.engine("a", "--capacity", "1", HOTSPARE_SIM_TOKEN_SECONDS="0.05")
    until_role(pair.admin["a"], Role.ACTIVE)
    body = {"prompt": "x", "max_tokens": 1000, "stream": True}
    with httpx.stream("POST", f"{pair.url}/v1/completions", json=body, timeout=10, trust_env=False) as stream:
        lines = stream.iter_lines()
        next(lines)
        refused = httpx.post(f"{pair.url}/v1/completions", json=body, timeout=10, trust_env=False)
        assert (refused.status_code, refused.headers["x-hotspare-reselect"]) == (503, "1")
    until(lambda: (state_of(pair.admin["a"]) or {}).get("inflight") == 0, saying="the abandoned request ended")
    assert pair.complete()


def test_the_lock_has_a_lower_descriptor_than_any_socket(pair: Pair) -> None:
    pair.gms()
    pair.engine("a")
    state = until_role(pair.admin["a"], Role.ACTIVE)
    descriptors = {}
    for entry in os.scandir(f"/proc/{state['pid']}/fd"):
        with contextlib.suppress(FileNotFoundError):
            descriptors[int(entry.name)] = os.readlink(entry.path)
    (lock,) = [fd for fd, target in descriptors.items() if target.endswith("active.lock")]
    sockets = [fd for fd, target in descriptors.items() if target.startswith("socket:")]
    assert sockets
    assert lock < min(sockets)


def test_an_engine_leaves_in_order_though_the_memory_service_is_gone(pair: Pair) -> None:
    gms = pair.gms()
    a = pair.engine("a")
    until_role(pair.admin["a"], Role.ACTIVE)
    gms.signal(signal.SIGKILL)
    gms.wait()
    assert pair.complete()  # the pages are mapped: the service is not needed to serve
    a.signal(signal.SIGTERM)
    assert a.wait() == 0
    assert "Traceback" not in a.output()


def test_an_engine_whose_weights_are_being_committed_when_the_service_dies_goes_on(pair: Pair) -> None:
    gms = pair.gms()
    state = pair.run_dir / "pod-0" / "gms-cpu-0.sock.state"
    a = pair.engine("a", "--no-keeper", HOTSPARE_SIM_WEIGHTS_BYTES=str(256 << 20))
    until(lambda: any(state.glob("*.b")), saying="the commit is noted, if not done")
    gms.signal(signal.SIGKILL)
    gms.wait()
    pair.gms()
    active = until_role(pair.admin["a"], Role.ACTIVE)
    assert (active["pid"], active["memory"]["weights_role"]) == (a.pid, "writer")
    assert active["memory"]["weights_outside_gms_bytes"] == 0
    pair.engine("b", HOTSPARE_SIM_WEIGHTS_BYTES=str(256 << 20))
    assert until_role(pair.admin["b"], Role.STANDBY)["memory"]["weights_role"] == "reader"
    assert pair.complete()


def test_engines_whose_weights_are_not_what_was_committed_end_and_the_next_writes_them_anew(pair: Pair) -> None:
    gms = pair.gms()
    a, b = pair.engine("a", "--no-keeper"), pair.engine("b", "--no-keeper")
    for name in pair.admin:
        until_role(pair.admin[name], Role.ACTIVE if name == active(pair) else Role.STANDBY)
    gms.signal(signal.SIGKILL)
    gms.wait()
    falsify_the_weights_digests(pair.run_dir / "pod-0" / "gms-cpu-0.sock.state")
    pair.gms()
    assert [a.wait(), b.wait()] == [75, 75]
    assert "is not what was committed" in a.output() + b.output()
    pair.engine("a")
    until_role(pair.admin["a"], Role.ACTIVE)
    assert pair.complete()


def active(pair: Pair) -> str:
    """The engine that serves, as soon as one does."""
    return until(
        lambda: next((n for n, p in pair.admin.items() if (s := state_of(p)) and s["role"] == Role.ACTIVE), None),
        saying="one engine is active",
    )


def falsify_the_weights_digests(folder: Path) -> None:
    """What memory that changed would look like: sealed pages cannot be changed, so the record of them is."""
    journal = Journal(folder)
    (record,) = [record for record in journal.load() if record.pool.startswith("weights/")]
    (kept,) = record.allocations
    wrong = msgspec.structs.replace(kept, digests=[bytes(len(digest)) for digest in kept.digests])
    journal.save(msgspec.structs.replace(record, allocations=[wrong]))


@pytest.mark.parametrize("limit", ["512KiB", "1536KiB"], ids=["weights", "kv"])
def test_memory_that_the_service_may_not_give_ends_the_start(pair: Pair, limit: str) -> None:
    pair.gms("--memory-limit", limit)
    a = pair.engine("a")
    assert a.wait() == 2
    assert "memory" in a.output()
    assert "Traceback" not in a.output()


def test_without_its_memory_service_an_engine_gives_up(pair: Pair) -> None:
    a = pair.engine("a", HOTSPARE_MEMORY_CONNECT_SECONDS="0.1")
    assert a.wait() == 75
    assert "gms-cpu-0.sock" in a.output()
    assert "Traceback" not in a.output()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--run-dir", "/proc/nowhere"], "cannot be made"),
        (["--serving-port", "99999"], "HOTSPARE_SERVING_PORT"),
        (["--engine", "tgi"], "HOTSPARE_ENGINE"),
        (["--no-such-flag"], "unrecognized arguments"),
        (["--run-dir", "/tmp/" + "x" * 100], "too long for Unix sockets"),
    ],
)
def test_bad_settings_are_one_sentence(pair: Pair, flags: list[str], sentence: str) -> None:
    engine = pair.engine("a", *flags)
    assert engine.wait() == 2
    assert sentence in engine.output()
    assert "Traceback" not in engine.output()


def test_a_taken_admin_port_is_said_with_its_holder(pair: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        engine = pair.engine("a", "--no-gms", "--admin-port", str(taken.getsockname()[1]))
        assert engine.wait() == 2
        assert f"process {os.getpid()}" in engine.output()


def test_a_taken_serving_port_rolls_the_promotion_back(pair: Pair) -> None:
    with contextlib.closing(socket.socket()) as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", pair.serving))
        taken.listen()
        engine = pair.engine("a", "--no-gms", HOTSPARE_BIND_TIMEOUT_SECONDS="0.05")
        until(lambda: "could not be promoted" in engine.output(), saying="the promotion was rolled back")
        assert f"process {os.getpid()}" in engine.output()
    state = until_role(pair.admin["a"], Role.ACTIVE)
    assert state["epoch"] > 1


def test_a_second_signal_ends_a_draining_engine_now(pair: Pair) -> None:
    pair.gms()
    a = pair.engine("a", "--no-keeper", "--shutdown-timeout-seconds", "60", HOTSPARE_SIM_TOKEN_SECONDS="0.05")
    until_role(pair.admin["a"], Role.ACTIVE)
    body = {"prompt": "x", "max_tokens": 1000, "stream": True}
    with httpx.stream("POST", f"{pair.url}/v1/completions", json=body, timeout=10, trust_env=False) as stream:
        lines = stream.iter_lines()
        next(lines)
        a.signal(signal.SIGTERM)
        until_role(pair.admin["a"], Role.DRAINING)
        a.signal(signal.SIGTERM)
        assert a.wait() == 70


def read_stream(pair: Pair, prompt: str, *, into: list[bytes]) -> None:
    body = {"prompt": prompt, "max_tokens": 9, "stream": True}
    with httpx.stream("POST", f"{pair.url}/v1/completions", json=body, timeout=10, trust_env=False) as answer:
        into.extend(answer.iter_raw())


@pytest.mark.parametrize(("setting", "made"), [("of nightshade", 0), ("of nightshade@3", 3)])
def test_poison_kills_whoever_runs_it_and_nobody_else(pair: Pair, setting: str, made: int) -> None:
    pair.gms()
    pair.engine("a", HOTSPARE_SIM_POISON_TEXT=setting)
    for _ in range(2):
        active = until_role(pair.admin["a"], Role.ACTIVE)
        pair.complete("a cup of tea")
        said: list[bytes] = []
        with pytest.raises(httpx.TransportError):
            read_stream(pair, "a cup of nightshade", into=said)
        assert b"".join(said).count(b"data: ") == made
        assert gone(active["pid"])
