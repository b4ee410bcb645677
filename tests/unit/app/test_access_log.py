from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from typing import Any, Literal

import pytest

from app.openai.errors import request_kills_worker, unknown_api_key, worker_lost
from app.openai.surface import RELAY_ROUTES
from app.relay.relayed import Report, Try
from app.telemetry.access_log import AccessLog

CHAT = RELAY_ROUTES["/v1/chat/completions"]
NOW = datetime(2026, 3, 1, 12, 0, 0, 5000, UTC).timestamp()


class Written:
    def __init__(self, form: Literal["console", "json"]) -> None:
        self.lines: list[bytes] = []
        self.now = NOW
        self.log = AccessLog(self.lines.append, form, clock=lambda: self.now)

    def line(self, report: Report, **changes: Any) -> str:
        facts: dict[str, Any] = {"model": "m", "status": 200, "seconds": 0.5, "first_seconds": 0.01}
        self.log.log(CHAT, **(facts | {"request_id": b"r-1"} | changes), report=report)
        (line,) = self.lines
        self.lines.clear()
        assert line.endswith(b"\n")
        assert line.count(b"\n") == 1
        return line.decode()


def streamed(**changes: Any) -> Report:
    return Report(**({"worker": "pod-0", "epoch": 3, "streamed": True, "events": 12, "bytes": 345} | changes))


def test_json() -> None:
    document = json.loads(Written("json").line(streamed()))
    assert document.pop("pid") > 0
    assert document == {
        "time": "2026-03-01T12:00:00.005Z",
        "level": "info",
        "logger": "app.access_log",
        "message": "/v1/chat/completions 200",
        "route": "chat",
        "model": "m",
        "status": 200,
        "ms": 500.0,
        "first_ms": 10.0,
        "worker": "pod-0",
        "epoch": 3,
        "events": 12,
        "bytes": 345,
        "request_id": "r-1",
    }


def test_json_with_trouble() -> None:
    report = streamed(retries=2, error=worker_lost("x"), disconnected=True)
    document = json.loads(Written("json").line(report))
    assert (document["retries"], document["error"], document["disconnected"]) == (2, "worker_lost", True)
    assert (document["fault"], document["retryable"]) == ("upstream", report.error and report.error.retryable)


def test_json_of_a_request_that_reached_nobody() -> None:
    document = json.loads(Written("json").line(Report(), model="", status=404, first_seconds=None))
    assert {"model", "first_ms", "worker", "epoch", "events", "error"}.isdisjoint(document)
    assert (document["status"], document["bytes"]) == (404, 0)


def test_the_client_of_a_refused_key() -> None:
    report = Report(error=unknown_api_key(), client="2001:db8::1")
    document = json.loads(Written("json").line(report, model="", status=401))
    assert (document["error"], document["client"]) == ("invalid_api_key", "2001:db8::1")
    assert "retryable=false client=2001:db8::1 request_id=r-1\n" in Written("console").line(report, status=401)
    assert "client" not in json.loads(Written("json").line(streamed(retries=1)))


def test_console() -> None:
    line = Written("console").line(streamed(retries=1))
    clock = datetime.fromtimestamp(NOW).strftime("%H:%M:%S")
    assert line == (
        f"{clock}.005 info    /v1/chat/completions 200  model=m ms=500.0 first_ms=10.0 worker=pod-0 epoch=3 "
        "events=12 bytes=345 retries=1 request_id=r-1\n"
    )


@pytest.mark.parametrize("name", ['a"b', "a\nb", "a b", "\u2028", "é", "\\"])
@pytest.mark.parametrize("form", ["console", "json"])
def test_names_cannot_forge_a_line(form: Literal["console", "json"], name: str) -> None:
    line = Written(form).line(streamed(worker=name), model=name)
    assert len(line.splitlines()) == 1
    if form == "json":
        document = json.loads(line)
        assert (document["model"], document["worker"]) == (name, name)


def test_the_second_is_that_of_the_line() -> None:
    written = Written("json")
    assert '"2026-03-01T12:00:00.005Z"' in written.line(streamed())
    written.now += 0.994
    assert '"2026-03-01T12:00:00.999Z"' in written.line(streamed())
    written.now += 60
    assert '"2026-03-01T12:01:00.999Z"' in written.line(streamed())


def test_which_process_of_several() -> None:
    lines: list[bytes] = []
    log = AccessLog(lines.append, "console", clock=lambda: NOW, with_pid=True)
    log.log(CHAT, model="m", status=200, seconds=0.5, first_seconds=None, request_id=b"r-1", report=Report())
    assert lines[0].endswith(b" request_id=r-1 pid=%d\n" % os.getpid())


TRIES = (Try("pod-0", 3, 0.0, 1.0, "connection closed"), Try("pod 1", 1, 1.0, 2.0, "connection reset"))


def test_each_attempt_is_named() -> None:
    report = streamed(retries=1, resumes=2, tries=TRIES, attempts=3, worker="pod-0", epoch=4)
    document = json.loads(Written("json").line(report))
    assert (document["retries"], document["resumes"]) == (1, 2)
    assert document["attempts"] == "pod-0#3,pod 1#1,pod-0#4"
    assert ' retries=1 resumes=2 attempts="pod-0#3,pod 1#1,pod-0#4" ' in Written("console").line(report)


def test_why_it_was_lost_and_what_is_only_repeated() -> None:
    report = streamed(tries=TRIES, attempts=2, error=worker_lost("x"), lost="engine:several_generations")
    assert json.loads(Written("json").line(report))["lost"] == "engine:several_generations"
    assert " lost=engine:several_generations error=worker_lost " in Written("console").line(report)
    repeated = Report(error=request_kills_worker(repeated=True), repeated=True)
    document = json.loads(Written("json").line(repeated, status=500))
    assert (document["repeated"], document["error"]) == (True, "request_kills_worker")
    assert "lost" not in document
    assert "repeated" not in json.loads(Written("json").line(report))


def test_a_last_attempt_that_broke_is_named_once_and_an_only_one_not_at_all() -> None:
    report = streamed(tries=TRIES, attempts=2, error=worker_lost("x"))
    assert json.loads(Written("json").line(report))["attempts"] == "pod-0#3,pod 1#1"
    report = streamed(tries=TRIES[:1], attempts=1, error=worker_lost("x"))
    assert "attempts" not in json.loads(Written("json").line(report))
