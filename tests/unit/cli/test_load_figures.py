"""What is heard of an answer, how it is written down and read, what is added up, and which limits that breaks."""

from __future__ import annotations

import random
from array import array
from pathlib import Path
from typing import Any

import pytest

from app.cli.bench.chaos.answers import Fate, SimAnswers
from app.cli.bench.chaos.figures import percentile
from app.cli.bench.chaos.plan import Manner, Question
from app.cli.bench.loadtest.command import table
from app.cli.bench.loadtest.figures import Figures, failings
from app.cli.bench.loadtest.hearing import Hearing, problem_of, tokens_of
from app.cli.bench.loadtest.histogram import Histogram
from app.cli.bench.loadtest.judging import FormJudge, SimJudge
from app.cli.bench.loadtest.limits import LIMITS
from app.cli.bench.loadtest.records import Answered, Began, Ended, RecordReader, RecordWriter
from app.cli.bench.loadtest.scenario import parse
from app.openai.sse import DONE, KEEPALIVE
from workers.engines.sim.tokens import render_chat

EVENT = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'


def test_a_histogram_is_right_to_a_hundredth() -> None:
    chance = random.Random(1)
    values = [chance.lognormvariate(-3, 2) for _ in range(5000)]
    histogram = Histogram()
    histogram.add_all(values)
    for share in (0.001, 0.5, 0.95, 0.99, 1.0):
        exact = percentile(values, share)
        assert exact is not None
        assert exact <= histogram.percentile(share) <= exact * 1.0101
    assert (histogram.count, histogram.max, histogram.sum) == (5000, max(values), pytest.approx(sum(values)))
    assert histogram.percentile(1.0) == max(values)


def test_a_histogram_of_nothing_and_of_zeros() -> None:
    empty, zeros = Histogram(), Histogram()
    zeros.add_all([0.0, 0.0])
    assert empty.spread() == {"count": 0, "p50": None, "p95": None, "p99": None, "max": None}
    assert zeros.spread() == {"count": 2, "p50": 0.0, "p95": 0.0, "p99": 0.0, "max": 0.0}


def test_first_token_and_gaps() -> None:
    hearing = Hearing(10.0)
    for now, data in ((11.0, KEEPALIVE), (12.0, EVENT), (12.5, EVENT + EVENT), (13.5, KEEPALIVE), (14.5, EVENT)):
        hearing.heard(now, data)
    hearing.heard(20.0, b'data: {"choices":[],"usage":{}}\n\n')
    hearing.heard(21.0, DONE)
    assert hearing.first == 2.0
    assert list(hearing.gaps) == [0.5, 2.0]
    assert hearing.events == 4


def test_an_event_in_two_reads_is_one() -> None:
    hearing = Hearing(0.0)
    hearing.heard(1.0, EVENT)
    hearing.heard(2.0, EVENT[:10])
    hearing.heard(3.0, EVENT[10:])
    assert (hearing.first, list(hearing.gaps), hearing.events) == (1.0, [2.0], 2)


def test_of_a_session_each_answer_begins_anew() -> None:
    hearing = Hearing(0.0)
    hearing.attentive(1.0)
    for now in (1.5, 2.0):
        hearing.token(now)
    hearing.attentive(5.0)
    for now in (9.0, 9.5):
        hearing.token(now)
    assert (hearing.first, list(hearing.gaps), hearing.events) == (0.5, [0.5, 0.5], 4)


def test_tokens_are_as_many_as_the_answer_says() -> None:
    assert tokens_of(b'{"usage":{"prompt_tokens":5,"completion_tokens":7,"total_tokens":12}}', 0) == 7
    assert tokens_of(b'{"usage":{"output_tokens":1}} ... {"usage":{"output_tokens": 9}}', 3) == 9
    assert tokens_of(EVENT, 3) == 3


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (EVENT + DONE, ""),
        (EVENT, "cut without its end"),
        (EVENT + b'data: {"error":{"code":"worker_lost"}}\n\n' + DONE, "an error event"),
        (b'event: message_stop\ndata: {"type":"message_stop"}\n\n', ""),
        (b'event: response.completed\ndata: {"response":{"text":"' + b"x" * 9000 + b'"}}\n\n', ""),
    ],
)
def test_what_a_client_sees_of_a_stream(body: bytes, problem: str) -> None:
    assert problem_of(streams=True, status=200, body=body, broken="") == problem
    assert problem_of(streams=True, status=200, body=body, broken="gone") == "gone"
    assert problem_of(streams=True, status=503, body=body, broken="") == "status 503"


def test_records_come_back_whole_and_their_files_go(tmp_path: Path) -> None:
    writer, reader = RecordWriter(tmp_path, file_bytes=200), RecordReader(tmp_path)
    assert reader.read() == []
    written: list[Any] = [Began(at=1.5)]
    writer.write(written[0])
    assert reader.read() == written
    assert reader.read() == []
    for number in range(50):
        written.append(
            Answered(number=number, phase=0, late=0.1, body=bytes(number), first=None if number % 2 else 1.0)
        )
        writer.write(written[-1])
    written.append(Ended(sent=50, unsent=0, most_outstanding=3, seconds=1.0, processor_seconds=0.5))
    writer.write(written[-1])
    writer.close()
    found = [written[0]]
    while more := reader.read():
        found += more
    assert found == written
    assert len(list(tmp_path.iterdir())) == 1


def test_a_record_that_is_not_whole_yet_waits(tmp_path: Path) -> None:
    RecordWriter(tmp_path).write(Began(at=1.0))
    (path,) = tmp_path.iterdir()
    raw = path.read_bytes()
    path.write_bytes(b"")
    reader = RecordReader(tmp_path)
    for end in range(len(raw)):
        path.write_bytes(raw[:end])
        assert reader.read() == []
    path.write_bytes(raw)
    assert reader.read() == [Began(at=1.0)]


def answer(number: int = 0, **more: Any) -> Answered:
    more.setdefault("gaps", array("f", [0.1, 0.75]).tobytes())
    return Answered(number=number, **{"phase": 0, "late": 0.001, "total": 2.0, "first": 0.25, "tokens": 10, **more})


def figures(*fates: Fate, limits: dict[str, float] | None = None, sent: int | None = None) -> dict[str, Any]:
    scenario = parse(
        {"phases": [{"seconds": 10, "rate": 1}], "mix": {"chat": 1, "realtime": 0}, "limits": limits or {}}, name="it"
    )
    found = Figures(scenario)
    for number, fate in enumerate(fates):
        found.add("chat", fate, "overloaded" if fate is Fate.REFUSED else "a detail", answer(number))
    ended = Ended(
        sent=len(fates) if sent is None else sent,
        unsent=0,
        most_outstanding=2,
        seconds=5.0,
        processor_seconds=0.5,
    )
    return found.report(ended, [], about={"scenario": "it", "seed": 0, "checked": "bytes"})


def test_what_is_added_up() -> None:
    report = figures(Fate.GOOD, Fate.GOOD, Fate.LEFT, Fate.REFUSED)
    assert (report["requests"], report["good"], report["left"], report["lost"], report["wrong"]) == (4, 2, 1, 0, 0)
    assert report["refused"] == {"overloaded": 1}
    assert report["kinds"]["chat"] == report["all"]
    assert list(report["kinds"]) == ["chat"]
    assert report["all"]["failures"] == 1
    assert (report["all"]["tokens"], report["all"]["tokens_per_second"]) == (40, 8.0)
    assert report["all"]["ttft_seconds"]["count"] == 4
    assert report["all"]["total_seconds"] == {"count": 2, "p50": 2.0, "p95": 2.0, "p99": 2.0, "max": 2.0}
    assert report["all"]["itl_seconds"]["count"] == 8
    assert report["all"]["stall_seconds"] == {"count": 4, "p50": 0.75, "p95": 0.75, "p99": 0.75, "max": 0.75}
    assert report["generator"]["processor_share"] == 0.1
    assert report["passed"]
    assert "| chat | 4 | 1 | 8 | 4 | 250.0, 250.0 ms | 100.4, 750.0 ms | 2000.0, 2000.0 ms |" in "\n".join(
        table(report)
    )


@pytest.mark.parametrize("fate", [Fate.LOST, Fate.WRONG])
def test_without_a_limit_nothing_may_be_lost_or_wrong(fate: Fate) -> None:
    report = figures(Fate.GOOD, fate)
    assert failings(report) == [f"the limit {fate.value} is 0, and was broken: 1"]
    assert not report["passed"]
    assert report["problems"] == [f"{fate}: request 1, chat: a detail"]
    assert figures(Fate.GOOD, fate, limits={fate.value: 1})["passed"]


def test_a_request_that_has_no_end_at_all_is_lost() -> None:
    report = figures(Fate.GOOD, sent=3)
    assert (report["requests"], report["lost"]) == (3, 2)
    assert not report["passed"]


@pytest.mark.parametrize(
    ("name", "kept", "broken"),
    [
        ("refused", 1, 0),
        ("stalls", 2, 1),
        ("stall_max_seconds", 0.75, 0.74),
        ("ttft_p99_seconds", 0.25, 0.24),
        ("itl_max_seconds", 0.75, 0.7),
        ("total_p50_seconds", 2, 1.9),
        ("late_p99_seconds", 0.0011, 0.0009),
        ("tokens_per_second", 4, 4.1),
    ],
)
def test_limits(name: str, kept: float, broken: float) -> None:
    assert name in LIMITS
    fates = (Fate.GOOD, Fate.REFUSED)
    assert figures(*fates, limits={name: kept})["passed"]
    report = figures(*fates, limits={name: broken})
    assert not report["passed"]
    assert name in failings(report)[0]


def test_a_limit_on_what_did_not_occur_is_broken() -> None:
    report = figures(Fate.LEFT, limits={"total_p99_seconds": 10})
    assert failings(report) == ["the limit total_p99_seconds is 10, and was broken: there is none"]


def test_sessions_are_held_against_what_the_sim_says() -> None:
    known = SimAnswers(model="sim", seed=7, weights_bytes=65536)
    question = Question(path="/v1/realtime", manner=Manner.REALTIME, prompts=("one", "two"), tokens=4)
    first = known.text(render_chat([("user", "one")]), 4)
    second = known.text(render_chat([("user", "one"), ("assistant", first), ("user", "two")]), 4)
    judge = SimJudge(known, "sim")
    assert judge.judge(question, answer(status=101, said=[first, second])) == (Fate.GOOD, "")
    assert judge.judge(question, answer(status=101, said=[first, first]))[0] is Fate.WRONG
    assert judge.judge(question, answer(status=101, said=[first]))[0] is Fate.LOST
    assert judge.judge(question, answer(status=101, said=[first], broken="gone")) == (Fate.LOST, "gone")
    assert judge.judge(question, answer(status=429, broken="refused"))[0] is Fate.LOST


def event(name: str, text: str = "a") -> bytes:
    return b'data: {"id":"%s","created":1,"choices":[{"delta":{"content":"%s"}}]}\n\n' % (name.encode(), text.encode())


@pytest.mark.parametrize(
    ("body", "more", "fate"),
    [
        (event("x") + event("x") + DONE, {}, Fate.GOOD),
        (event("x") + event("y") + DONE, {}, Fate.WRONG),
        (event("x"), {}, Fate.LOST),
        (event("x"), {"left": True, "broken": "the client left"}, Fate.LEFT),
        (event("x") + b'data: {"error":{"code":"worker_lost"}}\n\n' + DONE, {}, Fate.LOST),
        (b'{"error":{"code":"overloaded"}}', {"status": 429, "retry_after": True}, Fate.REFUSED),
        (b"oh", {"status": 500}, Fate.LOST),
    ],
)
def test_answers_that_nobody_knows_are_judged_by_their_form(body: bytes, more: dict[str, Any], fate: Fate) -> None:
    question = Question(path="/v1/chat/completions", manner=Manner.STREAM, prompts=("a",), tokens=2)
    assert FormJudge().judge(question, answer(**{"body": body, "status": 200, **more}))[0] is fate
