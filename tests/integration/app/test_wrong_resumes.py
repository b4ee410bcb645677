"""Workers that are asked to go on with an answer and do something else: nothing of it reaches the client, and another
worker is asked."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.app.conftest import run_gateway
from tests.integration.app.fake_worker import DONE, STREAM_HEAD, Behaviour, Call, answers, chunk, event
from tests.integration.app.generating import FRAMED_HEAD, NOTED_HEAD, Story, is_resume
from tests.integration.app.test_resume import error_of, sample
from workers.resume import encode_framed

STORY = Story()
CUT = 2
FRAMED = encode_framed(200, [(b"content-type", b"application/json")], STORY.document)


def sends(head: bytes, *pieces: bytes) -> Behaviour:
    async def behave(call: Call) -> None:
        await call.send(head)
        for piece in pieces:
            if piece:
                await call.send(chunk(piece))
        await call.send(b"0\r\n\r\n")

    return behave


def units(*numbers: int) -> list[bytes]:
    return [STORY.unit(number) for number in numbers]


WRONG: dict[str, Behaviour] = {
    "from the start": sends(NOTED_HEAD, *units(0, 1, 2, 3, 4, 5)),
    "in one read": sends(NOTED_HEAD, b"".join(units(0, 1, 2, 3, 4, 5))),
    "one unit again": sends(NOTED_HEAD, *units(1, 2, 3, 4, 5)),
    "one unit left out": sends(NOTED_HEAD, *units(4, 5)),
    "only the end": sends(NOTED_HEAD, *units(5)),
    "another checksum": sends(NOTED_HEAD, b": t e=4 n=1 c=1 g=0:5\n" + event("x"), b": t e=5 n=1 c=2\n" + DONE),
    "more events than counted": sends(NOTED_HEAD, units(3)[0] + event("x"), *units(4, 5)),
    "fewer events than counted": sends(NOTED_HEAD, b": t e=9 n=6 c=1 g=0:5\n" + event("x") + DONE),
    "events of no note": sends(NOTED_HEAD, b": t e=3 n=0 c=1 g=0:5\n" + event("x") + DONE),
    "without notes": sends(NOTED_HEAD, event("x"), DONE),
    "a whole answer": sends(FRAMED_HEAD, b": t e=0 n=0 c=0 g=0:5\n", FRAMED),
    "a whole answer without a frame": answers(),
    **{str(status): answers(status) for status in (302, 401, 403, 405, 408, 409, 425, 429, 500, 503)},
    "without the header": sends(STREAM_HEAD, event("x"), DONE),
}


def teller(wrong: Behaviour) -> Behaviour:
    """Begins the story, and goes on with it as it should not."""

    async def behave(call: Call) -> None:
        await (wrong if is_resume(call) else STORY.told(cut=CUT))(call)

    return behave


def in_turn(*behaviours: Behaviour) -> Behaviour:
    """For all workers together: whichever is asked next does the next of these."""
    left = iter(behaviours)

    async def behave(call: Call) -> None:
        await next(left)(call)

    return behave


@pytest.mark.parametrize("wrong", WRONG.values(), ids=list(WRONG))
async def test_a_worker_that_goes_on_elsewhere_is_left_for_another(workers: Any, wrong: Behaviour) -> None:
    started = await workers("pod-0", "pod-1", "pod-2")
    behave = in_turn(STORY.told(cut=CUT), wrong, STORY.told())
    for worker in started:
        worker.default = behave
    async with run_gateway(*started) as running:
        assert (await running.chat(stream=True)).content == STORY.stream
        calls = [call for worker in started for call in worker.calls]
        assert sorted(map(is_resume, calls)) == [False, True, True]
        assert await sample(running, "hotspare_lost_requests_total") == 0


@pytest.mark.parametrize("wrong", WRONG.values(), ids=list(WRONG))
async def test_where_all_go_on_elsewhere_the_client_is_told(workers: Any, wrong: Behaviour) -> None:
    started = await workers("pod-0", "pod-1", "pod-2", "pod-3", "pod-4")
    for worker in started:
        worker.default = teller(wrong)
    async with run_gateway(*started) as running:
        content = (await running.chat(stream=True)).content
        assert content.startswith(STORY.units[0] + STORY.units[1] + b"data: {")
        assert error_of(content)["code"] == "worker_lost"
        assert content.count(b"\n\n") == 3 + 2  # what had been delivered, the error, and the end


@pytest.mark.parametrize("status", [401, 403, 408, 425, 429, 503])
async def test_who_turns_a_resume_away_costs_nothing(workers: Any, status: int) -> None:
    started = await workers(*(f"pod-{number}" for number in range(7)))
    away = answers(status, x_hotspare_reselect=1)
    behave = in_turn(STORY.told(cut=CUT), *([away] * 5), STORY.told())
    for worker in started:
        worker.default = behave
    async with run_gateway(*started, resume_limit=1) as running:
        assert (await running.chat(stream=True)).content == STORY.stream


@pytest.mark.parametrize("first", [True, False])
async def test_a_whole_answer_is_no_stream(workers: Any, first: bool) -> None:
    """Neither to begin with nor to go on with, however often."""
    started = await workers("pod-0", "pod-1", "pod-2")
    framed = sends(FRAMED_HEAD, b": t e=0 n=0 c=0 g=0:5\n", FRAMED)
    for worker in started:
        worker.default = framed if first else teller(framed)
    async with run_gateway(*started, heartbeat_timeout_seconds=1, wait_for_worker_seconds=1) as running:
        answer = await running.chat(stream=True)
        if first:
            assert answer.status_code >= 500
        else:
            assert error_of(answer.content)["code"] in ("worker_lost", "no_worker")


NOTE = b": t e=0 n=0 c=0 g=0:%d t=1764450000\n"
NO_ANSWERS = {
    "another status": encode_framed(204, [], b"{}"),
    "two statuses": FRAMED.replace(b"status: 200\n", b"status: 200\nstatus: 500\n"),
    "an interim one": encode_framed(100, [], b"{}"),
    "no status of HTTP": encode_framed(999, [], b"{}"),
    "a coding": encode_framed(200, [(b"content-encoding", b"gzip")], STORY.document),
    "a stream": encode_framed(200, [(b"content-type", b"text/event-stream")], STORY.document),
    "a line end in a header": FRAMED.replace(b"data:", b"header: x-a: b\rset-cookie: c=d\ndata:", 1),
    "a zero in a header": FRAMED.replace(b"data:", b"header: x-a: b\0\ndata:", 1),
    "a name that is none": FRAMED.replace(b"data:", b"header: content-length\t: 5\ndata:", 1),
}


@pytest.mark.parametrize("frame", NO_ANSWERS.values(), ids=list(NO_ANSWERS))
@pytest.mark.parametrize("split", [False, True])
async def test_a_frame_around_no_answer_ends_the_request_though_its_notes_are_new(
    workers: Any, frame: bytes, split: bool
) -> None:
    started = await workers(*(f"pod-{number}" for number in range(8)))
    asked = 0

    async def behave(call: Call) -> None:
        nonlocal asked
        asked += 1
        pieces = frame.split(b"header:", 1) if split and b"header:" in frame else [frame]
        await call.send(FRAMED_HEAD + chunk(NOTE % asked) + chunk(pieces[0]))
        for piece in pieces[1:]:
            await call.send(chunk(b"header:" + piece))
        await call.send(b"0\r\n\r\n")

    for worker in started:
        worker.default = behave
    async with run_gateway(*started) as running:
        answer = await running.chat()
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "bad_answer")
        assert "set-cookie" not in answer.headers
        assert asked == 4


async def test_headers_of_a_frame_pass_as_those_of_a_plain_answer(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    headers = [
        (b"content-type", b"application/json"),
        (b"transfer-encoding", b"chunked"),
        (b"content-length", b"5"),
        (b"Set-Cookie", b"a=b"),
        (b"connection", b"x-hop"),
        (b"x-hop", b"1"),
        (b"x-mine", b"2"),
    ]
    worker.default = sends(FRAMED_HEAD, NOTE % 1, encode_framed(200, headers, STORY.document))
    async with run_gateway(worker) as running:
        answer = await running.chat()
        assert (answer.content, answer.headers["x-mine"]) == (STORY.document, "2")
        assert answer.headers["content-length"] == str(len(STORY.document))
        assert not {"transfer-encoding", "set-cookie", "x-hop"} & set(answer.headers)
