"""Answers whose engine is killed, through the gateway: SIGKILL, a promotion, and the rest of the answer.

The rows of docs/resume.md with a real kill. Each answer is asked for twice, once without a kill, and must be the same
byte for byte but for its ids and its time (and for how tokens share events: ``resuming.difference``). With
HOTSPARE_TEST_LONG=1 (``make test-long``) an engine is killed after every event.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import msgspec
import pytest
from openai import OpenAI

from tests.engine.killing import DEADLINE_SECONDS, Engine, Fleet, Moment, after_events, after_tokens, alike
from tests.engine.vllm.resume_rows import CHAT, MESSAGES, RESPONSES, ROWS
from tests.engine.vllm.resuming import difference, same_document
from tests.support.machine import Machine
from tests.support.processes import gone, until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.process,
    pytest.mark.sdk,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:connect:DeprecationWarning"),  # how the openai package opens a WebSocket
]

TRIES = 6
"""An answer may be over before its kill arrives, once in a while; on a busy machine more often."""

OF_ROW = {row.name: row.request() for row in ROWS}


def _chat(text: str = "Tell me a story about a cat.", **more: Any) -> dict[str, Any]:
    body = {"model": "smollm2", "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 24}
    return {**body, "stream": True, **more}


_USAGE = {"include_usage": True, "continuous_usage_stats": True}
STREAMS: dict[str, tuple[str, dict[str, Any], Moment]] = {
    "in_decode": (CHAT, _chat(), after_events(5)),
    "at_the_last_token": (CHAT, _chat(max_tokens=8, ignore_eos=True, stream_options=_USAGE), after_tokens(7)),
    "n2_seeded": (CHAT, {**OF_ROW["n2_seeded"], "max_tokens": 16, "ignore_eos": True}, after_events(6)),
    "json_schema": (CHAT, OF_ROW["json_schema"], after_events(4)),
}
if os.environ.get("HOTSPARE_TEST_LONG") == "1":
    STREAMS |= {f"after_event_{count}": (CHAT, _chat(ignore_eos=True), after_events(count)) for count in range(1, 25)}
STREAMS_OF_TWO_PODS: dict[str, tuple[str, dict[str, Any], Moment]] = {
    "responses": (RESPONSES, {**OF_ROW["responses"], "max_output_tokens": 24}, after_events(8)),
    "messages": (MESSAGES, {**OF_ROW["messages"], "max_tokens": 24}, after_events(6)),
}


def start(tmp_path_factory: pytest.TempPathFactory, name: str, *flags: str, **env: str) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp(name)
    # A request that waits for another one's end and for an engine's start has time, on a busy machine, too.
    settings = {**env, "HOTSPARE_LOG_FORMAT": "json", "HOTSPARE_WAIT_FOR_WORKER_SECONDS": str(DEADLINE_SECONDS)}
    machine = Machine(
        *(folder / "run", folder, ("--engine", "vllm", *flags), settings),
        deadline_seconds=3 * DEADLINE_SECONDS,
    )
    try:
        with closing((fleet := Fleet(machine)).client):
            yield fleet
            # Whatever was killed here, nobody lost anything.
            assert fleet.metric("hotspare_lost_requests_total") == 0
            assert fleet.metric("hotspare_resume_refusals_total") == 0
            assert fleet.status()["inflight"] == 0
    finally:
        machine.end()


@pytest.fixture(scope="module")
def one_pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """With room for one request at a time, and long prompts in chunks, a step of the engine for each."""
    chunks = "--max-num-batched-tokens=64"
    yield from start(tmp_path_factory, "one-pod", HOTSPARE_CAPACITY="1", HOTSPARE_ENGINE_ARGS=chunks)


@pytest.fixture(scope="module")
def two_pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The spare of the engine that is killed is not waited for: it is the other pod that is to go on."""
    yield from start(tmp_path_factory, "two-pods", "--pods", "2", HOTSPARE_RESUME_HOME_SECONDS="0")


def uncut(fleet: Fleet, path: str, body: dict[str, Any]) -> bytes:
    with fleet.stream(path, body) as stream:
        return stream.read_on()


def attempts(line: dict[str, Any]) -> list[str]:
    """Worker and epoch of each; none if there was no break."""
    return [attempt for attempt in line.get("attempts", "").split(",") if attempt]


def until_hit(ask: Callable[[], dict[str, Any]], *, kills: int = 1, in_prefill: bool = False) -> dict[str, Any]:
    """Ask until all kills came in the middle, or before anything was said: the access line of that."""
    for _ in range(TRIES):
        line = ask()
        if len(attempts(line)) > kills and not (in_prefill and line.get("resumes")):
            return line
    pytest.fail(f"{TRIES} times the answer was over before its engine was killed: {line}")


def check_stream(fleet: Fleet, path: str, body: dict[str, Any], moment: Moment) -> dict[str, Any]:
    wanted = uncut(fleet, path, body)

    def ask() -> dict[str, Any]:
        active = fleet.whole()
        with fleet.stream(path, body) as stream:
            victim = active[0] if len(active) == 1 else fleet.serving()
            stream.read_until(moment)
            if victim is not None:
                fleet.kill(victim)
            got = stream.read_on()
        different = difference(alike(got), alike(wanted))
        assert not different, different
        return fleet.line(stream.request_id)

    line = until_hit(ask)
    assert len(set(attempts(line))) == 2, line
    assert (line["status"], line["resumes"], line.get("retries")) == (200, 1, None), line
    return line


@pytest.mark.parametrize("row", STREAMS)
def test_a_stream_outlives_its_engine(one_pod: Fleet, row: str) -> None:
    check_stream(one_pod, *STREAMS[row])


def test_an_answer_that_is_in_prefill(one_pod: Fleet) -> None:
    """Of thirteen chunks of its prompt two are done. Nothing was said: it runs again."""
    numbers = itertools.count()

    def ask() -> dict[str, Any]:
        # Another prompt each time: what is in the prefix cache needs no chunk.
        body = _chat(f"{next(numbers)}. " + "One, two, three, four. " * 100 + "And then?", max_tokens=8)
        (victim,) = one_pod.whole()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(uncut, one_pod, CHAT, body)
            _until_steps(one_pod, victim, 2)
            one_pod.kill(victim)
            got = asked.result(DEADLINE_SECONDS)
        assert not difference(alike(got), alike(uncut(one_pod, CHAT, body)))
        return _last_line(one_pod, got)

    line = until_hit(ask, in_prefill=True)
    assert (line["retries"], line.get("resumes"), len(attempts(line))) == (1, None, 2), line


def test_a_whole_answer(one_pod: Fleet) -> None:
    """Its client has nothing until the end: the moment is some steps of the engine after its prefill."""
    body = _chat(max_tokens=40, ignore_eos=True, stream=False)
    wanted = one_pod.client.post(CHAT, json=body)

    def ask() -> dict[str, Any]:
        (victim,) = one_pod.whole()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(one_pod.client.post, CHAT, json=body)
            _until_steps(one_pod, victim, 6)
            one_pod.kill(victim)
            got = asked.result(DEADLINE_SECONDS)
        assert got.status_code == 200, got.text
        assert same_document(alike(got.content), alike(wanted.content)), (got.text, wanted.text)
        return one_pod.line(got.headers["x-request-id"])

    before = one_pod.metric("hotspare_resume_tokens_total")
    line = until_hit(ask)
    assert (line["resumes"], line.get("retries")) == (1, None), line
    assert one_pod.metric("hotspare_resume_tokens_total") - before >= 4


def test_an_answer_that_is_queued(one_pod: Fleet) -> None:
    """There is room for one: the other waits at the gateway while the first one's engine dies, and comes after it."""
    first, second = _chat(max_tokens=48, ignore_eos=True), _chat("Name three colours.", max_tokens=8)
    wanted = [uncut(one_pod, CHAT, body) for body in (first, second)]
    got: list[bytes] = []

    def ask() -> dict[str, Any]:
        (victim,) = one_pod.whole()
        with ThreadPoolExecutor(1) as pool, one_pod.stream(CHAT, first) as stream:
            stream.read_until(after_events(3))
            asked = pool.submit(uncut, one_pod, CHAT, second)
            until(
                lambda: one_pod.status()["waiting"] == 1 or asked.done(),
                saying="one request waits",
                seconds=DEADLINE_SECONDS,
            )
            one_pod.kill(victim)
            got[:] = [stream.read_on(), asked.result(DEADLINE_SECONDS)]
        for one, other in zip(got, wanted, strict=True):
            assert not difference(alike(one), alike(other))
        return one_pod.line(stream.request_id)

    line = until_hit(ask)
    assert (line["resumes"], len(attempts(line))) == (1, 2), line
    queued = _last_line(one_pod, got[1])
    assert (queued.get("resumes"), queued.get("retries"), queued["epoch"]) == (None, None, line["epoch"]), queued


def test_two_kills_in_one_answer(one_pod: Fleet) -> None:
    """The second one before there is another spare: the answer waits for the engine that its keeper forks again."""
    body = _chat(max_tokens=32, ignore_eos=True)
    wanted = uncut(one_pod, CHAT, body)

    def ask() -> dict[str, Any]:
        (first,) = one_pod.whole()
        return killed_twice(one_pod, body, wanted, lambda: first)

    line = until_hit(ask, kills=2)
    assert line["resumes"] == 2, line
    assert len(set(attempts(line))) == 3, line


def killed_twice(
    fleet: Fleet, body: dict[str, Any], wanted: bytes, serving_first: Callable[[], Engine | None]
) -> dict[str, Any]:
    """An answer whose engine is killed, and the one that goes on with it, if it is not over before."""
    with fleet.stream(CHAT, body) as stream:
        if (first := serving_first()) is not None:
            stream.read_until(after_events(4))
            fleet.kill(first)
            if (second := fleet.serving(other_than=(first.state["pid"],))) is not None:
                stream.read_until(after_events(stream.seen.count(b"\n\n") + 4))
                fleet.kill(second)
        got = stream.read_on()
    assert not difference(alike(got), alike(wanted))
    return fleet.line(stream.request_id)


def test_a_client_that_leaves_during_the_resume(one_pod: Fleet) -> None:
    """The engine that goes on hears of it, and stops."""
    body = _chat(max_tokens=800, ignore_eos=True)
    (victim,) = one_pod.whole()
    with one_pod.stream(CHAT, body) as stream:
        stream.read_until(after_events(4))
        one_pod.kill(victim)
        resumed = one_pod.serving(other_than=(victim.state["pid"],))
    assert resumed is not None
    until(lambda: not _inflight(one_pod, resumed.admin_port), saying="the engine stopped", seconds=DEADLINE_SECONDS)
    line = one_pod.line(stream.request_id)
    assert (line["disconnected"], line["resumes"], len(attempts(line))) == (True, 1, 2), line
    assert line["events"] < 800, line


def test_a_client_that_leaves_before_anybody_can_go_on(one_pod: Fleet) -> None:
    """Nobody has anything to do with it then."""
    (victim,) = one_pod.whole()
    with one_pod.stream(CHAT, _chat(max_tokens=800, ignore_eos=True)) as stream:
        stream.read_until(after_events(4))
        one_pod.kill(victim)
        assert gone(victim.state["pid"])
    line = one_pod.line(stream.request_id)
    assert line["disconnected"], line
    assert line["events"] < 800, line
    (active,) = one_pod.whole()
    until(lambda: not _inflight(one_pod, active.admin_port), saying="nobody is at it", seconds=DEADLINE_SECONDS)
    assert one_pod.status()["inflight"] == 0


def test_a_realtime_response(one_pod: Fleet) -> None:
    def respond(kill: Callable[[], None] | None) -> tuple[str, list[bytes]]:
        events: list[bytes] = []
        with (
            OpenAI(base_url=f"{one_pod.url}/v1", api_key="none", timeout=DEADLINE_SECONDS) as client,
            client.realtime.connect(model="smollm2") as connection,
        ):
            text: Any = {"type": "input_text", "text": "Tell me a story about a cat."}
            connection.conversation.item.create(item={"type": "message", "role": "user", "content": [text]})
            connection.response.create(response={"max_output_tokens": 24})
            while True:
                events.append(raw := connection.recv_bytes())
                kind = msgspec.json.decode(raw)["type"]
                if kind == "response.output_text.delta" and kill is not None:
                    kill()
                assert kind != "error", raw
                if kind == "response.done":
                    return str(msgspec.json.decode(raw)["response"]["id"]), events

    _, wanted = respond(None)

    def ask() -> dict[str, Any]:
        (victim,) = one_pod.whole()
        deltas = 0

        def kill() -> None:
            nonlocal deltas
            deltas += 1
            if deltas == 4:
                one_pod.kill(victim)

        response, got = respond(kill)
        assert _joined(got) == _joined(wanted)
        return one_pod.line(response)

    line = until_hit(ask)
    assert (line["route"], line["resumes"], len(attempts(line))) == ("realtime", 1, 2), line


@pytest.mark.parametrize("row", STREAMS_OF_TWO_PODS)
def test_another_pod_goes_on(two_pods: Fleet, row: str) -> None:
    line = check_stream(two_pods, *STREAMS_OF_TWO_PODS[row])
    assert line["events"] > 8, line


def test_the_active_engines_of_both_pods_one_after_the_other(two_pods: Fleet) -> None:
    body = _chat(max_tokens=64, ignore_eos=True)
    wanted = uncut(two_pods, CHAT, body)

    def ask() -> dict[str, Any]:
        two_pods.whole()
        return killed_twice(two_pods, body, wanted, two_pods.serving)

    line = until_hit(ask, kills=2)
    assert line["resumes"] == 2, line
    assert len(set(attempts(line))) == 3, line


def _until_steps(fleet: Fleet, engine: Engine, count: int) -> None:
    """Wait until it has made so many more than it had."""
    reached = engine.state["steps"] + count
    until(
        lambda: any(now.state["steps"] >= reached for now in fleet.engines() if now.admin_port == engine.admin_port),
        saying=f"{count} steps of the engine",
        seconds=DEADLINE_SECONDS,
    )


def _inflight(fleet: Fleet, port: int) -> int:
    return sum(engine.state["inflight"] for engine in fleet.engines() if engine.admin_port == port)


def _last_line(fleet: Fleet, answer: bytes) -> dict[str, Any]:
    """Of a chat completion: its id is made from the request's."""
    return fleet.line(answer.partition(b'"id":"chatcmpl-')[2].partition(b'"')[0].decode())


def _joined(events: list[bytes]) -> list[Any]:
    """The events of a session as they are, but deltas that follow each other as one; their own ids count on."""
    found: list[Any] = []
    for event in map(msgspec.json.decode, alike(b"\n".join(events)).split(b"\n")):
        event.pop("event_id", None)
        before = found[-1] if found else {}
        if event["type"] == "response.output_text.delta" == before.get("type"):
            before["delta"] += event["delta"]
        else:
            found.append(event)
    return found
