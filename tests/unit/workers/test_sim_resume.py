"""Answers of the sim that are cut after every unit and gone on with by another engine, byte for byte."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from app.openai.units import UnitSplitter
from tests.support.asgi import AsgiAnswer, ask
from workers import recorder
from workers.engines.sim import SimEngine, tokens
from workers.resume import RESUME_CONTENT_TYPE, ResumeHead, decode_framed, encode_resume
from workers.settings import EngineSettings, SimSettings

ASKED = (b"x-hotspare-stream", b"1")
ROOT = (b"x-hotspare-request-id", b"r1")
KIND = (b"content-type", RESUME_CONTENT_TYPE.encode())
CREATED = re.compile(rb'"created(_at)?":[0-9]+')

TURNS = [{"role": "user", "content": "tell me"}]
WORDS = tokens.expected_text("tell me", 20, weights_bytes=65536).split(" ")
SPOKEN = tokens.expected_text(tokens.render_chat([("user", "tell me")]), 20, weights_bytes=65536).split(" ")
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": TURNS, "max_tokens": 9, "stream_options": {"include_usage": True}}),
    "completions": ("/v1/completions", {"prompt": "tell me", "max_tokens": 9}),
    "stop": ("/v1/completions", {"prompt": "tell me", "max_tokens": 20, "stop": f" {WORDS[8]} {WORDS[9]}"}),
    "held back": ("/v1/completions", {"prompt": "tell me", "max_tokens": 8, "stop": f" {WORDS[4]} {WORDS[5]} never"}),
    "responses": ("/v1/responses", {"input": "tell me", "max_output_tokens": 7}),
    "messages": ("/v1/messages", {"messages": TURNS, "max_tokens": 7}),
    "messages stop": ("/v1/messages", {"messages": TURNS, "max_tokens": 20, "stop_sequences": [" ".join(SPOKEN[5:8])]}),
    "one token": ("/v1/chat/completions", {"messages": TURNS, "max_tokens": 1}),
}


async def made(folder: Path, **sim: Any) -> SimEngine:
    pace = {"ttft_seconds": 0.0, "token_seconds": 0.0, "weights_bytes": 65536, "kv_bytes": 65536, **sim}
    engine = SimEngine(EngineSettings(engine="sim", gms=False, capacity=8, sim=SimSettings(**pace)), None, folder)
    await engine.initialize()
    await engine.wake(epoch=1)
    return engine


@pytest_asyncio.fixture
async def first(tmp_path: Path) -> AsyncIterator[SimEngine]:
    engine = await made(tmp_path)
    yield engine
    await engine.shutdown()


@pytest_asyncio.fixture
async def second(tmp_path: Path) -> AsyncIterator[SimEngine]:
    engine = await made(tmp_path)
    yield engine
    await engine.shutdown()


def resume_of(parts: list[bytes], body: bytes) -> bytes:
    splitter = UnitSplitter()
    splitter.feed(b"".join(parts))
    log = splitter.log
    return encode_resume(ResumeHead(events=log.events, crc=log.crc.decode(), notes=len(log.rest)), log.rest, body)


async def uncut(engine: SimEngine, path: str, body: bytes, *, notes: bytes = b"1") -> list[bytes]:
    answer = await ask(engine.app(), path, body, ROOT, ASKED)
    assert answer.status == 200
    assert answer.headers[b"x-hotspare-stream"] == notes
    return [part for part in answer.parts if part]


def clock(monkeypatch: pytest.MonkeyPatch, at: float) -> None:
    monkeypatch.setattr(recorder.time, "time", lambda: at)


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_stream_goes_on_byte_for_byte(
    first: SimEngine, second: SimEngine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path, fields = REQUESTS[name]
    body = msgspec.json.encode({**fields, "stream": True})
    clock(monkeypatch, 1000.0)
    parts = await uncut(first, path, body)
    whole = UnitSplitter()
    said = whole.feed(b"".join(parts))
    assert len(parts) > 1 or name == "one token"
    clock(monkeypatch, 2000.0)
    for cut in range(len(parts)):
        splitter = UnitSplitter()
        delivered = splitter.feed(b"".join(parts[:cut]))
        answer = await ask(second.app(), path, resume_of(parts[:cut], body), ROOT, ASKED, KIND)
        assert (answer.status, answer.ended) == (200, True)
        resumed = delivered + splitter.feed(answer.body)
        if cut:
            assert resumed == said
            assert splitter.log.rest == whole.log.rest
            assert (splitter.log.events, splitter.log.crc) == (whole.log.events, whole.log.crc)
        else:  # nobody has been told when it was created
            assert CREATED.sub(b"", resumed) == CREATED.sub(b"", said)
        assert not second.busy


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_whole_answer_goes_on_byte_for_byte(
    first: SimEngine, second: SimEngine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path, fields = REQUESTS[name]
    body = msgspec.json.encode(fields)
    monkeypatch.setattr(recorder, "FRAME_NOTE_SECONDS", 0.0)
    clock(monkeypatch, 1000.0)
    *notes, frame = await uncut(first, path, body, notes=b"body")
    status, headers, document = decode_framed(frame)
    assert (status, headers) == (200, [(b"content-type", b"application/json")])
    clock(monkeypatch, 2000.0)
    for cut in range(1, len(notes) + 1):
        answer = await ask(second.app(), path, resume_of(notes[:cut], body), ROOT, ASKED, KIND)
        assert (answer.status, answer.ended) == (200, True)
        last = [part for part in answer.parts if part][-1]
        assert (last if last.startswith(b"{") else decode_framed(last)[2]) == document
        assert not second.busy


async def test_a_stream_that_is_cut_twice(first: SimEngine, second: SimEngine) -> None:
    path, fields = REQUESTS["chat"]
    body = msgspec.json.encode({**fields, "stream": True})
    parts = await uncut(first, path, body)
    once = await ask(second.app(), path, resume_of(parts[:3], body), ROOT, ASKED, KIND)
    more = [part for part in once.parts if part][:2]
    twice = await ask(first.app(), path, resume_of([*parts[:3], *more], body), ROOT, ASKED, KIND)
    assert b"".join([*parts[:3], *more, *twice.parts]) == b"".join(parts)


async def test_audio_leaves_no_notes(first: SimEngine) -> None:
    form = (
        b'--B\r\nContent-Disposition: form-data; name="stream"\r\n\r\ntrue\r\n'
        b'--B\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nRIFF\r\n--B--\r\n'
    )
    kind = (b"content-type", b"multipart/form-data; boundary=B")
    answer = await ask(first.app(), "/v1/audio/transcriptions", form, ROOT, ASKED, kind)
    assert (answer.status, answer.ended) == (200, True)
    assert b": t " not in answer.body
    assert b"x-hotspare-stream" not in answer.headers


async def refused(engine: SimEngine, raw: bytes, path: str = "/v1/completions") -> AsgiAnswer:
    answer = await ask(engine.app(), path, raw, ROOT, ASKED, KIND)
    assert answer.status == 409
    assert json.loads(answer.body)["error"]["code"] == "resume_unsupported"
    assert not engine.busy
    await engine.check_health()
    return answer


async def key_of(engine: SimEngine, body: bytes) -> str:
    """The word of a note that says what the answer is made from."""
    found = re.search(rb" (k=[^ \n]+)", b"".join(await uncut(engine, "/v1/completions", body)))
    assert found is not None
    return found[1].decode()


PROMPT = b'{"prompt":"tell me","max_tokens":3,"stream":true}'
OWN = tokens.expected_tokens(tokens.encode("tell me"), 4, weights_bytes=65536)


@pytest.mark.parametrize(
    "groups",
    [
        f"0:{tokens.VOCAB_SIZE}",
        "0:",
        f"0:{10**10 - 1}",
        f"0:{OWN[1]}",
        f"1:{OWN[0]}",
        f"0:{OWN[0]}+1:{OWN[0]}",
        "0:" + ",".join(map(str, OWN)),
        "0:" + ",".join(map(str, OWN[:3])),
        f"0:{OWN[0]}",  # its events are not those that the client has
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_what_the_engine_would_not_have_said_is_refused(first: SimEngine, groups: str, stream: bool) -> None:
    body = PROMPT if stream else PROMPT.replace(b"true", b"false")
    notes = f"g={groups} t=1 {await key_of(first, PROMPT)}\n".encode()
    await refused(first, encode_resume(ResumeHead(events=1, crc="1", notes=len(notes)), notes, body))


@pytest.mark.parametrize(
    ("said", "saying"), [("l=aa", "logprobs that were not asked for"), ("p=1000", "more cached tokens")]
)
async def test_what_is_said_beside_tokens_fits_the_request(first: SimEngine, said: str, saying: str) -> None:
    notes = f"g=0:{OWN[0]} t=1 {said} {await key_of(first, PROMPT)}\n".encode()
    answer = await refused(first, encode_resume(ResumeHead(events=1, crc="1", notes=len(notes)), notes, PROMPT))
    assert saying in json.loads(answer.body)["error"]["message"]


@pytest.mark.parametrize("groups", ["0:x", "0:" + "9" * 5000, "0:1;2"])
async def test_notes_that_cannot_be_read_are_a_400(first: SimEngine, groups: str) -> None:
    notes = f"g={groups} t=1\n".encode()
    raw = encode_resume(ResumeHead(events=1, crc="1", notes=len(notes)), notes, PROMPT)
    answer = await ask(first.app(), "/v1/completions", raw, ROOT, ASKED, KIND)
    assert (answer.status, json.loads(answer.body)["error"]["code"]) == (400, "invalid_resume")


async def test_another_prompt_refuses(first: SimEngine) -> None:
    parts = await uncut(first, "/v1/completions", PROMPT)
    await refused(first, resume_of(parts[:1], PROMPT.replace(b"tell me", b"tell us")))


@pytest.mark.parametrize("other", [{"seed": 1}, {"weights_bytes": 131072}])
async def test_other_weights_refuse(first: SimEngine, tmp_path: Path, other: dict[str, int]) -> None:
    parts = await uncut(first, "/v1/completions", PROMPT)
    engine = await made(tmp_path, **other)
    try:
        answer = await refused(engine, resume_of(parts[:1], PROMPT))
        assert b"its configuration is another one here" in answer.body
    finally:
        await engine.shutdown()


async def test_a_client_that_leaves_during_a_resume_stops_it(first: SimEngine, tmp_path: Path) -> None:
    parts = await uncut(first, "/v1/completions", PROMPT)
    engine = await made(tmp_path, ttft_seconds=60.0)
    try:
        gone = asyncio.Event()
        raw = resume_of(parts[:1], PROMPT)
        asking = asyncio.create_task(ask(engine.app(), "/v1/completions", raw, ROOT, ASKED, KIND, gone=gone))
        while not engine.busy:  # noqa: ASYNC110 - an engine tells nobody that it got work
            await asyncio.sleep(0)
        gone.set()
        answer = await asking
        assert answer.parts == []
        assert not engine.busy
    finally:
        await engine.shutdown()


async def test_a_long_replay_lets_others_have_their_turn(first: SimEngine, second: SimEngine) -> None:
    body = b'{"prompt":"tell me","max_tokens":3001,"stream":true}'
    parts = await uncut(first, "/v1/completions", body)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count())
    resumed = await ask(second.app(), "/v1/completions", resume_of(parts[:3000], body), ROOT, ASKED, KIND)
    counting.cancel()
    assert b"".join([*parts[:3000], *resumed.parts]) == b"".join(parts)
    assert turns >= 3
