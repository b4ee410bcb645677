"""Recorded answers: units behind notes, frames, replays; the application is a small one that pulls from a script."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from prometheus_client import REGISTRY

from app.openai.units import UnitSplitter
from tests.support.asgi import AsgiAnswer
from workers.asgi import UNRESUMABLE, Message, Receive, Scope, Send
from workers.recorded import RecordedApp
from workers.recorder import RECORDER, Recorder, ResumeRefusedError
from workers.resume import (
    RESUME_CONTENT_TYPE,
    Resume,
    ResumeHead,
    decode_framed,
    decode_resume,
    encode_resume,
)

CHAT = "/v1/chat/completions"
ASKED = (b"x-hotspare-stream", b"1")
STREAM_HEAD = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Engine:
    """Outputs as a script has them: what is to be replayed first, then the rest."""

    def __init__(self, script: list[list[int]], *, stop_after: int | None = None) -> None:
        self.script = script
        self.stop_after = stop_after
        self.bodies: list[bytes] = []

    async def outputs(self, recorder: Recorder | None) -> Any:
        replayed = 0
        if recorder is not None and recorder.resume is not None:
            for output in recorder.resume.outputs:
                replayed += 1
                yield next(ids for _, ids in output)
            await recorder.replayed()
        elif recorder is not None:
            await recorder.end_unit()
        for ids in self.script[replayed : self.stop_after]:
            if recorder is not None:
                recorder.output([(0, ids)])
            yield ids
            if recorder is not None:
                await recorder.end_unit()
        if self.stop_after is not None:
            raise ConnectionError("the engine died")

    async def stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An opening event at once, one event for each token that is not 0, an end marker."""
        self.bodies.append((await receive())["body"])
        recorder = RECORDER.get()
        name = recorder.new_id() if recorder is not None else "-"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send(_part(f"data: begins {name}\n\n"))
        async for ids in self.outputs(recorder):
            for token in ids:
                if token:
                    await send(_part(f"data: {token}\n\n"))
        await send(_part("data: [DONE]\n\n"))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        recorder = RECORDER.get()
        found = []
        async for ids in self.outputs(recorder):
            found += ids
            if recorder is not None:
                await recorder.note_alone()
        body = json.dumps(found).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _part(text: str) -> Message:
    return {"type": "http.response.body", "body": text.encode(), "more_body": True}


async def ask(
    app: App, body: bytes = b"{}", *headers: tuple[bytes, bytes], path: str = CHAT, root: bytes = b"r1"
) -> AsgiAnswer:
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return messages.pop()

    answer = AsgiAnswer()
    head = [(b"x-hotspare-request-id", root), *headers] if root else [*headers]
    with contextlib.suppress(ConnectionError):
        await RecordedApp(app)({"type": "http", "method": "POST", "path": path, "headers": head}, receive, answer.send)
    return answer


SCRIPT = [[5], [0], [6, 7], [8]]


async def test_without_being_asked_nothing_changes() -> None:
    answer = await ask(Engine(SCRIPT).stream)
    assert b": t" not in answer.body
    assert b"x-hotspare-stream" not in answer.headers


async def test_a_unit_leaves_whole_behind_its_note() -> None:
    answer = await ask(Engine(SCRIPT).stream, b"{}", ASKED)
    assert answer.headers[b"x-hotspare-stream"] == b"1"
    notes = [part.split(b"\n", 1)[0] for part in answer.parts if part]
    assert [note.split(b" c=")[0] for note in notes] == [
        b": t e=1 n=1",
        b": t e=2 n=1",
        b": t e=4 n=2",
        b": t e=5 n=1",
        b": t e=6 n=1",
    ]
    assert [note.split(b"g=")[-1] for note in notes[1:4]] == [b"0:5", b"0:0|0:6,7", b"0:8"]
    assert answer.ended


@pytest.mark.parametrize("cut", range(1, 6))
async def test_a_resumed_answer_continues_byte_for_byte(cut: int) -> None:
    whole = UnitSplitter()
    uncut = whole.feed((await ask(Engine(SCRIPT).stream, b"{}", ASKED)).body)
    parts = [part for part in (await ask(Engine(SCRIPT).stream, b"{}", ASKED)).parts if part]
    splitter = UnitSplitter()
    delivered = splitter.feed(b"".join(parts[:cut]))
    log = splitter.log
    head = ResumeHead(events=log.events, crc=log.crc.decode(), notes=len(log.rest))
    engine = Engine(SCRIPT)
    resumed = await ask(
        engine.stream,
        encode_resume(head, log.rest, b'{"a":1}'),
        ASKED,
        (b"content-type", RESUME_CONTENT_TYPE.encode()),
    )
    assert engine.bodies == [b'{"a":1}']
    assert delivered + splitter.feed(resumed.body) == uncut
    assert (splitter.log.events, splitter.log.crc) == (whole.log.events, whole.log.crc)
    assert splitter.log.rest == whole.log.rest


async def test_a_replay_that_gives_something_else_is_refused_before_any_byte() -> None:
    raw = encode_resume(ResumeHead(events=1, crc="1", notes=0), b"", b"{}")
    answer = await ask(Engine(SCRIPT).stream, raw, ASKED, (b"content-type", RESUME_CONTENT_TYPE.encode()))
    assert answer.status == 409
    assert json.loads(answer.body)["error"]["code"] == "resume_unsupported"
    assert answer.ended


async def test_notes_that_say_no_are_refused() -> None:
    notes = b"g=0:5 x=multi_prompt\n"
    raw = encode_resume(ResumeHead(events=1, crc="1", notes=len(notes)), notes, b"{}")
    answer = await ask(Engine(SCRIPT).stream, raw, ASKED, (b"content-type", RESUME_CONTENT_TYPE.encode()))
    assert answer.status == 409
    assert b"multi_prompt" in answer.body


async def test_resumes_are_counted_by_what_became_of_them() -> None:
    def counted(outcome: str) -> float:
        return REGISTRY.get_sample_value("hotspare_engine_resumes_total", {"outcome": outcome}) or 0.0

    def replayed() -> float:
        return REGISTRY.get_sample_value("hotspare_engine_replayed_tokens_total") or 0.0

    notes = b"g=0:5|0:0 t=17\n"
    good = encode_resume(ResumeHead(events=0, crc="0", notes=len(notes)), notes, b"{}")
    for raw, outcome, tokens in (
        (good, "taken", 2),
        (encode_resume(ResumeHead(events=7, crc="1", notes=len(notes)), notes, b"{}"), "mismatch", 0),
        (encode_resume(ResumeHead(events=7, crc="1", notes=10), b"g=0:5 x=a\n", b"{}"), "notes", 0),
        (b"nonsense", "unreadable", 0),
    ):
        before = counted(outcome), replayed()
        await ask(Engine(SCRIPT).whole, raw, ASKED, (b"content-type", RESUME_CONTENT_TYPE.encode()))
        assert (counted(outcome), replayed()) == (before[0] + 1, before[1] + tokens)


async def test_what_is_no_resume_body_is_a_400() -> None:
    answer = await ask(Engine(SCRIPT).stream, b"nonsense", ASKED, (b"content-type", RESUME_CONTENT_TYPE.encode()))
    assert answer.status == 400


async def test_only_generating_routes_can_be_resumed() -> None:
    raw = encode_resume(ResumeHead(events=1, crc="1", notes=0), b"", b"{}")
    kind = (b"content-type", RESUME_CONTENT_TYPE.encode())
    assert (await ask(Engine(SCRIPT).stream, raw, ASKED, kind, path="/v1/embeddings")).status == 415


async def test_a_whole_answer_comes_in_a_frame() -> None:
    answer = await ask(Engine(SCRIPT).whole, b"{}", ASKED)
    assert answer.headers[b"content-type"] == b"text/event-stream"
    assert answer.headers[b"x-hotspare-stream"] == b"body"
    before, _, event = answer.body.partition(b"event: body\n")
    assert before.startswith(b": t e=0 n=0 c=0 g=0:5 t=")
    assert decode_framed(b"event: body\n" + event) == (
        200,
        [(b"content-type", b"application/json")],
        b"[5, 0, 6, 7, 8]",
    )


async def test_a_whole_answer_can_be_resumed() -> None:
    notes = b"g=0:5|0:0 t=17\n"
    raw = encode_resume(ResumeHead(events=0, crc="0", notes=len(notes)), notes, b"{}")
    answer = await ask(Engine(SCRIPT).whole, raw, ASKED, (b"content-type", RESUME_CONTENT_TYPE.encode()))
    assert b"g=0:6,7" in answer.body  # the rest is noted, what was replayed is not
    assert b"[5, 0, 6, 7, 8]" in answer.body


async def test_a_comment_is_of_no_unit() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        recorder = RECORDER.get()
        assert recorder is not None
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        recorder.output([(0, [1])])
        await send(_part("data: a\n\n"))
        await send(_part(": still there\n\n"))
        await recorder.end_unit()
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    answer = await ask(app, b"{}", ASKED)
    assert answer.parts[0] == b": still there\n\n"
    assert answer.parts[1].startswith(b": t e=1 n=1")


async def test_what_an_engine_that_died_had_not_finished_is_not_sent() -> None:
    answer = await ask(Engine(SCRIPT, stop_after=1).stream, b"{}", ASKED)
    assert not answer.ended
    assert b"[DONE]" not in answer.body
    assert b"data: 5\n\n" in answer.body


async def test_without_a_root_for_its_ids_an_answer_is_not_recorded() -> None:
    answer = await ask(Engine(SCRIPT).stream, b"{}", ASKED, root=b"")
    assert b": t" not in answer.body
    notes = b"g=0:5\n"
    raw = encode_resume(ResumeHead(events=1, crc="1", notes=len(notes)), notes, b"{}")
    kind = (b"content-type", RESUME_CONTENT_TYPE.encode())
    assert (await ask(Engine(SCRIPT).stream, raw, ASKED, kind, root=b"")).status == 400


def _recorder(answer: AsgiAnswer, resume: Resume | None = None) -> Recorder:
    return Recorder(answer.send, root="r1", resume=resume)


def _resume(notes: bytes) -> Resume:
    return decode_resume(encode_resume(ResumeHead(events=1, crc="1", notes=len(notes)), notes, b"{}"))[0]


async def test_what_an_answer_is_made_from_must_be_the_same() -> None:
    answer = AsgiAnswer()
    recorder = _recorder(answer)
    recorder.made_from("1f")
    await recorder.send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
    )
    await recorder.send(_part("data: a\n\n"))
    await recorder.end_unit()
    assert b" k=1f\n" in answer.body
    _recorder(AsgiAnswer(), _resume(b"g=0:5 k=1f\n")).made_from("1f")
    for notes in (b"g=0:5 k=20\n", b"g=0:5\n"):
        with pytest.raises(ResumeRefusedError, match="another one here"):
            _recorder(AsgiAnswer(), _resume(notes)).made_from("1f")


async def test_an_answer_of_several_generations_is_not_resumed() -> None:
    answer = AsgiAnswer()
    recorder = _recorder(answer)
    recorder.generates()
    recorder.generates()
    await recorder.send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
    )
    await recorder.send(_part("data: a\n\n"))
    await recorder.end_unit()
    assert b"x=several_generations" in answer.body
    resumed = _recorder(AsgiAnswer(), _resume(b"g=0:5\n"))
    resumed.generates()
    with pytest.raises(ResumeRefusedError, match="several parts"):
        resumed.generates()


async def test_a_resume_counts_as_taken_once_it_cannot_be_refused_any_more() -> None:
    def counted(outcome: str) -> float:
        return REGISTRY.get_sample_value("hotspare_engine_resumes_total", {"outcome": outcome}) or 0.0

    notes = b"g=0:5\n"
    resume = decode_resume(encode_resume(ResumeHead(events=0, crc="0", notes=len(notes)), notes, b"{}"))[0]
    before = counted("taken"), counted("engine")
    answer = AsgiAnswer()
    recorder = _recorder(answer, resume)
    await recorder.send(STREAM_HEAD)
    await recorder.replayed()
    await recorder.refuse("the engine does not take its tokens")
    assert (counted("taken"), counted("engine")) == (before[0], before[1] + 1)
    assert answer.status == 409

    recorder = _recorder(AsgiAnswer(), resume)
    await recorder.send(STREAM_HEAD)
    await recorder.replayed()
    for token in (b"6", b"7"):
        recorder.output([(0, [int(token)])])
        await recorder.send(_part(f"data: {token.decode()}\n\n"))
        await recorder.end_unit()
        await recorder.refuse("it is too late")
    assert (counted("taken"), counted("engine")) == (before[0] + 1, before[1] + 1)


async def test_what_is_turned_away_is_no_answer() -> None:
    answer = AsgiAnswer()
    recorder = _recorder(answer)
    await recorder.send(STREAM_HEAD)
    await recorder.turn_away("it is full")
    await recorder.send(_part("data: an error of the application's\n\n"))
    await recorder.send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})
    assert (answer.status, answer.headers[b"x-hotspare-reselect"]) == (503, b"1")
    assert json.loads(answer.body)["error"]["code"] == "overloaded"


@pytest.mark.parametrize(
    ("count", "sizes"), [(9998, [9998]), (9999, [9999]), (10_000, [9999, 1]), (20_003, [9999, 9999, 5])]
)
async def test_a_unit_of_more_events_than_a_note_can_tell_comes_in_parts(count: int, sizes: list[int]) -> None:
    async def story(scope: Scope, receive: Receive, send: Send) -> None:
        recorder = RECORDER.get()
        assert recorder is not None
        await send(STREAM_HEAD)
        outputs = [[1]] if recorder.resume is None else [next(ids for _, ids in o) for o in recorder.resume.outputs]
        for ids in outputs:
            if recorder.resume is None:
                recorder.output([(0, ids)])
            await send(_part("".join(f"data: {number}\n\n" for number in range(count))))
            await recorder.end_unit()
        await recorder.replayed()
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    answer = await ask(story, b"{}", ASKED)
    parts = answer.body.split(b": t ")[1:]
    assert [int(part.partition(b" n=")[2].partition(b" ")[0]) for part in parts] == [*sizes, 1]
    whole = UnitSplitter()
    uncut = whole.feed(answer.body)
    assert uncut == b"".join(b"data: %d\n\n" % number for number in range(count)) + b"data: [DONE]\n\n"
    for cut in range(1, len(parts)):
        splitter = UnitSplitter()
        delivered = splitter.feed(b"".join(b": t " + part for part in parts[:cut]))
        head = ResumeHead(events=splitter.log.events, crc=splitter.log.crc.decode(), notes=len(splitter.log.rest))
        raw = encode_resume(head, splitter.log.rest, b"{}")
        resumed = await ask(story, raw, ASKED, (b"content-type", RESUME_CONTENT_TYPE.encode()))
        if cut < len(parts) - 1:
            assert resumed.status == 409
        else:
            assert delivered + splitter.feed(resumed.body) == uncut


@pytest.mark.parametrize("resumed", [False, True])
async def test_whoever_counts_requests_learns_what_nobody_could_go_on_with(resumed: bool) -> None:
    """Of a resume, too, whose application is given another scope than the one that came."""
    engine = Engine(SCRIPT)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        recorder = RECORDER.get()
        assert recorder is not None
        recorder.unresumable("adapter")
        recorder.unresumable("seed")
        await engine.stream(scope, receive, send)

    raw = encode_resume(ResumeHead(events=0, crc="0", notes=0), b"", b"{}") if resumed else b"{}"
    head = [(b"x-hotspare-request-id", b"r1"), ASKED]
    head += [(b"content-type", RESUME_CONTENT_TYPE.encode())] if resumed else []
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": head}

    async def receive() -> Message:
        return {"type": "http.request", "body": raw, "more_body": False}

    answer = AsgiAnswer()
    await RecordedApp(app)(scope, receive, answer.send)
    assert scope[UNRESUMABLE] == "adapter"
    assert engine.bodies == [b"{}"]
    assert answer.ended
