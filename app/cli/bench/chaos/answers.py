"""What a client got, held against what it should have got, byte for byte.

The sim says what follows from its seed, so the whole answer is computed here: the engine's own forms write it, with the
id and the time of creation that the answer itself names first. So these must be the same throughout; and the time must
be that of the request.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Final

import msgspec

from app.cli.bench.chaos.plan import Manner, Question
from app.openai.sse import KEEPALIVE
from workers.engines.sim import messages, openai, responses, tokens
from workers.engines.sim.answer import Pieces
from workers.engines.sim.api import Form, Job

MODEL_LENGTH: Final = 131072
_ID: Final = re.compile(rb'"id":"(?:chatcmpl-|cmpl-|resp_|msg_)([^"]{1,128})"')
_CREATED: Final = re.compile(rb'"created(?:_at)?":([0-9]{1,12})')
_CACHED: Final = re.compile(rb'"cached_tokens":([0-9]{1,7})')
"""How much of the prompt a cache had, which depends on who asked before, and on what: taken as it is told, up to the
whole prompt."""
_ERROR_CODE: Final = re.compile(rb'"error":\{.*?"code":"([a-z_]+)"', re.DOTALL)

_FORMS: Final[Mapping[str, tuple[Callable[..., Job], Callable[..., Form]]]] = {
    "/v1/chat/completions": (openai.parse_chat, openai.AnswerForm),
    "/v1/completions": (openai.parse_completion, openai.AnswerForm),
    "/v1/responses": (responses.parse_responses, responses.ResponsesForm),
    "/v1/messages": (messages.parse_messages, messages.MessagesForm),
}


class Fate(StrEnum):
    """What became of a request."""

    GOOD = "good"
    LEFT = "left"
    """The client left, and what it had until then was right."""
    REFUSED = "refused"
    """It was told when to come back, before anything else."""
    LOST = "lost"
    WRONG = "wrong"


class Got(msgspec.Struct, kw_only=True):
    """An answer as it came. Times are unix seconds."""

    status: int = 0
    body: bytes = b""
    sent_at: float = 0.0
    done_at: float = 0.0
    broken: str = ""
    """What the client met instead of the answer's end."""
    left: bool = False
    retry_after: bool = False


def request_body(question: Question, model: str) -> dict[str, Any]:
    """The request's JSON; without a stop string, which only the answer's text can give."""
    path, prompt = question.path, question.prompts[0]
    body: dict[str, Any] = {"model": model, "stream": question.streams}
    if path == "/v1/responses":
        return {**body, "input": prompt, "max_output_tokens": question.tokens}
    if path == "/v1/completions":
        body["prompt"] = prompt
    else:
        body["messages"] = [{"role": "user", "content": prompt}]
    if question.usage and question.streams and path != "/v1/messages":
        body["stream_options"] = {"include_usage": True}
    return {**body, "max_tokens": question.tokens, "temperature": 0}


class SimAnswers:
    """What the sim says to a question, and how an answer compares."""

    def __init__(self, *, model: str, seed: int, weights_bytes: int) -> None:
        self._model = model
        self._weights = tokens.WeightsPattern(seed=seed, size_bytes=weights_bytes)

    def body(self, question: Question) -> dict[str, Any]:
        """The request's JSON."""
        body = request_body(question, self._model)
        if question.stop and question.path != "/v1/responses" and question.tokens > 4:
            job = self._job(question, body)
            middle = question.tokens // 2
            stop = tokens.decode(self._tokens(job.prompt, question.tokens)[middle : middle + 2])
            body["stop_sequences" if question.path == "/v1/messages" else "stop"] = [stop, "never said"]
        return body

    def text(self, prompt: str, count: int) -> str:
        """What follows a prompt."""
        return tokens.decode(self._tokens(tokens.encode(prompt), count))

    def judge(self, question: Question, body: dict[str, Any], got: Got) -> tuple[Fate, str]:
        """What became of the request, and a sentence if that is not good."""
        if (refused := refusal(got)) is not None:
            return Fate.REFUSED, refused
        if got.status not in (0, 200):
            return Fate.LOST, f"status {got.status}: {got.body[:300]!r}"
        said = got.body.replace(KEEPALIVE, b"")
        if got.broken and b"\n\n" not in said:  # no whole event, or half a document: nothing that a client could use
            return (Fate.LEFT, "") if got.left else (Fate.LOST, got.broken)
        expected = self._expected(question, body, said)
        if said == expected and not got.broken:
            return _when(said, got)
        if expected.startswith(said):
            if got.left:
                return Fate.LEFT, ""
            return Fate.LOST, f"cut after {len(said)} of {len(expected)} bytes: {got.broken or 'an orderly end'}"
        at = next(
            (at for at, pair in enumerate(zip(said, expected, strict=False)) if pair[0] != pair[1]), len(expected)
        )
        event = said[said.rfind(b"\n\n", 0, at) + 2 :] if b"\n\n" in said[:at] else said
        if event.startswith((b"event: error\n", b'data: {"error":')):
            return Fate.LOST, f"after {len(said) - len(event)} of {len(expected)} bytes: {_code(event)}"
        return Fate.WRONG, f"at byte {at} of {len(expected)}: {said[at : at + 120]!r} for {expected[at : at + 120]!r}"

    def _job(self, question: Question, body: dict[str, Any]) -> Job:
        parse, _ = _FORMS[question.path]
        raw = msgspec.json.encode(body)
        return parse(raw, b"application/json", model=self._model, max_model_len=MODEL_LENGTH)

    def _tokens(self, prompt: list[int], count: int) -> list[int]:
        digest = tokens.prompt_digest(prompt)
        return [tokens.token_at(self._weights, digest, index) for index in range(count)]

    def _expected(self, question: Question, body: dict[str, Any], said: bytes) -> bytes:
        job = self._job(question, body)
        name, created = _ID.search(said), _CREATED.search(said)
        form = _FORMS[question.path][1](
            job,
            request_id=name[1].decode() if name else "none",
            model=self._model,
            created=int(created[1]) if created else 0,
        )
        pieces = Pieces(job)
        parts = pieces.push(self._tokens(job.prompt, job.max_tokens))
        told = _CACHED.findall(said)
        cached = min(int(told[-1]), len(job.prompt)) if told else 0
        if question.manner is Manner.WHOLE:
            form.cached_tokens = cached
            return form.document("".join(text for text, _ in parts), pieces.finish, pieces.count)
        events = [form.opening(), *(form.last(*part) if part[1] else form.text(part[0]) for part in parts)]
        form.cached_tokens = cached
        return b"".join((*events, form.closing(pieces.count)))


def refusal(got: Got) -> str | None:
    """The code, if it was told to come back later; else None."""
    return _code(got.body) if got.status in (429, 503) and got.retry_after else None


def _when(said: bytes, got: Got) -> tuple[Fate, str]:
    """A good answer, if it was made while it was waited for."""
    created = _CREATED.search(said)
    if created and not math.floor(got.sent_at) <= int(created[1]) <= got.done_at:
        return Fate.WRONG, f"created at {created[1].decode()}, asked for at {got.sent_at:.0f}"
    return Fate.GOOD, ""


def _code(body: bytes) -> str:
    match = _ERROR_CODE.search(body)
    return match[1].decode() if match else "an error without a code"
