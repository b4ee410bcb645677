"""The sim's HTTP server, bare ASGI: two tables of routes need no framework, and start-up needs none to import."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from functools import partial
from typing import Any, Final

from workers.contract import HEADER_REQUEST_ID, HEADER_RESELECT
from workers.engine import EngineDeadError
from workers.engines.sim import audio, messages, openai, pooling, responses, tokens
from workers.engines.sim.api import ApiError, Form, Job
from workers.engines.sim.scheduler import Generation, Scheduler
from workers.engines.sim.stops import StopFilter

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 * 1024 * 1024
MAX_REQUEST_ID_CHARS = 128

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Parse = Callable[..., Job]
"""(body, content type, model=, max_model_len=) → a checked request; raises ApiError."""
MakeForm = Callable[..., Form]
"""(job, request_id=, model=, created=)"""
Answer = Callable[..., bytes]
"""(body, model=) → the answer; raises ApiError."""

JSON = b"application/json"
EVENT_STREAM = b"text/event-stream; charset=utf-8"

_GENERATING: Final[Mapping[str, tuple[Parse, MakeForm]]] = {
    "/v1/chat/completions": (openai.parse_chat, openai.AnswerForm),
    "/v1/completions": (openai.parse_completion, openai.AnswerForm),
    "/v1/responses": (responses.parse_responses, responses.ResponsesForm),
    "/v1/messages": (messages.parse_messages, messages.MessagesForm),
    "/v1/audio/transcriptions": (audio.parse_audio, partial(audio.AudioForm, kind="transcription")),
    "/v1/audio/translations": (audio.parse_audio, partial(audio.AudioForm, kind="translation")),
}
_ANSWERING: Final[Mapping[str, Answer]] = {
    "/classify": pooling.classify,
    "/detokenize": openai.detokenize,
    "/pooling": pooling.pooling,
    "/rerank": pooling.rerank,
    "/score": pooling.score,
    "/v1/embeddings": pooling.embeddings,
    "/v1/messages/count_tokens": messages.count_tokens,
    "/v1/rerank": pooling.rerank,
    "/v1/score": pooling.score,
    "/v2/rerank": pooling.rerank,
}


class SimApp:
    """All routes over one scheduler."""

    def __init__(self, scheduler: Scheduler, *, model: str, max_model_len: int) -> None:
        self._scheduler = scheduler
        self._model = model
        self._max_model_len = max_model_len
        self._models = openai.models_document(model, max_model_len=max_model_len, created=int(time.time()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        else:
            try:
                await self._route(scope, receive, send)
            except ApiError as error:
                await _respond(send, error.status, error.body, headers=error.headers)
            except _ClientGone:
                logger.debug("the client of %s went away", scope["path"])

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        if path in _GENERATING and method == "POST":
            await self._generate(*_GENERATING[path], scope, receive, send)
        elif path in _ANSWERING and method == "POST":
            await _respond(send, 200, _ANSWERING[path](await _body(receive), model=self._model))
        elif path == "/tokenize" and method == "POST":
            answer = openai.tokenize(await _body(receive), model=self._model, max_model_len=self._max_model_len)
            await _respond(send, 200, answer)
        elif path == "/v1/models" and method == "GET":
            await _respond(send, 200, self._models)
        elif path in _GENERATING or path in _ANSWERING or path in ("/tokenize", "/v1/models"):
            raise ApiError(405, f"{method} is not allowed here", code="method_not_allowed")
        else:
            raise ApiError(404, f"there is nothing at {path}", code="not_found")

    async def _generate(self, parse: Parse, make: MakeForm, scope: Scope, receive: Receive, send: Send) -> None:
        job = parse(await _body(receive), _content_type(scope), model=self._model, max_model_len=self._max_model_len)
        form = make(job, request_id=_request_id(scope), model=self._model, created=int(time.time()))
        generation = self._scheduler.submit(job.prompt, max_tokens=job.max_tokens)
        watcher = asyncio.create_task(_close_on_disconnect(receive, generation))
        try:
            if job.stream:
                await _stream(job, form, generation, send)
            else:
                await _answer(job, form, generation, send)
        finally:
            generation.close()
            watcher.cancel()
            await asyncio.wait((watcher,))


async def _stream(job: Job, form: Form, generation: Generation, send: Send) -> None:
    """The head goes out with the first token, so that whatever fails before it has a real status."""
    text = _TextOut(job, generation)
    try:
        parts = await text.pull()
    except EngineDeadError as error:
        raise _gone(error) from None
    await send(_head(200, EVENT_STREAM, ((b"cache-control", b"no-cache"),)))
    events = [form.opening()]
    try:
        while True:
            events += [form.last(*part) if part[1] else form.text(part[0]) for part in parts]
            if text.finish:
                events.append(form.closing(text.count))
            await send({"type": "http.response.body", "body": b"".join(events), "more_body": not text.finish})
            if text.finish:
                return
            events = []
            parts = await text.pull()
    except EngineDeadError as error:
        # The stream is left without its end marker and without its last chunk: a cut that nobody takes for an end.
        logger.warning("a stream was cut: %s", error)


async def _answer(job: Job, form: Form, generation: Generation, send: Send) -> None:
    text = _TextOut(job, generation)
    parts: list[str] = []
    try:
        while not text.finish:
            parts += [part for part, _ in await text.pull()]
    except EngineDeadError as error:
        raise _gone(error) from None
    await _respond(send, 200, form.document("".join(parts), text.finish, text.count))


class _TextOut:
    """Tokens to text: stop strings, finish reason and the count that usage shows."""

    def __init__(self, job: Job, generation: Generation) -> None:
        self._job = job
        self._generation = generation
        self._filter = StopFilter(job.stops)
        self.count = 0
        self.finish = ""
        """``stop`` or ``length``, once it is finished."""

    async def pull(self) -> list[tuple[str, str]]:
        """New (text, finish reason) pairs, one a token that shows something; the last one carries the reason.

        Raises:
            EngineDeadError: the engine failed.
            _ClientGone: nobody listens any more.
        """
        new = await self._generation.pull()
        if not new:
            raise _ClientGone
        shown: list[tuple[str, str]] = []
        for token in new:
            self.count += 1
            text = self._filter.push(tokens.PIECES[token].decode())
            if self._filter.stopped:
                self.finish = "stop"
                self._generation.close()
            elif self.count == self._job.max_tokens:
                self.finish = "length"
                text += self._filter.flush()
            if text or self.finish:
                shown.append((text, self.finish))
            if self.finish:
                break
        return shown


class _ClientGone(Exception):
    """The client disconnected: there is nobody to answer."""


def _gone(error: EngineDeadError) -> ApiError:
    """Nothing was delivered, so another worker may start over."""
    reselect = ((HEADER_RESELECT.encode(), b"1"),)
    return ApiError(503, f"the engine is gone: {error}", code="engine_dead", kind="server_error", headers=reselect)


async def _close_on_disconnect(receive: Receive, generation: Generation) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.close()


def _content_type(scope: Scope) -> bytes:
    return next((value for name, value in scope["headers"] if name == b"content-type"), b"")


def _request_id(scope: Scope) -> str:
    wanted = HEADER_REQUEST_ID.encode()
    for name, value in scope["headers"]:
        if name == wanted and 0 < len(value) <= MAX_REQUEST_ID_CHARS:
            return str(value, "latin-1")
    return secrets.token_hex(16)


async def _body(receive: Receive) -> bytes:
    parts = bytearray()
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise _ClientGone
        parts += event.get("body", b"")
        if len(parts) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body is longer than {MAX_BODY_BYTES} bytes", code="body_too_large")
        if not event.get("more_body", False):
            return bytes(parts)


def _head(status: int, content_type: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()) -> Event:
    return {
        "type": "http.response.start",
        "status": status,
        "headers": [(b"content-type", content_type), *headers],
    }


async def _respond(send: Send, status: int, body: bytes, *, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
    await send(_head(status, JSON, ((b"content-length", str(len(body)).encode()), *headers)))
    await send({"type": "http.response.body", "body": body})


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        event = await receive()
        await send({"type": f"{event['type']}.complete"})
        if event["type"] == "lifespan.shutdown":
            return
