"""An active engine that is told to leave hands over to its spare; whatever goes wrong, its streams go on.

A stream here is a request as a gateway makes it, so that engines count on its being gone on with elsewhere; the client
is none, and sees where it is cut. The last test has a gateway.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.process.workers.crews import Crew, crew
from tests.process.workers.slow_engine import BOUND_HEADER, OBEDIENT, Told, hurry, mark
from tests.support.processes import RESTART_SECONDS, Process, gone, until, until_role
from workers.contract import HEADER_REQUEST_ID, HEADER_STREAM, Role
from workers.handover import ANSWER_SECONDS, OFFER_PATH, OUTCOME_PATH, START_PATH
from workers.pod_key import HEADER_POD_KEY, read_pod_key

pytestmark = pytest.mark.process

LONG = os.environ.get("HOTSPARE_TEST_LONG") == "1"
TIMES = {"HOTSPARE_HANDOVER_TIMEOUT_SECONDS": "3", "HOTSPARE_GRACE_PERIOD_SECONDS": "0"}
PATIENT = {"HOTSPARE_HANDOVER_TIMEOUT_SECONDS": "5"}
"""Where the hand-over is to succeed on a busy machine, too."""
BRIEF = {"HOTSPARE_SHUTDOWN_TIMEOUT_SECONDS": "12"}
"""Three quarters of it are waited, and a twentieth is for each step after that."""
PACE = {"HOTSPARE_SIM_TOKEN_SECONDS": "0.01"}
SLOWLY = {"HOTSPARE_SIM_TOKEN_SECONDS": "0.02"}
WHOLE, ENDLESS = 1000, 30_000
"""Tokens of a stream that ends soon once it is told to hurry, and not before; and of one that does not even then."""


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Crew]:
    with crew(tmp_path, "ab") as found:
        found.gms()
        found.env |= TIMES | SLOWLY
        yield found


def start(pair: Crew, *, asks: int | None = None, **env: str) -> tuple[Process, Process]:
    """Engine a, active, which asks b (or whoever listens at ``asks``), and b in line."""
    ports = {"a": str(asks or pair.admin["b"]), "b": str(pair.admin["a"])}
    env = {"HOTSPARE_ENGINE": OBEDIENT, **env}
    first = pair.engine("a", "--standby-admin-ports", ports["a"], **env)
    until_role(pair.admin["a"], Role.ACTIVE)
    second = pair.engine("b", "--standby-admin-ports", ports["b"], **env)
    pair.until_in_line("b")
    until(lambda: (pair.state("a") or {}).get("standby") == "STANDBY" or asks, saying="a knows of its spare")
    return first, second


class Two:
    """A pair that many tests share: each finds one engine active and the other in line."""

    def __init__(self, crew: Crew) -> None:
        self.crew = crew
        self.active = until(crew.active, saying="an engine is active")
        self.spare = next(name for name in crew.admin if name != self.active)
        self.spare_pid = crew.until_in_line(self.spare)["pid"]
        until(lambda: (crew.state(self.active) or {}).get("standby") == "STANDBY", saying="the active one knows of it")
        state = crew.known(self.active)
        self.epoch, self.active_pid = state["epoch"], state["pid"]

    def tell(self, engine: str, what: Told, *more: int) -> None:
        what.file(self.crew.pod_dir, engine).write_text(" ".join(map(str, more)))

    def tell_no_more(self, engine: str, what: Told) -> None:
        what.file(self.crew.pod_dir, engine).unlink()

    def until_is(self, engine: str, what: str) -> None:
        until(mark(self.crew.pod_dir, engine, what).exists, saying=f"{engine} is {what}")

    def hurry(self) -> None:
        hurry(self.crew.pod_dir, self.crew.admin)

    def forget(self) -> None:
        for left in (*self.crew.pod_dir.glob("engine-?.does-*"), *self.crew.pod_dir.glob("engine-?.is-*")):
            left.unlink()

    def serves_on(self, stream: Stream, *, epochs: int) -> None:
        """The active one does: its stream, a ``WHOLE`` one, ends so, and new requests are answered so many epochs
        later."""
        state = until_role(self.crew.admin[self.active], Role.ACTIVE)
        assert state["epoch"] == self.epoch + epochs
        assert self.crew.complete()
        self.hurry()
        stream.wait()
        assert (stream.done, stream.events, stream.cut) == (True, WHOLE, False)

    def log(self, engine: str) -> str:
        return (self.crew.run_dir / f"engine-{engine}.log").read_text()


@pytest.fixture(scope="module")
def running_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    with crew(tmp_path_factory.mktemp("pair"), "ab") as found:
        found.gms()
        found.env |= TIMES | SLOWLY | {"HOTSPARE_BEAT_TIMEOUT_SECONDS": "30", "HOTSPARE_SELF_TEST_SECONDS": "2"}
        found.env["HOTSPARE_SIM_RESTART_SECONDS"] = RESTART_SECONDS
        start(found)
        yield found


@pytest.fixture
def two(running_pair: Crew) -> Iterator[Two]:
    found = Two(running_pair)
    yield found
    found.forget()


class Stream:
    """A stream that is read beside the test."""

    def __init__(self, pair: Crew, tokens: int, **more: str) -> None:
        self.events = 0
        self.done = self.cut = False
        self.began = threading.Event()
        body = {"prompt": "a long story", "max_tokens": tokens, "stream": True}
        headers = {HEADER_REQUEST_ID: f"r-{tokens}", HEADER_STREAM: "1", **more}
        url = f"http://127.0.0.1:{pair.serving}/v1/completions"
        self._thread = threading.Thread(target=self._read, args=(url, body, headers))
        self._thread.start()
        assert self.began.wait(20)

    def _read(self, url: str, body: object, headers: dict[str, str]) -> None:
        try:
            with httpx.stream("POST", url, json=body, headers=headers, timeout=40, trust_env=False) as answer:
                for line in answer.iter_lines():
                    self.events += line.startswith("data: {")
                    self.done = self.done or line == "data: [DONE]"
                    self.began.set()
        except (httpx.RemoteProtocolError, httpx.ReadError):
            self.cut = True

    def wait(self) -> None:
        self._thread.join(40)
        assert not self._thread.is_alive()


def ask(pair: Crew, name: str, path: str = START_PATH, *, key: str | None = None, **asked: object) -> httpx.Response:
    shown = read_pod_key(pair.pod_dir) if key is None else key
    url = f"http://127.0.0.1:{pair.admin[name]}{path}"
    return httpx.post(url, json=asked, headers={HEADER_POD_KEY: shown}, timeout=40, trust_env=False)


@contextlib.contextmanager
def asking(pair: Crew, name: str, **asked: object) -> Iterator[list[dict[str, object]]]:
    """While inside somebody waits for a hand-over, which waits for requests; yields where the answer will be."""
    answers: list[dict[str, object]] = []
    thread = threading.Thread(target=lambda: answers.append(ask(pair, name, **asked).json()))
    thread.start()
    until(lambda: (pair.state(name) or {}).get("draining"), saying="it waits")
    yield answers
    thread.join(40)
    assert not thread.is_alive()


def test_an_engine_that_is_told_to_leave_hands_over_and_ends(pair: Crew) -> None:
    a, _ = start(pair, **PATIENT)
    stream = Stream(pair, ENDLESS)
    a.signal(signal.SIGTERM)
    b = until_role(pair.admin["b"], Role.ACTIVE)
    assert a.wait(seconds=20) == 0
    stream.wait()
    assert (stream.cut, stream.done, b["epoch"]) == (True, False, 2)
    assert pair.complete()
    assert "engine b serves now, under epoch 2" in a.output()
    assert pair.metric("b", 'hotspare_engine_promotions_total{outcome="promoted"}') == 1


def test_on_demand_the_engines_change_places(two: Two) -> None:
    stream = Stream(two.crew, ENDLESS)
    answer = ask(two.crew, two.active)
    assert (answer.status_code, answer.json()["stage"], answer.json()["to"]) == (200, "handed_over", two.spare)
    stream.wait()
    assert stream.cut
    until_role(two.crew.admin[two.active], Role.STANDBY)
    assert two.crew.metric(two.active, 'hotspare_engine_handovers_total{outcome="handed_over"}') >= 1
    refused = ask(two.crew, two.active)
    assert (refused.status_code, refused.json()["reason"]) == (409, "it is STANDBY and not ACTIVE")


def test_what_no_engine_could_go_on_with_is_waited_for_and_others_are_served_meanwhile(two: Two) -> None:
    moves, stays = Stream(two.crew, ENDLESS), Stream(two.crew, WHOLE, **{BOUND_HEADER: "1"})
    asked = threading.Thread(target=ask, args=(two.crew, two.active))
    asked.start()
    state = until(lambda: (s := two.crew.state(two.active) or {}).get("draining") and s, saying="it waits")
    assert (state["role"], state["draining"]["phase"]) == ("ACTIVE", "settling")
    assert state["draining"]["remaining"] == {"completions": 1}
    (bound,) = state["draining"]["bound"]
    assert bound.startswith(f"r-{WHOLE} (/v1/completions, ")
    assert two.crew.complete()  # it serves on
    assert two.crew.known(two.active)["epoch"] == two.epoch
    two.hurry()
    stays.wait()
    assert (stays.done, stays.events, stays.cut) == (True, WHOLE, False)
    assert until_role(two.crew.admin[two.spare], Role.ACTIVE)["epoch"] == two.epoch + 1
    moves.wait()
    asked.join()
    assert (moves.done, moves.cut) == (False, True)
    said = next(line for line in reversed(two.log(two.active).splitlines()) if "the hand-over waits " in line)
    assert " for 1 request that no other engine could resume, and then is called off: " in said
    assert f"r-{WHOLE} (/v1/completions, " in said
    assert f"r-{ENDLESS}" not in said


def test_what_is_waited_for_in_vain_is_named_and_the_hand_over_called_off(two: Two) -> None:
    stream = Stream(two.crew, WHOLE, **{BOUND_HEADER: "1"})
    answer = ask(two.crew, two.active, wait_seconds=0.1).json()
    assert (answer["stage"], answer["bound"]) == ("kept", 1)
    assert f"1 request that no other engine could resume did not end in time: r-{WHOLE}" in answer["reason"]
    two.serves_on(stream, epochs=0)


def test_what_is_waited_for_in_vain_is_cut_if_that_is_asked_for(two: Two) -> None:
    stream = Stream(two.crew, ENDLESS, **{BOUND_HEADER: "1"})
    answer = ask(two.crew, two.active, wait_seconds=0.1, cut=True)
    assert (answer.status_code, answer.json()["stage"]) == (200, "handed_over")
    stream.wait()
    assert stream.cut
    assert f"and is cut by the hand-over: r-{ENDLESS}" in two.log(two.active)


def test_an_engine_that_is_told_to_stop_cuts_what_does_not_end_in_its_time(pair: Crew) -> None:
    a, _ = start(pair, **BRIEF, **PATIENT)
    stream = Stream(pair, ENDLESS, **{BOUND_HEADER: "1"})
    a.signal(signal.SIGTERM)
    assert a.wait(seconds=30) == 0
    stream.wait()
    assert stream.cut
    until_role(pair.admin["b"], Role.ACTIVE)
    assert f"and is cut by the hand-over: r-{ENDLESS}" in a.output()


def test_one_that_is_told_to_stop_while_it_waits_has_no_more_time_than_that_leaves(pair: Crew) -> None:
    a, _ = start(pair, **BRIEF, **PATIENT)
    stream = Stream(pair, ENDLESS, **{BOUND_HEADER: "1"})
    with asking(pair, "a", wait_seconds=3600) as answers:
        a.signal(signal.SIGTERM)
        assert a.wait(seconds=30) == 0, a.output()
    stream.wait()
    assert stream.cut
    assert answers[0]["stage"] == "handed_over"
    assert until_role(pair.admin["b"], Role.ACTIVE)["epoch"] == 2
    assert f"and is cut by the hand-over: r-{ENDLESS}" in a.output()
    assert pair.complete()


def test_and_what_ends_in_that_time_is_not_cut(pair: Crew) -> None:
    a, _ = start(pair, **PATIENT)
    moves, stays = Stream(pair, ENDLESS), Stream(pair, WHOLE, **{BOUND_HEADER: "1"})
    with asking(pair, "a", wait_seconds=3600):
        a.signal(signal.SIGTERM)
        assert pair.complete()  # it serves on meanwhile
        hurry(pair.pod_dir, pair.admin)
        stays.wait()
        assert a.wait(seconds=20) == 0
    moves.wait()
    assert (stays.done, stays.events, moves.cut) == (True, WHOLE, True)
    until_role(pair.admin["b"], Role.ACTIVE)


def test_with_a_drain_mode_of_wait_a_signal_calls_it_off(pair: Crew) -> None:
    a, _ = start(pair, HOTSPARE_DRAIN_MODE="wait")
    stream = Stream(pair, WHOLE, **{BOUND_HEADER: "1"})
    with asking(pair, "a", wait_seconds=3600) as answers:
        a.signal(signal.SIGTERM)
        until_role(pair.admin["a"], Role.DRAINING)
        hurry(pair.pod_dir, pair.admin)
        stream.wait()
        assert a.wait(seconds=20) == 0
    assert (stream.done, stream.events) == (True, WHOLE)
    assert (answers[0]["stage"], "told to stop" in answers[0]["reason"]) == ("kept", True)


def test_a_hand_over_that_nobody_waits_for_any_more_is_called_off(two: Two) -> None:
    stream = Stream(two.crew, WHOLE, **{BOUND_HEADER: "1"})
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", two.crew.admin[two.active])) as connection:
        shown = {HEADER_POD_KEY: read_pod_key(two.crew.pod_dir)}
        connection.request("POST", START_PATH, json.dumps({"wait_seconds": 3600}), shown)
        until(lambda: (two.crew.state(two.active) or {}).get("draining"), saying="it waits")
    until(lambda: "whoever asked for it has gone" in two.log(two.active), saying="it is called off")
    until(lambda: two.crew.known(two.active)["draining"] is None, saying="nothing is left of it")
    two.serves_on(stream, epochs=0)


@pytest.mark.parametrize("wait", [-1, 1e9, "long"])
def test_a_wait_that_cannot_be_meant_is_refused(two: Two, wait: object) -> None:
    assert ask(two.crew, two.active, wait_seconds=wait).status_code == 400
    assert two.crew.known(two.active)["role"] == "ACTIVE"


def test_whichever_spare_gets_the_lock_is_handed_over_to(tmp_path: Path) -> None:
    """Asked are both, and first the one that is later in the line; what one of them does not answer keeps nobody."""
    with crew(tmp_path, "abc") as trio:
        trio.gms()
        trio.env |= TIMES | SLOWLY | {"HOTSPARE_HANDOVER_TIMEOUT_SECONDS": "10"}
        for name, others in (("a", "cb"), ("b", "ac"), ("c", "ab")):
            trio.engine(name, "--standby-admin-ports", ",".join(str(trio.admin[other]) for other in others))
            if name == "a":
                until_role(trio.admin["a"], Role.ACTIVE)
            else:
                trio.until_in_line(name)
        stream = Stream(trio, ENDLESS)
        answer = ask(trio, "a")
        assert (answer.status_code, answer.json()["to"], answer.json()["reason"]) == (200, "b", "")
        assert answer.json()["seconds"] < 5
        stream.wait()
        assert stream.cut
        trio.until_in_line("a")
        os.kill(trio.known("c")["pid"], signal.SIGSTOP)  # first in the line, and silent; b does not know
        again = ask(trio, "b")
        assert (again.json()["stage"], again.json()["to"]) == ("handed_over", "a"), again.text


def test_a_spare_that_is_not_run_for_a_while_is_waited_for_if_there_is_no_other(pair: Crew) -> None:
    start(pair, HOTSPARE_HANDOVER_TIMEOUT_SECONDS="20", HOTSPARE_BEAT_TIMEOUT_SECONDS="30")
    spare = pair.known("b")["pid"]
    answers: list[httpx.Response] = []
    asked = threading.Thread(target=lambda: answers.append(ask(pair, "a")))
    os.kill(spare, signal.SIGSTOP)
    try:
        asked.start()
        until(lambda: ((pair.state("a") or {}).get("draining") or {}).get("phase") == "asking", saying="b is asked")
        asked.join(ANSWER_SECONDS * 1.5)
        assert asked.is_alive(), answers[0].text
        assert pair.complete()  # a serves on
    finally:
        os.kill(spare, signal.SIGCONT)
        asked.join()
    assert (answers[0].status_code, answers[0].json()["stage"], answers[0].json()["to"]) == (200, "handed_over", "b")


def test_one_that_is_called_off_while_its_spare_is_asked_comes_to_nothing(pair: Crew) -> None:
    a, _ = start(pair, HOTSPARE_HANDOVER_TIMEOUT_SECONDS="3", HOTSPARE_BEAT_TIMEOUT_SECONDS="30")
    spare = pair.known("b")["pid"]
    os.kill(spare, signal.SIGSTOP)
    try:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", pair.admin["a"])) as connection:
            connection.request("POST", START_PATH, b"{}", {HEADER_POD_KEY: read_pod_key(pair.pod_dir)})
            until(lambda: ((pair.state("a") or {}).get("draining") or {}).get("phase") == "asking", saying="b is asked")
        a.until_said("whoever asked for it has gone")
    finally:
        os.kill(spare, signal.SIGCONT)
    assert (pair.until_active()["engine"], pair.known("a")["epoch"]) == ("a", 1)


@pytest.mark.parametrize("path", [START_PATH, OFFER_PATH, OUTCOME_PATH])
def test_nobody_without_the_pods_key_can_ask_for_anything(two: Two, path: str) -> None:
    for key in ("", "another"):
        assert ask(two.crew, two.active, path, key=key).status_code == 401
    url = f"http://127.0.0.1:{two.crew.serving}{path}"
    assert httpx.post(url, json={}, timeout=5, trust_env=False).status_code == 404  # nor is it on the serving port
    assert ask(two.crew, two.spare, OFFER_PATH).status_code == 400  # with the key, but without what it must say
    assert two.crew.known(two.active)["role"] == "ACTIVE"


def test_both_told_to_leave_the_active_one_waits_for_its_requests(pair: Crew) -> None:
    a, b = start(pair)
    stream = Stream(pair, WHOLE)
    b.signal(signal.SIGTERM)
    a.signal(signal.SIGTERM)
    assert b.wait(seconds=20) == 0
    until_role(pair.admin["a"], Role.DRAINING)
    hurry(pair.pod_dir, pair.admin)
    stream.wait()
    assert (stream.done, stream.events, a.wait(seconds=20)) == (True, WHOLE, 0)


def test_with_a_drain_mode_of_wait_nothing_is_handed_over(pair: Crew) -> None:
    a, _ = start(pair, HOTSPARE_DRAIN_MODE="wait")
    stream = Stream(pair, WHOLE)
    a.signal(signal.SIGTERM)
    state = until_role(pair.admin["a"], Role.DRAINING)
    assert (state["epoch"], state["draining"]["remaining"]) == (1, {"completions": 1})
    hurry(pair.pod_dir, pair.admin)
    stream.wait()
    assert (stream.done, a.wait(seconds=20)) == (True, 0)
    until_role(pair.admin["b"], Role.ACTIVE)


def test_a_step_in_hand_that_takes_too_long_leaves_everything_as_it_was(two: Two) -> None:
    two.tell(two.active, Told.NOT_QUIESCE)
    stream = Stream(two.crew, WHOLE)
    answer = ask(two.crew, two.active)
    assert (answer.status_code, answer.json()["stage"]) == (409, "kept")
    two.serves_on(stream, epochs=0)


def test_an_engine_whose_step_in_hand_hangs_is_found_as_soon_as_at_any_time(pair: Crew) -> None:
    a, _ = start(pair, HOTSPARE_STEP_TIMEOUT_SECONDS="1")
    active = pair.known("a")["pid"]
    Told.HANG_IN_STEP.file(pair.pod_dir, "a").touch()
    stream = Stream(pair, ENDLESS)
    asked = threading.Thread(target=_ask_in_vain, args=(pair, "a"))
    asked.start()
    until_role(pair.admin["b"], Role.ACTIVE, seconds=20)
    asked.join(20)
    stream.wait()
    assert gone(active)
    assert stream.cut
    assert "it has requests and made no step" in a.output()
    assert pair.complete()


def test_a_spare_that_does_not_wake_gives_everything_back(two: Two) -> None:
    two.tell(two.spare, Told.NOT_WAKE)
    stream = Stream(two.crew, WHOLE)
    answer = ask(two.crew, two.active)
    assert (answer.status_code, answer.json()["stage"]) == (409, "taken_back")
    two.serves_on(stream, epochs=2)
    assert "no such luck" in (two.crew.known(two.spare)["obstacle"] or "")


def test_a_spare_that_is_too_slow_backs_out(two: Two) -> None:
    two.tell(two.spare, Told.WAKE_LATER)
    stream = Stream(two.crew, WHOLE)
    answers: list[httpx.Response] = []
    asked = threading.Thread(target=lambda: answers.append(ask(two.crew, two.active)))
    asked.start()
    two.until_is(two.spare, "cancelled")
    two.tell_no_more(two.spare, Told.WAKE_LATER)
    asked.join()
    assert (answers[0].status_code, answers[0].json()["stage"]) == (409, "taken_back")
    two.serves_on(stream, epochs=2)
    assert "waits no longer" in (two.crew.known(two.spare)["obstacle"] or "")


def test_a_spare_that_dies_while_it_is_promoted(two: Two) -> None:
    two.tell(two.spare, Told.KILL_IN_WAKE, two.spare_pid, signal.SIGKILL)
    stream = Stream(two.crew, WHOLE)
    assert ask(two.crew, two.active).json()["stage"] == "taken_back"
    assert gone(two.spare_pid)
    two.serves_on(stream, epochs=2)


def test_a_spare_whose_wake_hangs_is_ended_and_what_is_left_of_the_time_is_for_the_requests(pair: Crew) -> None:
    times = {"HOTSPARE_HANDOVER_TIMEOUT_SECONDS": "1.6", "HOTSPARE_SHUTDOWN_TIMEOUT_SECONDS": "20"}
    a, _ = start(pair, **times)
    Told.HANG_IN_WAKE.file(pair.pod_dir, "b").touch()
    pid = pair.until_in_line("b")["pid"]
    stream = Stream(pair, WHOLE)
    a.signal(signal.SIGTERM)
    until_role(pair.admin["a"], Role.DRAINING)
    hurry(pair.pod_dir, pair.admin)
    stream.wait()
    assert (stream.done, stream.events, stream.cut) == (True, WHOLE, False)
    assert gone(pid)
    assert a.wait(seconds=20) == 0
    assert "did not wake before the engine that hands over" in (pair.run_dir / "engine-b.log").read_text()


def test_after_one_that_was_taken_back_another_takes_all_streams_with_it(two: Two) -> None:
    two.tell(two.spare, Told.NOT_WAKE)
    url = f"http://127.0.0.1:{two.crew.serving}/v1/completions"
    with httpx.Client(timeout=10, trust_env=False) as client:
        body = {"prompt": "hello", "max_tokens": 2}
        assert client.post(url, json=body).status_code == 200
        old = Stream(two.crew, ENDLESS)
        assert ask(two.crew, two.active).json()["stage"] == "taken_back"
        refused = client.post(url, json=body)  # on the connection of before
        assert (refused.status_code, refused.headers["x-hotspare-reselect"]) == (503, "1")
        assert refused.headers["connection"] == "close"
        assert client.post(url, json=body).status_code == 200
    new = Stream(two.crew, ENDLESS + 1)
    assert two.crew.known(two.active)["inflight"] == 2
    two.forget()
    two.crew.until_in_line(two.spare)
    assert ask(two.crew, two.active).json()["stage"] == "handed_over"
    for stream in (new, old):
        stream.wait()
        assert (stream.cut, stream.done) == (True, False)
    assert two.crew.known(two.spare)["epoch"] == two.epoch + 3


def test_a_spare_that_is_stopped_with_the_lock_in_its_hand_is_killed(two: Two) -> None:
    two.tell(two.spare, Told.KILL_IN_WAKE, two.spare_pid, signal.SIGSTOP)
    stream = Stream(two.crew, WHOLE)
    assert ask(two.crew, two.active).json()["stage"] == "taken_back"
    assert gone(two.spare_pid)
    two.serves_on(stream, epochs=2)
    assert "is silent: it is killed" in two.log(two.active)


@pytest.mark.parametrize("who", ["it quiesces", "the other wakes"])
def test_an_engine_that_dies_while_it_hands_over_is_followed_as_after_any_death(two: Two, who: str) -> None:
    if who == "it quiesces":
        two.tell(two.active, Told.KILL_IN_QUIESCE, two.active_pid, signal.SIGKILL)
    else:
        two.tell(two.spare, Told.KILL_IN_WAKE, two.active_pid, signal.SIGKILL)
    stream = Stream(two.crew, ENDLESS)
    _ask_in_vain(two.crew, two.active)
    assert gone(two.active_pid)
    stream.wait()
    assert stream.cut
    assert until_role(two.crew.admin[two.spare], Role.ACTIVE)["epoch"] == two.epoch + 1
    assert two.crew.complete()


def _ask_in_vain(pair: Crew, name: str) -> None:
    with contextlib.suppress(httpx.TransportError):
        ask(pair, name)


class LosingProxy:
    """Stands before an admin port; the first answer to a certain path never arrives: the connection ends instead."""

    def __init__(self, port: int, loses: str) -> None:
        self._port, self._loses, self.lost = port, loses.encode(), 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> LosingProxy:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._relay, args=(client,)).start()

    def _relay(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client, socket.create_connection(("127.0.0.1", self._port)) as there:
            request = client.recv(65536)
            there.sendall(request)
            answer = b"".join(iter(lambda: there.recv(65536), b""))
            if self._loses in request and not self.lost:
                self.lost += 1
                return
            client.sendall(answer)


def test_an_acknowledgement_that_is_lost_is_asked_for_again(pair: Crew) -> None:
    with LosingProxy(pair.admin["b"], f"POST {OUTCOME_PATH} ") as proxy:
        start(pair, asks=proxy.port, **PATIENT)
        stream = Stream(pair, ENDLESS)
        answer = ask(pair, "a")
        assert proxy.lost == 1
    assert (answer.status_code, answer.json()["stage"]) == (200, "handed_over")
    stream.wait()
    assert stream.cut
    assert pair.known("b")["epoch"] == 2


IN_A_ROW = [pytest.param("sim", 3, 150, marks=pytest.mark.timeout(100))]
if LONG:
    IN_A_ROW = [
        pytest.param("sim", 20, 150, marks=pytest.mark.timeout(200)),
        pytest.param("vllm", 20, 10, marks=[pytest.mark.engine, pytest.mark.timeout(2400)]),
    ]


@pytest.mark.parametrize(("engine", "count", "tokens"), IN_A_ROW)
def test_hand_overs_in_a_row_under_load_lose_nothing(engine: str, count: int, tokens: int) -> None:
    """With a gateway, by ``hotspare bench handover``; ``tokens`` of each stream for each hand-over."""
    command = [sys.executable, "-m", "app.cli.main", "bench", "handover", "--engine", engine, "--json"]
    command += ["--handovers", str(count), "--streams", "4", "--tokens", str(tokens * count)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HOTSPARE_")}
    done = subprocess.run(command, env={**clean, **PACE}, capture_output=True, text=True, timeout=2300)
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["handovers"], report["lost"], report["wrong"], report["problems"]) == (count, 0, 0, [])
    assert report["drain_seconds"]["median"] < 2
