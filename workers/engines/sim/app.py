"""The sim's HTTP server, bare ASGI: two tables of routes need no framework, and start-up needs none to import."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from functools import partial
from typing import Any, Final

from workers.contract import HEADER_REQUEST_ID
from workers.engines.sim import audio, messages, openai, pooling, responses
from workers.engines.sim.answer import ClientGone, Event, Send, TextOut, TokenAt, respond, stream, whole
from workers.engines.sim.api import ApiError, Form, Job
from workers.engines.sim.poison import Poison
from workers.engines.sim.scheduler import Scheduler
from workers.engines.sim.tokens import prompt_digest
from workers.recorder import RECORDER

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 * 1024 * 1024
MAX_REQUEST_ID_CHARS = 128

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Parse = Callable[..., Job]
"""(body, content type, model=, max_model_len=) → a checked request; raises ApiError."""
MakeForm = Callable[..., Form]
"""(job, request_id=, model=, created=)"""
Answer = Callable[..., bytes]
"""(body, model=) → the answer; raises ApiError."""

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

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        model: str,
        max_model_len: int,
        token_at: TokenAt,
        configuration: str,
        poison: Poison | None = None,
        report: Callable[[], bytes] | None = None,
    ) -> None:
        """``configuration``: a word without spaces for everything that decides which text a prompt gives. ``report``:
        the document at ``/accelerator``, if there is one."""
        self._report = report
        self._scheduler = scheduler
        self._configuration = configuration
        self._token_at = token_at
        self._poison = poison
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
                await respond(send, error.status, error.body, headers=error.headers)
            except ClientGone:
                logger.debug("the client of %s went away", scope["path"])

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        if path in _GENERATING and method == "POST":
            await self._generate(*_GENERATING[path], scope, receive, send)
        elif path in _ANSWERING and method == "POST":
            await respond(send, 200, _ANSWERING[path](await _body(receive), model=self._model))
        elif path == "/tokenize" and method == "POST":
            answer = openai.tokenize(await _body(receive), model=self._model, max_model_len=self._max_model_len)
            await respond(send, 200, answer)
        elif path == "/health" and method == "GET":  # as vLLM's; routers ask for it
            await respond(send, 200, b"")
        elif path == "/v1/models" and method == "GET":
            await respond(send, 200, self._models)
        elif path == "/accelerator" and method == "GET" and self._report is not None:
            await respond(send, 200, self._report())
        elif path in _GENERATING or path in _ANSWERING or path in ("/health", "/tokenize", "/v1/models"):
            raise ApiError(405, f"{method} is not allowed here", code="method_not_allowed")
        else:
            raise ApiError(404, f"there is nothing at {path}", code="not_found")

    async def _generate(self, parse: Parse, make: MakeForm, scope: Scope, receive: Receive, send: Send) -> None:
        job = parse(await _body(receive), _content_type(scope), model=self._model, max_model_len=self._max_model_len)
        recorder = RECORDER.get()
        if recorder is None:
            request_id, created = _request_id(scope), int(time.time())
        else:
            request_id, created = recorder.new_id(), recorder.created
            recorder.made_from(f"{self._configuration}{prompt_digest(job.prompt):016x}")
        form = make(job, request_id=request_id, model=self._model, created=created)
        submit = partial(
            self._scheduler.submit,
            job.prompt,
            max_tokens=job.max_tokens,
            dies_after=self._poison.dies_after(job.prompt) if self._poison is not None else None,
        )
        text = TextOut(job, submit=submit, token_at=self._token_at, recorder=recorder)
        watcher = asyncio.create_task(_close_on_disconnect(receive, text))
        try:
            await (stream if job.stream else whole)(text, form, send, recorder)
        finally:
            text.close()
            watcher.cancel()
            await asyncio.wait((watcher,))


async def _close_on_disconnect(receive: Receive, text: TextOut) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    text.close()


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
            raise ClientGone
        parts += event.get("body", b"")
        if len(parts) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body is longer than {MAX_BODY_BYTES} bytes", code="body_too_large")
        if not event.get("more_body", False):
            return bytes(parts)


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        event = await receive()
        await send({"type": f"{event['type']}.complete"})
        if event["type"] == "lifespan.shutdown":
            return
