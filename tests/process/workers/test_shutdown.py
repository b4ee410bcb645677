"""An engine that waits for its requests: the grace period, refusing, what is not waited for, what is cut in the end."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.process.workers.crews import Crew, crew
from tests.process.workers.slow_engine import OBEDIENT, hurry
from tests.support.processes import until, until_role
from workers.contract import HEADER_REQUEST_ID, Role, WatchLine

pytestmark = pytest.mark.process


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Crew]:
    with crew(tmp_path, "ab") as found:
        found.gms()
        found.env |= {"HOTSPARE_ENGINE": OBEDIENT, "HOTSPARE_SIM_TOKEN_SECONDS": "0.02", "HOTSPARE_KEEPER": "false"}
        yield found


@contextmanager
def stream(pair: Crew, tokens: int, path: str = "/v1/completions") -> Iterator[Iterator[str]]:
    asked = {"prompt": "secret"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "secret"}]}
    body = {**asked, "max_tokens": tokens, "stream": True}
    url, headers = f"http://127.0.0.1:{pair.serving}{path}", {HEADER_REQUEST_ID: f"id-{tokens}"}
    with httpx.stream("POST", url, json=body, headers=headers, timeout=40, trust_env=False) as answer:
        lines = answer.iter_lines()
        next(lines)
        yield lines


@contextmanager
def watch(pair: Crew) -> Iterator[Iterator[WatchLine]]:
    url = f"http://127.0.0.1:{pair.serving}/internal/watch"
    with httpx.stream("GET", url, timeout=40, trust_env=False) as answer:
        lines = map(msgspec.json.Decoder(WatchLine).decode, answer.iter_lines())
        next(lines)
        yield lines


def test_in_the_grace_period_latecomers_are_served_and_then_refused(alone: Crew) -> None:
    times = {"HOTSPARE_GRACE_PERIOD_SECONDS": "5", "HOTSPARE_SHUTDOWN_TIMEOUT_SECONDS": "60"}
    engine = alone.engine("a", **times)
    until_role(alone.admin["a"], Role.ACTIVE)
    with watch(alone) as lines, stream(alone, 1000) as running:
        began = time.monotonic()
        engine.signal(signal.SIGTERM)
        assert next(line for line in lines if line.state is not Role.ACTIVE).state is Role.DRAINING
        assert alone.complete()  # it has not heard of it
        until(lambda: _refused(alone), saying="new requests are refused")
        assert time.monotonic() - began >= 5
        state = alone.state("a") or {}
        assert (state["draining"]["phase"], state["draining"]["remaining"]) == ("waiting", {"completions": 1})
        assert alone.metric("a", 'hotspare_engine_draining_requests{route="completions"}') == 1
        hurry(alone.pod_dir, "a")
        assert [line for line in running if line][-1] == "data: [DONE]"
    assert engine.wait(seconds=10) == 0


def _refused(pair: Crew) -> bool:
    answer = httpx.post(
        f"http://127.0.0.1:{pair.serving}/v1/completions",
        json={"prompt": "x", "max_tokens": 1},
        timeout=20,
        trust_env=False,
    )
    return answer.status_code == 503 and answer.headers["x-hotspare-reselect"] == "1"


def test_without_anybody_who_watches_an_idle_engine_is_gone_at_once(alone: Crew) -> None:
    engine = alone.engine("a", HOTSPARE_GRACE_PERIOD_SECONDS="20")
    until_role(alone.admin["a"], Role.ACTIVE)
    engine.signal(signal.SIGTERM)
    assert engine.wait(seconds=10) == 0


def test_a_parked_engine_leaves_at_once(alone: Crew) -> None:
    active = alone.engine("a", HOTSPARE_GRACE_PERIOD_SECONDS="20")
    until_role(alone.admin["a"], Role.ACTIVE)
    spare = alone.engine("b", HOTSPARE_GRACE_PERIOD_SECONDS="20")
    alone.until_in_line("b")
    with watch(alone), stream(alone, 100):
        spare.signal(signal.SIGTERM)
        assert spare.wait(seconds=10) == 0
        assert active.popen.poll() is None


def test_what_is_left_in_the_end_is_cut_and_named(alone: Crew) -> None:
    times = {"HOTSPARE_GRACE_PERIOD_SECONDS": "0", "HOTSPARE_SHUTDOWN_TIMEOUT_SECONDS": "0.5"}
    engine = alone.engine("a", **times)
    until_role(alone.admin["a"], Role.ACTIVE)
    with stream(alone, 5000) as one, stream(alone, 5001) as other:
        engine.signal(signal.SIGTERM)
        for lines in (one, other):
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
    assert engine.wait(seconds=10) == 70
    said = engine.output()
    assert "2 requests did not end within the shutdown timeout of 0.5 s and are cut: id-5000 (/v1/completions, " in said
    assert "id-5001" in said
    assert "secret" not in said


def test_routes_that_are_not_waited_for_are_cut_and_others_are_not(alone: Crew) -> None:
    times = {"HOTSPARE_GRACE_PERIOD_SECONDS": "0", "HOTSPARE_GRACEFUL_SHUTDOWN_EXCEPT": "chat"}
    engine = alone.engine("a", **times)
    until_role(alone.admin["a"], Role.ACTIVE)
    with stream(alone, 1000) as waited_for:
        with stream(alone, 5000, "/v1/chat/completions") as cut:
            engine.signal(signal.SIGTERM)
            with pytest.raises(httpx.RemoteProtocolError):
                list(cut)
        hurry(alone.pod_dir, "a")
        assert [line for line in waited_for if line][-1] == "data: [DONE]"
    assert engine.wait(seconds=10) == 0


def test_an_engine_that_leaves_by_itself_has_not_been_told_before(alone: Crew) -> None:
    """Its lock file was replaced, so it drains; SIGTERM is the first signal then, and cuts nothing."""
    times = {"HOTSPARE_GRACE_PERIOD_SECONDS": "0", "HOTSPARE_HEALTH_CHECK_SECONDS": "0.1"}
    engine = alone.engine("a", HOTSPARE_DRAIN_MODE="wait", **times)
    until_role(alone.admin["a"], Role.ACTIVE)
    with stream(alone, 1000) as lines:
        lock = alone.pod_dir / "active.lock"
        lock.rename(alone.pod_dir / "old.lock")
        lock.touch()
        until_role(alone.admin["a"], Role.DRAINING)
        engine.signal(signal.SIGTERM)
        hurry(alone.pod_dir, "a")
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert engine.wait(seconds=10) == 0
    assert "to be replaced: " in engine.output()


def test_an_engine_without_a_keeper_removes_its_folder_and_what_one_that_was_killed_left(alone: Crew) -> None:
    folder = alone.pod_dir / "engine-a"
    engine = alone.engine("a")
    until_role(alone.admin["a"], Role.ACTIVE)
    (folder / "of a killed one").touch()
    engine.signal(signal.SIGKILL)
    engine.wait(seconds=10)
    engine = alone.engine("a")
    until_role(alone.admin["a"], Role.ACTIVE)
    assert list(folder.iterdir()) == []
    engine.signal(signal.SIGTERM)
    assert engine.wait(seconds=10) == 0
    assert not folder.exists()


HANGS = """
import asyncio, sys
from workers import factory
from workers.engines.sim.engine import SimEngine
from workers.logs import configure_logging
from workers.settings import EngineSettings

class HangingEngine(SimEngine):
    async def self_test(self):
        print("the test begins", flush=True)
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                pass

factory.build_engine = lambda settings, service, *, runtime_dir: HangingEngine(settings, service, runtime_dir)
configure_logging(form="console", level="info")
sys.exit(factory.run_engine_process(EngineSettings()))
"""


def test_a_first_self_test_that_hangs_does_not_hold_up_a_shutdown(alone: Crew) -> None:
    engine = alone.script("a", HANGS, HOTSPARE_SELF_TEST_TIMEOUT_SECONDS="600")
    until(lambda: "the test begins" in engine.output(), saying="the self-test runs")
    engine.signal(signal.SIGTERM)
    assert engine.wait(seconds=10) == 1
    assert "the self-test that was interrupted was not over in 2 s: it hangs" in engine.output()
