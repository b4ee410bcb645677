"""What becomes of answers whose worker breaks: they are gone on with, run again, or ended with an error."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from app.relay import deadlines
from app.relay.kept import Kept
from app.telemetry.access_log import AccessLog
from tests.integration.app.conftest import Running, one_shell, run_gateway
from tests.integration.app.fake_worker import (
    Call,
    FakeWorker,
    answers,
    chunk,
    event,
    hangs,
    reselects,
    sends_and_cuts,
    streams,
)
from tests.integration.app.generating import FRAMED_HEAD, Story, is_resume, refuses
from workers.resume import decode_resume, encode_framed, note

STORY = Story()
UNITS = len(STORY.units)


def error_of(content: bytes) -> dict[str, Any]:
    """The error that ends a stream."""
    *_, error, done, nothing = content.split(b"\n\n")
    assert (done, nothing) == (b"data: [DONE]", b"")
    found: dict[str, Any] = json.loads(error.removeprefix(b"data: "))["error"]
    return found


async def sample(running: Running, name: str, *labels: str) -> float:
    """The sum of the samples of a metric that have these labels."""
    text = (await running.client.get("/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    return sum(float(line.rpartition(" ")[2]) for line in lines if all(label in line for label in labels))


async def promote(worker: FakeWorker) -> None:
    """The pod's engine is killed, and its shadow takes over."""
    await worker.die()
    worker.epoch(worker.line.epoch + 1)
    await worker.start()


@pytest.mark.parametrize("cut", range(UNITS + 1))
async def test_a_stream_goes_on_elsewhere_byte_for_byte(workers: Any, cut: int) -> None:
    one, two = await workers("pod-0", "pod-1")
    one.will(STORY.told(cut=cut, half=30 if cut < UNITS else 0))
    two.default = STORY.told()
    async with run_gateway(one, two) as running:
        answer = await running.chat(stream=True)
        assert answer.content == STORY.stream
        if cut >= UNITS:  # its end had been delivered
            assert not two.calls
            return
        (first,), (second,) = one.calls, two.calls
        assert is_resume(second) is (cut > 0)
        assert second.headers["x-hotspare-request-id"] == first.headers["x-hotspare-request-id"]
        assert second.headers["x-hotspare-stream"] == "1"
        if cut:
            resume, body = decode_resume(second.body)
            assert body == first.body
            assert resume.attempt == 2
            assert second.headers["content-length"] == str(len(second.body))


async def test_two_cuts_in_one_request(workers: Any) -> None:
    one, two = await workers("pod-0", "pod-1")
    one.will(STORY.told(cut=1), STORY.told())
    two.will(STORY.told(cut=4, reset=True))
    async with run_gateway(one, two, heartbeat_timeout_seconds=1) as running:
        assert (await running.chat(stream=True)).content == STORY.stream
        assert [is_resume(call) for call in (*one.calls, *two.calls)] == [False, True, True]
        assert decode_resume(one.calls[1].body)[0].attempt == 3
        assert await sample(running, "hotspare_resumes_total", 'outcome="resumed"', 'reason="connection"') == 2
        assert await sample(running, "hotspare_resume_tokens_total") == 2 * (1 + 4)
        assert await sample(running, "hotspare_client_stall_seconds_count") == 2
        assert await sample(running, "hotspare_lost_requests_total") == 0
        assert await sample(running, "hotspare_resume_kept_bytes") == 0


async def test_the_only_pod_goes_on_after_its_promotion(workers: Any) -> None:
    """The client hears from us meanwhile."""
    (worker,) = await workers("pod-0")
    worker.default = STORY.told(wait=2)
    async with run_gateway(worker, sse_keepalive_seconds=0.1) as running, running.stream() as answer:
        pieces = answer.aiter_raw()
        seen = b""
        while seen != STORY.units[0] + STORY.units[1]:
            seen += (await anext(pieces)).replace(b": keep-alive\n\n", b"")
        await worker.die()
        assert await anext(pieces) == b": keep-alive\n\n"
        worker.epoch(2)
        worker.default = STORY.told()
        await worker.start()
        rest = b"".join([piece async for piece in pieces]).replace(b": keep-alive\n\n", b"")
        assert seen + rest == STORY.stream
        assert [is_resume(call) for call in worker.calls] == [False, True]


@pytest.mark.parametrize("comes_back", [True, False])
async def test_the_wait_of_a_begun_stream_has_keep_alives_of_its_own(
    workers: Any, monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    """They come at the pace of those that wait from the break on, not when the next one of a running stream was due."""
    monkeypatch.setattr(deadlines, "WAITING_KEEPALIVE_SECONDS", 0.1)
    (worker,) = await workers("pod-0")
    worker.default = STORY.told(wait=2)
    wait = 60 if comes_back else 3
    async with run_gateway(worker, resume_wait_seconds=wait) as running, running.stream() as answer:
        pieces = answer.aiter_raw()
        seen = b""
        while seen != STORY.units[0] + STORY.units[1]:
            seen += await anext(pieces)
        await worker.die()
        async with asyncio.timeout(5):
            for _ in range(3):
                assert await anext(pieces) == b": keep-alive\n\n"
        if comes_back:
            worker.epoch(2)
            worker.default = STORY.told()
            await worker.start()
        rest = b"".join([piece async for piece in pieces]).replace(b": keep-alive\n\n", b"")
        if comes_back:
            assert seen + rest == STORY.stream
        else:
            assert error_of(b"\n\n" + rest)["code"] == "no_worker"


async def test_nothing_is_tried_for_longer_than_the_wait(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    worker.will(STORY.told(cut=2))
    async with run_gateway(worker, resume_wait_seconds=0.3, wait_for_worker_seconds=20) as running:
        worker.heartbeat = False
        request = asyncio.create_task(running.chat(stream=True))
        await worker.call()
        worker.stop_listening()
        answer = await request
        assert answer.content.startswith(STORY.units[0] + STORY.units[1] + b"data: {")
        error = error_of(answer.content)
        assert error["code"] == "no_worker"
        assert "This answer was cut off" in error["message"]
        assert "within 0.3 s" in error["message"]
        assert await sample(running, "hotspare_refused_requests_total") == 0  # it had been let in
        assert await sample(running, "hotspare_lost_requests_total", 'reason="no_worker"') == 1
        assert await sample(running, "hotspare_resumes_total", 'outcome="ended"') == 1


async def test_a_silent_worker_is_left_and_its_answer_gone_on_with(workers: Any) -> None:
    one, two = await workers("pod-0", "pod-1")
    one.will(STORY.told(wait=2))
    two.default = STORY.told()
    async with run_gateway(one, two, stall_timeout_seconds=0.3) as running:
        assert (await running.chat(stream=True)).content == STORY.stream
        assert is_resume(two.calls[0])
        assert await sample(running, "hotspare_resumes_total", 'reason="silence"', 'outcome="resumed"') == 1


# Whole answers


async def test_a_whole_answer_behind_notes_is_an_ordinary_one(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    worker.default = STORY.told()
    async with run_gateway(worker) as running:
        answer = await running.chat()
        assert (answer.status_code, answer.content) == (200, STORY.document)
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-from"] == "pod-0"
        assert answer.headers["content-length"] == str(len(STORY.document))
        assert "x-hotspare-stream" not in answer.headers
        assert "cache-control" not in answer.headers
        await running.chat()
        assert len({id(call.writer) for call in worker.calls}) == 1  # its connection is of use afterwards


@pytest.mark.parametrize("cut", range(UNITS + 1))
async def test_a_whole_answer_goes_on_elsewhere(workers: Any, cut: int) -> None:
    one, two = await workers("pod-0", "pod-1")
    one.will(STORY.told(cut=cut))
    two.default = STORY.told()
    async with run_gateway(one, two) as running:
        answer = await running.chat()
        assert (answer.status_code, answer.content) == (200, STORY.document)
        assert is_resume(two.calls[0]) is (cut > 0)
        if cut:
            assert len(decode_resume(two.calls[0].body)[0].outputs) == cut


async def test_notes_of_a_whole_answer_are_signs_of_life_and_comments_are_none(workers: Any) -> None:
    one, two = await workers("pod-0", "pod-1")
    limit = 2.5

    async def slowly(call: Any) -> None:
        """For longer than the limit, with pauses that are far from it."""
        await call.send(FRAMED_HEAD)
        clock = asyncio.get_running_loop().time
        until = clock() + 1.2 * limit
        while clock() < until:
            await asyncio.sleep(limit / 20)
            await call.send(chunk(note(events=0, new=0, crc=0, rest=f"g={STORY.tokens(0)}")))
        await call.send(chunk(encode_framed(200, [(b"content-type", b"application/json")], STORY.document)))
        await call.send(b"0\r\n\r\n")

    async def babbles(call: Any) -> None:
        await call.send(FRAMED_HEAD)
        while not call.closed.is_set():
            await call.send(chunk(b": ping\n\n"))
            await asyncio.sleep(limit / 20)

    one.will(slowly)
    two.default = babbles
    async with run_gateway(one, two, stall_timeout_seconds=limit, first_byte_timeout_seconds=limit) as running:
        first = await running.chat()
        assert (first.content, len(one.calls)) == (STORY.document, 1)
        one.default = STORY.told()
        for _ in range(2):
            assert (await running.chat()).content == STORY.document
        assert two.calls  # it was asked, and left
        assert all(call.closed.is_set() for call in two.calls)


async def test_an_answer_that_is_whole_at_once_needs_no_frame(workers: Any) -> None:
    """Also one that a worker had only to finish."""
    one, two = await workers("pod-0", "pod-1")
    one.will(STORY.told(cut=2))
    two.default = answers()
    async with run_gateway(one, two) as running:
        answer = await running.chat()
        assert answer.json()["choices"][0]["message"]["content"] == "from pod-1"
        assert is_resume(two.calls[0])


@pytest.mark.parametrize("parts", [1, 5])
async def test_a_large_framed_answer_is_passed_on_as_it_comes(workers: Any, parts: int) -> None:
    (worker,) = await workers("pod-0")
    document = json.dumps({"text": "x" * 20_000}).encode()
    frame = encode_framed(200, [(b"content-type", b"application/json")], document)
    step = len(frame) // parts + 1
    pieces = [frame[i : i + step] for i in range(0, len(frame), step)]

    async def large(call: Any) -> None:
        await call.send(FRAMED_HEAD + chunk(note(events=0, new=0, crc=0, rest="g=0:1")))
        for piece in pieces:
            await call.send(chunk(piece))
            await asyncio.sleep(0)
        await call.send(b"0\r\n\r\n")

    worker.default = large
    async with run_gateway(worker, max_held_bytes=1024) as running:
        answer = await running.chat()
        assert (answer.status_code, answer.content) == (200, document)


@pytest.mark.parametrize(
    "data",
    [
        event("x"),
        b"event: body\nstatus: 204\ndata: \n\n",
        encode_framed(200, [(b"content-type", b"text/html")], b"<p>"),
        encode_framed(200, [(b"content-type", b"application/json")], b"no JSON"),
        b": t e=x\n",
        b": t e=0 n=0 c=0 g=0:1\n",
    ],
)
async def test_what_is_no_frame_is_no_answer(workers: Any, data: bytes) -> None:
    one, two = await workers("pod-0", "pod-1")
    one.default = sends_and_cuts(FRAMED_HEAD + chunk(data) + b"0\r\n\r\n")
    two.default = STORY.told()
    async with run_gateway(one, two) as running:
        assert (await running.chat()).content == STORY.document


async def test_an_error_in_a_frame_is_the_answer(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    body = json.dumps({"error": {"message": "no", "type": "x", "param": None, "code": "mine"}}).encode()
    frame = encode_framed(400, [(b"content-type", b"application/json")], body)
    worker.default = sends_and_cuts(
        FRAMED_HEAD + chunk(note(events=0, new=0, crc=0, rest="g=0:1") + frame) + b"0\r\n\r\n"
    )
    async with run_gateway(worker) as running:
        answer = await running.chat()
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "mine")


# What cannot be resumed


@pytest.mark.parametrize(("status", "code"), [(409, "resume_unsupported"), (400, "invalid_resume"), (415, "x")])
async def test_a_refused_resume_ends_a_stream_of_which_something_was_delivered(
    workers: Any, status: int, code: str
) -> None:
    one, two = await workers("pod-0", "pod-1")
    one.will(STORY.told(cut=2))
    two.default = refuses(status, code)
    async with run_gateway(one, two) as running:
        content = (await running.chat(stream=True)).content
        assert content.startswith(STORY.units[0] + STORY.units[1] + b"data: {")
        assert error_of(content)["code"] == "worker_lost"
        assert len(two.calls) == 1
        cause = "resume_unsupported" if status == 409 else f"status_{status}"
        assert await sample(running, "hotspare_resume_refusals_total", f'cause="{cause}"') == 1
        assert await sample(running, "hotspare_resumes_total", 'outcome="refused"') == 1
        assert await sample(running, "hotspare_lost_requests_total", 'reason="refused"') == 1


@pytest.mark.parametrize(("status", "code"), [(409, "resume_unsupported"), (400, "invalid_resume")])
async def test_after_a_refused_resume_a_whole_answer_is_made_anew(workers: Any, status: int, code: str) -> None:
    one, two = await workers("pod-0", "pod-1")
    one.will(STORY.told(cut=2))
    two.will(refuses(status, code), STORY.told())
    async with run_gateway(one, two) as running:
        answer = await running.chat()
        assert (answer.status_code, answer.content) == (200, STORY.document)
        assert [is_resume(call) for call in two.calls] == [True, False]
        assert two.calls[1].body == one.calls[0].body
        assert await sample(running, "hotspare_retries_total", 'route="chat"') == 1
        assert await sample(running, "hotspare_lost_requests_total") == 0


async def test_what_the_notes_forbid_is_not_resumed(workers: Any, caplog: pytest.LogCaptureFixture) -> None:
    one, two = await workers("pod-0", "pod-1")
    never = Story(said="x=multi_prompt")
    one.will(never.told(cut=2))
    two.default = STORY.told()
    async with run_gateway(one, two) as running:
        content = (await running.chat(stream=True)).content
        assert error_of(content)["code"] == "worker_lost"
        assert "go on exactly" in error_of(content)["message"]
        assert [line for line in caplog.messages if "lost=engine:multi_prompt attempts=1 request_id=" in line]
        assert not two.calls
        assert await sample(running, "hotspare_unresumable_requests_total", 'reason="engine"') == 1
        await promote(one)
        one.will(never.told(cut=2))
        while not any(call.worker is one for call in one.calls[1:]):
            assert (await running.chat()).content == STORY.document  # a whole answer is made anew
        assert not any(is_resume(call) for call in (*one.calls, *two.calls))


LONG = Story([[event(f"{number}")] for number in range(200)])


@pytest.mark.parametrize(
    ("settings", "reason"), [({"resume_max_tokens": 40}, "tokens"), ({"resume_body_bytes": 60}, "body")]
)
async def test_beyond_the_limits_nothing_is_kept(workers: Any, settings: dict[str, int], reason: str) -> None:
    one, two = await workers("pod-0", "pod-1")
    one.will(LONG.told(wait=190, cut=190))
    async with run_gateway(one, two, **settings) as running:
        async with running.stream(padding="x" * 100) as answer:
            seen = b""
            async for piece in answer.aiter_raw():
                seen += piece
                if seen == b"".join(LONG.units[:190]):
                    assert running.gateway.relay.kept_bytes == 0
                    one.calls[0].go.set()
        assert error_of(seen)["code"] == "worker_lost"
        assert not two.calls
        assert await sample(running, "hotspare_unresumable_requests_total", f'reason="{reason}"') == 1
        assert await sample(running, "hotspare_lost_requests_total", f'reason="{reason}"') == 1


async def test_what_is_kept_is_accounted_and_let_go(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    worker.will(LONG.told(wait=100))
    async with run_gateway(worker) as running:
        async with running.stream(padding="x" * 1000) as answer:
            async for piece in answer.aiter_raw():
                if event("99") in piece:
                    break
            kept = await sample(running, "hotspare_resume_kept_bytes")
            assert 1000 + 100 * 8 < kept < 1200 + 100 * 12
        await running.until(lambda: running.gateway.relay.kept_bytes == 0)


async def test_without_resume_everything_is_as_before(workers: Any) -> None:
    one, two = await workers("pod-0", "pod-1")
    one.default = streams(event("a"), end=b"")
    async with run_gateway(one, two, resume_limit=0) as running:
        for _ in range(2):
            content = (await running.chat(stream=True)).content
            if content.startswith(event("a")):
                assert error_of(content)["code"] == "worker_lost"
                assert "resume_limit is 0" in error_of(content)["message"]
        assert await sample(running, "hotspare_lost_requests_total", 'reason="off"') == 1
        assert all("x-hotspare-stream" not in call.headers for call in (*one.calls, *two.calls))
        one.default = sends_and_cuts(b"", reset=True)
        await promote(one)
        assert (await running.chat()).status_code == 200


async def test_without_resume_a_request_is_lost_after_three_runs(workers: Any) -> None:
    started = await workers("pod-0", "pod-1", "pod-2", "pod-3")
    for worker in started:
        worker.default = sends_and_cuts(b"", reset=True)
    async with run_gateway(*started, resume_limit=0) as running:
        answer = await running.chat(stream=True)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "worker_lost")
        assert answer.json()["error"]["message"].startswith("3 workers were lost before any answer (")
        assert "resume_limit is 0" in answer.json()["error"]["message"]
        assert await sample(running, "hotspare_lost_requests_total", 'reason="limit"') == 1
        assert await sample(running, "hotspare_retries_total") == 2


@one_shell
async def test_what_is_counted_as_a_run_was_sent(workers: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A worker that turns a resume away has not run it, and a wait in vain is no run either."""
    one, two = await workers("pod-0", "pod-1")
    one.will(STORY.told(cut=2))
    two.default = reselects()
    written: list[bytes] = []
    async with run_gateway(one, two, resume_wait_seconds=0.3) as running:
        running.gateway.intake.accounts.access_log = AccessLog(written.append, "json")
        one.heartbeat = False
        request = asyncio.create_task(running.chat(stream=True))
        await one.call()
        one.stop_listening()
        assert error_of((await request).content)["code"] == "no_worker"
        assert two.calls
        document = json.loads(written[0])
        assert (document["lost"], document["error"]) == ("no_worker", "no_worker")
        assert {"resumes", "retries", "attempts"}.isdisjoint(document)
        (line,) = [record for record in caplog.records if record.name == "app.telemetry.lost_log"]
        assert line.levelname == "WARNING"
        assert "lost=no_worker attempts=1 request_id=" in line.getMessage()


# Budgets


async def test_a_stream_that_makes_progress_is_never_given_up(workers: Any) -> None:
    one, two = await workers("pod-0", "pod-1")
    one.default = two.default = STORY.told()
    for cut in (1, 2, 4, 5):  # the third unit has no events
        (one if cut in (1, 4) else two).will(STORY.told(cut=cut))
    async with run_gateway(one, two, resume_limit=1) as running:
        assert (await running.chat(stream=True)).content == STORY.stream
        assert len(one.calls) + len(two.calls) == 5


@one_shell
async def test_who_gains_nothing_is_given_up_after_so_many(workers: Any) -> None:
    started = await workers("pod-0", "pod-1", "pod-2", "pod-3", "pod-4", "pod-5")
    for worker in started:
        worker.default = STORY.told(cut=2)
    async with run_gateway(*started) as running:
        content = (await running.chat(stream=True)).content
        assert error_of(content)["code"] == "worker_lost"
        calls = [call for worker in started for call in worker.calls]
        assert sorted(map(is_resume, calls)) == [False, True, True, True, True]
        assert "4 in a row brought no more of it" in error_of(content)["message"]
        assert await sample(running, "hotspare_resumes_total", 'outcome="broken"') == 4
        assert await sample(running, "hotspare_lost_requests_total", 'reason="limit"') == 1


async def test_reselect_costs_a_resume_nothing(workers: Any) -> None:
    one, two, three = await workers("pod-0", "pod-1", "pod-2")
    one.will(STORY.told(cut=2))
    two.default = reselects()
    three.default = STORY.told()
    async with run_gateway(one, two, three, resume_limit=1) as running:
        assert (await running.chat(stream=True)).content == STORY.stream
        assert decode_resume(three.calls[0].body)[0].attempt == 2


@pytest.mark.parametrize("behaviour", [answers(500), streams(event("new"))])
async def test_a_worker_that_answers_a_resume_with_something_else_is_left(workers: Any, behaviour: Any) -> None:
    one, two, three = await workers("pod-0", "pod-1", "pod-2")
    one.will(STORY.told(cut=2))
    two.default = behaviour
    three.default = STORY.told()
    async with run_gateway(one, two, three) as running:
        assert (await running.chat(stream=True)).content == STORY.stream


# Ends


async def test_a_client_that_leaves_in_the_middle_of_a_resume(workers: Any) -> None:
    one, two = await workers("pod-0", "pod-1")
    one.will(STORY.told(cut=2))
    two.default = hangs
    async with run_gateway(one, two) as running:
        async with running.stream() as answer:
            pieces = answer.aiter_raw()
            await anext(pieces)
            second = await two.call()
        await asyncio.wait_for(second.closed.wait(), 5)
        await running.until(lambda: not running.gateway.admission.inflight)
        assert running.gateway.relay.kept_bytes == 0
        assert await sample(running, "hotspare_resumes_total", 'outcome="ended"') == 1
        assert await sample(running, "hotspare_lost_requests_total") == 0


async def test_a_client_that_leaves_while_its_answer_waits_for_a_worker(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    worker.will(STORY.told(wait=2))
    async with run_gateway(worker) as running:
        async with running.stream() as answer:
            pieces = answer.aiter_raw()
            await anext(pieces)
            await worker.die()
            await running.until(lambda: running.gateway.queue.waiting == 1)
        await running.until(lambda: not running.gateway.admission.inflight and not running.gateway.queue.waiting)
        await worker.start()


async def test_realtime_responses_go_on(workers: Any) -> None:
    from tests.integration.app.test_realtime import plain

    one, two = await workers("pod-0", "pod-1")
    one.will(STORY.told(cut=2))
    two.default = STORY.told()
    async with run_gateway(one, two) as running, plain(running) as session:
        await session.ask()
        done, _ = await session.until("response.done")
        assert done["response"]["status"] == "completed", done
        assert done["response"]["output"][0]["content"][0]["text"] == "abcde"
        assert is_resume(two.calls[0])


@pytest.mark.parametrize("status", [503, 401])
@pytest.mark.parametrize("notes", [0, 2])
async def test_a_worker_that_turns_away_what_it_has_begun_has_broken(workers: Any, notes: int, status: int) -> None:
    """What it generated is gone on with, once: the next one's notes do not come behind a copy of them."""
    one, two = await workers("pod-0", "pod-1")
    started: list[Call] = []

    async def turns_away(call: Call) -> None:
        await call.send(FRAMED_HEAD)
        for number in range(notes):
            await call.send(chunk(STORY._note(number)))
        headers = [(b"content-type", b"application/json"), (b"x-hotspare-reselect", b"1")]
        error = b'{"error":{"message":"gone","type":"server_error","param":null,"code":"engine_dead"}}'
        await call.send(chunk(encode_framed(status, headers, error)))
        await call.send(b"0\r\n\r\n")

    async def then(call: Call) -> None:
        started.append(call)
        await (turns_away if len(started) == 1 else STORY.told(cut=3 if len(started) == 2 else None))(call)

    one.default = two.default = then
    async with run_gateway(one, two) as running:
        assert (await running.chat()).content == STORY.document
        tokens = [decode_resume(call.body)[0].tokens if is_resume(call) else 0 for call in started]
        assert tokens == ([0, 0, 6] if not notes else [0, 4, 6])
        assert await sample(running, "hotspare_resumes_total", 'outcome="refused"') == 0


@one_shell
async def test_notes_that_are_not_those_that_came_are_not_gone_on_with(
    workers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If ever the log of an earlier attempt were kept, a whole answer would run again, not go on from both."""
    one, two = await workers("pod-0", "pod-1")
    monkeypatch.setattr(Kept, "clear", lambda self: None)
    started: list[Call] = []

    async def then(call: Call) -> None:
        started.append(call)
        behaviours = (STORY.told(cut=2), refuses(), STORY.told(cut=3), STORY.told())
        await behaviours[len(started) - 1](call)

    one.default = two.default = then
    async with run_gateway(one, two) as running:
        assert (await running.chat()).content == STORY.document
        assert [is_resume(call) for call in started] == [False, True, False, False]
