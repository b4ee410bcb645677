"""Exact resume on real vLLM: an answer that is cut after k units and goes on at another engine is the uncut answer.

The rows are in ``resume_rows``; docs/resume.md has the table. A reference is made on one engine, and gone on with on
the other: ``k`` is none, the first unit, the middle one and all but the last; with HOTSPARE_TEST_LONG=1 every one
(``make test-long``).
"""

from __future__ import annotations

import json
import os
import re

import pytest

from tests.engine.vllm.resume_rows import CHAT, OTHER_ROWS, ROWS, WHOLE_ROWS, Row
from tests.engine.vllm.resuming import Answer, Client, Pair, cold, difference, framed_body, same_document
from tests.support.processes import until
from workers.resume import RESUME_CONTENT_TYPE

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

BY_NAME = {row.name: row for row in (*ROWS, *WHOLE_ROWS)}
LONG = os.environ.get("HOTSPARE_TEST_LONG") == "1"


def cuts(row: Row, units: int) -> list[int]:
    """After how many of that many units; 0 is a cut before the first."""
    chosen = range(units) if LONG else {0, 1, units // 2, units - 1, *row.cuts}
    return sorted(cut for cut in set(chosen) if 0 <= cut < units)


def reference(pair: Pair, row: Row) -> tuple[Client, Answer]:
    cold(pair.first)
    client = Client(row.path, row.request(), root=f"root-{row.name}")
    answer = client.ask(pair.first)
    assert answer.status == 200, answer.raw
    assert b" x=" not in answer.raw
    return client, answer


def check_stream(pair: Pair, row: Row) -> None:
    client, answer = reference(pair, row)
    units = answer.units
    client.read(*units)
    for cut in cuts(row, len(units)):
        cold(pair.second)
        again = Client(row.path, row.request(), root=client.root)
        again.read(*units[:cut])
        resumed = again.resume(pair.second)
        assert resumed.status == 200, (cut, resumed.raw)
        again.read(resumed.raw)
        # Cut before anything was said, an answer is a new one: made a moment later.
        made = _timeless if not cut else bytes
        if different := difference(made(again.seen), made(client.seen)):
            pytest.fail(f"cut after {cut} units: {different}")


def check_whole(pair: Pair, row: Row) -> None:
    client, answer = reference(pair, row)
    notes, body = framed_body(answer.raw)
    cold(pair.first)  # the prompt was cached by now, and usage would say so
    plain = pair.first.client.post(row.path, content=client.body, headers={"content-type": "application/json"})
    assert _nameless(plain.content) == _nameless(body)
    for cut in cuts(row, len(notes) + 1):
        cold(pair.second)
        again = Client(row.path, row.request(), root=client.root)
        again.read(*notes[:cut])
        resumed = again.resume(pair.second)
        assert resumed.status == 200, (cut, resumed.raw)
        _, resumed_body = framed_body(resumed.raw)
        made = _timeless if not cut else bytes
        assert same_document(made(resumed_body), made(body)), (cut, resumed_body, body)


def _timeless(body: bytes) -> bytes:
    return re.sub(rb'("created(?:_at)?"):\d+', rb"\1:0", body)


def _nameless(body: bytes) -> bytes:
    return re.sub(rb'"id":"[^"]*"', b'"id":""', _timeless(body))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_stream_goes_on_at_another_engine(resume_pair: Pair, row: Row) -> None:
    check_stream(resume_pair, row)


@pytest.mark.parametrize("row", WHOLE_ROWS, ids=lambda row: row.name)
def test_a_whole_answer_goes_on_at_another_engine(resume_pair: Pair, row: Row) -> None:
    check_whole(resume_pair, row)


@pytest.mark.parametrize("row", OTHER_ROWS, ids=lambda row: row.name)
def test_engines_of_another_kind(other_pair: Pair, row: Row) -> None:
    (check_stream if row.stream else check_whole)(other_pair, row)


def test_two_cuts_in_one_answer(resume_pair: Pair) -> None:
    client, answer = reference(resume_pair, BY_NAME["chat"])
    client.read(*answer.units)
    twice = Client(client.path, json.loads(client.body), root=client.root)
    twice.read(*answer.units[:3])
    cold(resume_pair.second)
    twice.read(*twice.resume(resume_pair.second).units[:3])
    cold(resume_pair.first)
    last = twice.resume(resume_pair.first)
    assert last.status == 200, last.raw
    twice.read(last.raw)
    assert not difference(twice.seen, client.seen)


def test_tokens_that_are_in_the_prefix_cache_already(resume_pair: Pair) -> None:
    """A hit beyond the prompt, as where the cache outlived the engine that was cut."""
    row = Row("warm", CHAT, {**BY_NAME["chat"].body, "max_tokens": 40, "ignore_eos": True})
    client, answer = reference(resume_pair, row)
    client.read(*answer.units)
    for _ in range(2):
        warm = Client(client.path, json.loads(client.body), root=client.root)
        warm.read(*answer.units[:36])
        warm.read(warm.resume(resume_pair.second).raw)
        assert not difference(warm.seen, client.seen)


@pytest.mark.parametrize("name", ["chat", "responses"])
def test_cached_tokens_are_those_of_the_first_attempt(other_pair: Pair, name: str) -> None:
    """The prompt is in the first engine's prefix cache, and not in the other's."""
    row = BY_NAME[name]
    text = "One, two, three, four. " * 30
    asked = {"input": text} if name == "responses" else {"messages": [{"role": "user", "content": text}]}
    body = {**row.body, **asked, **({} if name == "responses" else {"stream_options": {"include_usage": True}})}
    client = Client(row.path, {**row.request(), **body}, root="cached")
    client.ask(other_pair.first)
    answer = client.ask(other_pair.first)
    client.read(*answer.units)
    cached = re.search(rb'"cached_tokens":(\d+)', client.seen[client.seen.rindex(b'"usage"') :])
    assert cached is not None
    assert int(cached[1]) > 0
    cold(other_pair.second)
    again = Client(row.path, json.loads(client.body), root="cached")
    again.read(*answer.units[:3])
    resumed = again.resume(other_pair.second)
    assert resumed.status == 200, resumed.raw
    again.read(resumed.raw)
    assert not difference(again.seen, client.seen)


def test_a_stop_string_across_every_cut(resume_pair: Pair) -> None:
    row = BY_NAME["chat"]
    client, answer = reference(resume_pair, row)
    client.read(*answer.units)
    events = [json.loads(event[6:]) for event in client.seen.decode().split("\n\n") if event.startswith("data: {")]
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    stop = text[len(text) // 2 : len(text) // 2 + 9]  # of several tokens, some of them in part
    for more in ({"stop": [stop]}, {"stop": [stop], "include_stop_str_in_output": True}):
        check_stream(resume_pair, Row("stop", row.path, {**row.body, **more}, cuts=tuple(range(12))))


def test_unseeded_sampling_keeps_what_was_said_and_draws_the_rest_anew(resume_pair: Pair) -> None:
    more = {"temperature": 1.0, "n": 2, "ignore_eos": True, "stream_options": {"include_usage": True}}
    row = Row("unseeded", CHAT, {**BY_NAME["chat"].body, **more})
    client, answer = reference(resume_pair, row)
    client.read(*answer.units[:4])
    said = client.seen
    resumed = client.resume(resume_pair.second)
    assert resumed.status == 200, resumed.raw
    client.read(resumed.raw)
    assert client.seen.startswith(said)
    assert client.seen.endswith(b"data: [DONE]\n\n")
    assert b'"completion_tokens":20' in client.seen


def test_noted_logprobs_are_repeated_exactly(resume_pair: Pair) -> None:
    """At the end of a whole answer, digit for digit, whatever the other engine would have computed."""
    client, answer = reference(resume_pair, BY_NAME["whole_logprobs"])
    notes, body = framed_body(answer.raw)
    kept = max(1, len(notes) // 2)
    client.read(*notes[:kept])
    noted = client.splitter.log.rest.count(b",") + client.splitter.log.rest.count(b":")
    _, resumed = framed_body(client.resume(resume_pair.second).raw)
    got, wanted = (json.loads(text)["choices"][0]["logprobs"]["content"][:noted] for text in (resumed, body))
    assert noted
    assert got == wanted


def test_a_connection_that_breaks(resume_pair: Pair) -> None:
    """A real one, in the middle: the engine forgets the request, the other goes on."""
    row = Row("broken", CHAT, {**BY_NAME["chat"].body, "max_tokens": 60, "ignore_eos": True})
    client, answer = reference(resume_pair, row)
    client.read(*answer.units)
    cold(resume_pair.first)
    again = Client(client.path, json.loads(client.body), root=client.root)
    headers = again.headers(**{"content-type": "application/json"})
    with resume_pair.first.client.stream("POST", again.path, content=again.body, headers=headers) as stream:
        for part in stream.iter_raw():
            again.read(part)
            if again.splitter.log.events > 5:
                break
    until(lambda: not resume_pair.first.status()["busy"], saying="the request has ended there")
    resumed = again.resume(resume_pair.second)
    again.read(resumed.raw)
    made = _timeless
    assert not difference(made(again.seen), made(client.seen))


def test_a_client_that_leaves_while_it_is_resumed(resume_pair: Pair) -> None:
    row = Row("leaves", CHAT, {**BY_NAME["chat"].body, "max_tokens": 800, "ignore_eos": True})
    client = Client(row.path, row.request(), root="leaves")
    headers = client.headers(**{"content-type": "application/json"})
    with resume_pair.first.client.stream("POST", client.path, content=client.body, headers=headers) as stream:
        for part in stream.iter_raw():
            client.read(part)
            if client.splitter.log.events > 3:
                break
    headers = client.headers(**{"content-type": RESUME_CONTENT_TYPE})
    with resume_pair.second.client.stream("POST", client.path, content=client.resume_body(), headers=headers) as stream:
        assert stream.status_code == 200
        next(stream.iter_raw())
    until(lambda: not resume_pair.second.status()["busy"], saying="the resumed request has ended")


def test_two_attempts_that_meet_at_one_engine(resume_pair: Pair) -> None:
    """The first one's end may come late: both have the same id, and the engine must tell them apart."""
    client, answer = reference(resume_pair, BY_NAME["chat"])
    client.read(*answer.units)
    headers = client.headers(**{"content-type": "application/json"})
    with resume_pair.second.client.stream("POST", client.path, content=client.body, headers=headers) as first:
        parts = first.iter_raw()
        again = Client(client.path, json.loads(client.body), root=client.root)
        again.read(next(parts))
        second = Client(client.path, json.loads(client.body), root=client.root)
        second.read(*answer.units[:2])
        second.read(second.resume(resume_pair.second).raw)
        again.read(b"".join(parts))
    for attempt in (again, second):
        assert not difference(_timeless(attempt.seen), _timeless(client.seen))


def test_clock_and_ids_are_the_answers_own(resume_pair: Pair) -> None:
    """The same on both engines for one answer, and others for another; nobody's without one."""
    said = {
        root: [engine.control("names", root).json()["answer"] for engine in resume_pair] for root in ("one", "two", "")
    }
    ids = {root: [names[2:] for names in both] for root, both in said.items()}
    assert ids["one"][0] == ids["one"][1]
    assert ids["two"][0] == ids["two"][1]
    every = [name for names in (ids["one"][0], ids["two"][0], *ids[""]) for name in names]
    assert len(set(every)) == len(every)
    assert all(float(time).is_integer() for names in said["one"] for time in names[:2])
    assert not all(float(time).is_integer() for names in said[""] for time in names[:2])


@pytest.mark.parametrize(("logprobs", "most"), [(0, 10.0), (3, 20.0)], ids=["tokens", "logprobs"])
def test_what_a_note_costs(resume_pair: Pair, logprobs: int, most: float) -> None:
    """Microseconds of the engine's process a unit."""
    answer = resume_pair.first.control("cost", str(logprobs))
    assert answer.status_code == 200, answer.text
    print(f"a note: {answer.json()['answer']:.1f} us")
    assert answer.json()["answer"] < most
