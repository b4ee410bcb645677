"""Checks of the engine's application: what gateways rely on in answers, streams and errors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import httpx
import msgspec

from app.cli.conformance.outcomes import Failed, Skipped
from app.cli.conformance.subject import PROMPT, SHORT_TOKENS, Json, Subject, document
from app.openai.units import BadNote, UnitSplitter
from workers.contract import HEADER_REQUEST_ID, HEADER_STREAM, STREAM_FRAMED
from workers.resume import RESUME_CONTENT_TYPE, ResumeHead, encode_resume

DONE: Final = b"data: [DONE]"
ROOT: Final = "conformance-1"
_FIELD: Final = re.compile(rb"(data|event|id|retry):")


async def whole_answer(subject: Subject) -> None:
    async with subject.client() as client:
        body = await subject.completion(client, tokens=SHORT_TOKENS, stream=False)
        before = subject.engine.steps
        answer = await client.post("/v1/completions", json=body)
        _require_status(answer, 200)
        said = document(answer.content)
        if not isinstance(said.get("choices"), list) or not said["choices"]:
            raise Failed("an answer of /v1/completions has no choices")
        usage = said.get("usage")
        if not isinstance(usage, dict) or not usage.get("completion_tokens"):
            raise Failed("an answer of /v1/completions has no usage")
        if subject.engine.steps <= before:
            raise Failed(f"steps stood at {before} while {usage['completion_tokens']} tokens were made")
        if await _text(client, body) != said["choices"][0].get("text"):
            raise Failed("the same prompt at temperature 0 gave another text")


async def streams(subject: Subject) -> str:
    async with subject.client() as client:
        done = []
        body = await subject.completion(client, tokens=SHORT_TOKENS, stream=True)
        _check_stream("/v1/completions", await client.post("/v1/completions", json=body))
        done.append("/v1/completions")
        chat = {key: value for key, value in body.items() if key != "prompt"}
        chat["messages"] = [{"role": "user", "content": PROMPT}]
        answer = await client.post("/v1/chat/completions", json=chat)
        if answer.status_code != httpx.codes.NOT_FOUND:
            _check_stream("/v1/chat/completions", answer)
            done.append("/v1/chat/completions")
    return ", ".join(done)


async def busy(subject: Subject) -> None:
    async with subject.client() as client:
        async with subject.running_stream(client):
            if not subject.engine.busy:
                raise Failed("busy is false while a request runs")
        await subject.until(lambda: not subject.engine.busy, "busy stays true without a request")


async def client_leaves(subject: Subject) -> None:
    async with subject.client() as client:
        await subject.completion(client, tokens=1, stream=False)
        async with subject.running_stream(client):
            pass
        await subject.until(lambda: not subject.engine.busy, "a request whose client has left goes on")
        await subject.until_quiet("steps go on after the only client has left")
        await subject.until(
            lambda: subject.engine.kv_usage() == 0, "the only client has left, and KV blocks are in use"
        )


async def errors(subject: Subject) -> str:
    async with subject.client() as client:
        body = await subject.completion(client, tokens=SHORT_TOKENS, stream=False)
        head = {"content-type": "application/json"}
        cases: Sequence[tuple[str, bytes, tuple[int, ...]]] = (
            ("a body that is no JSON", b"{", (400, 422)),
            ("an unknown model", msgspec.json.encode({**body, "model": "no-such-model"}), (404, 400)),
            ("more tokens than fit", msgspec.json.encode({**body, "max_tokens": 1 << 40}), (400, 422)),
        )
        for what, raw, wanted in cases:
            answer = await client.post("/v1/completions", content=raw, headers=head)
            if answer.status_code not in wanted:
                raise Failed(f"{what} is answered with {answer.status_code}, not {' or '.join(map(str, wanted))}")
            error = document(answer.content).get("error")
            if not isinstance(error, dict) or not isinstance(error.get("message"), str) or "type" not in error:
                raise Failed(f'{what} is answered without {{"error": {{"message", "type", …}}}}: {answer.text[:80]!r}')
        await subject.within("check_health()", subject.engine.check_health())
    return f"{len(cases)} kinds"


async def notes(subject: Subject) -> str:
    async with subject.client() as client:
        body = await subject.completion(client, tokens=SHORT_TOKENS, stream=True)
        plain = await client.post("/v1/completions", json=body)
        answer = await client.post("/v1/completions", json=body, headers=_asking())
        _require_status(answer, 200)
        if answer.headers.get(HEADER_STREAM) != "1":
            if b"\n: t " in answer.content or answer.content.startswith(b": t "):
                raise Failed(f"there are token notes and no {HEADER_STREAM} header that says so")
            raise Skipped(f"its streams have no {HEADER_STREAM}: it claims no resume")
        splitter = UnitSplitter()
        try:
            events = splitter.feed(answer.content)
        except BadNote as error:
            raise Failed(f"its token notes do not fit its events: {error}") from None
        if not splitter.log.events:
            raise Failed("its stream has no token notes")
        if not events.rstrip().endswith(DONE):
            raise Failed("its notes leave out the end of the stream")
        if texts(events) != texts(plain.content):
            raise Failed("a stream with notes says something else than one without")
        return splitter.log.unresumable or f"{splitter.log.events} events"


async def resume(subject: Subject) -> str:
    async with subject.client() as client:
        body = msgspec.json.encode(await subject.completion(client, tokens=SHORT_TOKENS, stream=True))
        head = {**_asking(), "content-type": "application/json"}
        answer = await client.post("/v1/completions", content=body, headers=head)
        if answer.headers.get(HEADER_STREAM) != "1":
            await _refuses_resume(client, body)
            raise Skipped("it claims no resume, and refuses the form of one")
        units = [unit for unit in re.split(rb"(?m)^(?=: t )", answer.content) if unit]
        wanted = completion(UnitSplitter().feed(answer.content))
        for cut in range(1, len(units)):
            splitter = UnitSplitter()
            seen = splitter.feed(b"".join(units[:cut]))
            log = splitter.log
            if log.unresumable:
                return f"not after {log.unresumable}"
            raw = encode_resume(
                ResumeHead(events=log.events, crc=log.crc.decode(), notes=len(log.rest)), log.rest, body
            )
            again = await client.post(
                "/v1/completions", content=raw, headers={**_asking(), "content-type": RESUME_CONTENT_TYPE}
            )
            if again.status_code != httpx.codes.OK:
                raise Failed(f"a resume after unit {cut} is answered with {again.status_code}: {again.text[:120]}")
            try:
                rest = splitter.feed(again.content)
            except BadNote as error:
                raise Failed(f"a resume after unit {cut} breaks what its notes say: {error}") from None
            if completion(seen + rest) != wanted:
                raise Failed(f"a resume after unit {cut} does not end in the same answer")
        return f"cut after each of {len(units) - 1} units"


async def framed(subject: Subject) -> str:
    async with subject.client() as client:
        body = await subject.completion(client, tokens=SHORT_TOKENS, stream=False)
        answer = await client.post("/v1/completions", json=body, headers=_asking())
        _require_status(answer, 200)
        said = answer.headers.get(HEADER_STREAM)
        if said is None:
            document(answer.content)
            raise Skipped("a whole answer has no notes: it claims no resume of those")
        if said != STREAM_FRAMED or b"event: body\n" not in answer.content:
            raise Failed(f"a whole answer with {HEADER_STREAM}: {said} comes in no frame")
        return ""


async def _refuses_resume(client: httpx.AsyncClient, body: bytes) -> None:
    """Whoever knows no resumes must not take one for a new request: it would begin again in the middle of an answer."""
    raw = encode_resume(ResumeHead(events=1, crc="1", notes=5), b"0:318", body)
    answer = await client.post(
        "/v1/completions", content=raw, headers={**_asking(), "content-type": RESUME_CONTENT_TYPE}
    )
    if answer.status_code < httpx.codes.BAD_REQUEST:
        raise Failed(f"it claims no resume, and answers the form of one with {answer.status_code}")


def _asking() -> dict[str, str]:
    return {HEADER_STREAM: "1", HEADER_REQUEST_ID: ROOT}


def _require_status(answer: httpx.Response, wanted: int) -> None:
    if answer.status_code != wanted:
        raise Failed(f"{answer.request.url.path} answers {answer.status_code}: {answer.text[:200]}")


async def _text(client: httpx.AsyncClient, body: Json) -> object:
    answer = await client.post("/v1/completions", json=body)
    _require_status(answer, 200)
    return document(answer.content)["choices"][0].get("text")


def _check_stream(path: str, answer: httpx.Response) -> None:
    _require_status(answer, 200)
    if not answer.headers.get("content-type", "").startswith("text/event-stream"):
        raise Failed(f"a stream of {path} has the content type {answer.headers.get('content-type')!r}")
    raw = answer.content
    if not raw.endswith(b"\n\n"):
        raise Failed(f"a stream of {path} does not end with an empty line")
    events = [event for event in raw[:-2].split(b"\n\n") if not event.startswith(b":")]
    for event in events:
        if not all(_FIELD.match(line) or line.startswith(b":") for line in event.split(b"\n")):
            raise Failed(f"a stream of {path} has something that is no event: {event[:80]!r}")
    if not events or events[-1] != DONE:
        raise Failed(f"a stream of {path} ends without data: [DONE], so that it counts as cut")
    for event in events[:-1]:
        document(event.removeprefix(b"data:").strip())


def texts(raw: bytes) -> str:
    """What a stream of completions says."""
    return "".join(choice.get("text") or "" for event in _events(raw) for choice in event.get("choices", []))


def completion(raw: bytes) -> tuple[str, Json, bool]:
    """What a stream's client has in the end: its text, what the last event says beside that, and whether it is whole.

    Which tokens share an event is left out: an engine whose client is slow sends several in one.
    """
    *_, last = [{}, *_events(raw)]
    for choice in last.get("choices", []):
        choice.pop("text", None)
    return texts(raw), last, raw.rstrip().endswith(DONE)


def _events(raw: bytes) -> list[Json]:
    parts = (event.partition(b"data: ")[2] for event in raw.split(b"\n\n"))
    return [document(data) for data in parts if data.startswith(b"{")]
