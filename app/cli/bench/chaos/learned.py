"""Answers of an engine that nobody can compute: asked for once, before the first kill, and then held against.

What must be the same is the text, why it ended, and its count of tokens; ids and times must be one throughout an
answer. How a text is cut into events depends on timing, so it is put together first.
"""

from __future__ import annotations

from typing import Any

import msgspec

from app.cli.bench.chaos.answers import Fate, Got, refusal, request_body
from app.cli.bench.chaos.plan import Manner, Question


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer says, however it was cut into events."""

    text: str
    finish: str
    tokens: int | None
    ids: frozenset[str]
    times: frozenset[int]
    ended: bool
    error: str


class LearnedAnswers:
    """Uncut answers, by question. Not of sessions: what is said in their second turn depends on the first."""

    def __init__(self, *, model: str) -> None:
        self._model = model
        self._known: dict[tuple[str, str, int], Told] = {}

    def body(self, question: Question) -> dict[str, Any]:
        """The request's JSON."""
        return request_body(question, self._model)

    def learn(self, question: Question, got: Got) -> bool:
        """Take an answer for the right one; whether it is whole."""
        uncut = told(question, got.body)
        self._known[_key(question)] = uncut
        return got.status == 200 and uncut.ended and not got.broken

    def judge(self, question: Question, body: dict[str, Any], got: Got) -> tuple[Fate, str]:
        """What became of the request, and a sentence if that is not good."""
        if (refused := refusal(got)) is not None:
            return Fate.REFUSED, refused
        if got.status not in (0, 200):
            return Fate.LOST, f"status {got.status}: {got.body[:300]!r}"
        known, said = self._known[_key(question)], told(question, got.body)
        if said.error:
            return Fate.LOST, said.error
        if len(said.ids) > 1 or len(said.times) > 1:
            return Fate.WRONG, f"ids {sorted(said.ids)}, created {sorted(said.times)}"
        if not said.ended or got.broken:
            if not known.text.startswith(said.text):
                return Fate.WRONG, f"{said.text!r} is no beginning of {known.text!r}"
            return (Fate.LEFT, "") if got.left else (Fate.LOST, f"cut: {got.broken or 'an orderly end'}")
        if (said.text, said.finish) != (known.text, known.finish):
            return Fate.WRONG, f"{said.text!r} ({said.finish}) for {known.text!r} ({known.finish})"
        if said.tokens is not None and known.tokens is not None and said.tokens != known.tokens:
            return Fate.WRONG, f"{said.tokens} tokens for {known.tokens}"
        return Fate.GOOD, ""


def _key(question: Question) -> tuple[str, str, int]:
    """Streamed or not, the text is the same."""
    return question.path, question.prompts[0], question.tokens


def told(question: Question, body: bytes) -> Told:
    """What the bytes of an answer say."""
    documents = []
    if question.manner is Manner.WHOLE:
        documents = _json(body)
    else:
        for event in body.split(b"\n\n")[:-1]:
            for line in event.split(b"\n"):
                if line.startswith(b"data: {"):
                    documents += _json(line[6:])
    text, finish, counted = [], "", None
    ids, times = set(), set()
    error = ""
    ended = question.manner is Manner.WHOLE and bool(documents)
    ended = ended or body.endswith(b"data: [DONE]\n\n")
    for document in documents:
        if (problem := document.get("error")) is not None:
            error = str(problem.get("code"))
        part, why = _part(document)
        text.append(part)
        finish = why or finish
        answer = document.get("response") or document.get("message") or document
        if (name := answer.get("id")) is not None:
            ids.add(str(name))
        times |= {int(answer[key]) for key in ("created", "created_at") if answer.get(key)}
        usage = answer.get("usage") or {}
        counted = usage.get("completion_tokens", usage.get("output_tokens", counted)) or counted
        ended = ended or document.get("type") in ("message_stop", "response.completed", "response.incomplete")
    return Told(
        text="".join(text),
        finish=finish,
        tokens=counted,
        ids=frozenset(ids),
        times=frozenset(times),
        ended=ended,
        error=error,
    )


def _json(raw: bytes) -> list[dict[str, Any]]:
    try:
        found = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return []
    return [found] if isinstance(found, dict) else []


def _part(document: dict[str, Any]) -> tuple[str, str]:
    """The text of one event, or of a whole answer, and why the answer ended, if it says so."""
    if document.get("type") == "response.output_text.delta":
        return document["delta"], ""
    if document.get("type") == "content_block_delta":
        return document["delta"].get("text") or "", ""
    if document.get("type") == "message_delta":
        return "", document["delta"].get("stop_reason") or ""
    if document.get("type", "").startswith("response."):
        status = document.get("response", {}).get("status", "")
        return "", status if status in ("completed", "incomplete") else ""
    if document.get("object") == "response":
        texts = [part.get("text", "") for item in document["output"] for part in item.get("content") or ()]
        return "".join(texts), document["status"]
    if document.get("type") == "message":
        return "".join(part.get("text", "") for part in document["content"]), document.get("stop_reason") or ""
    choices = document.get("choices") or [{}]
    inner = choices[0].get("delta") or choices[0].get("message") or {}
    return choices[0].get("text") or inner.get("content") or "", choices[0].get("finish_reason") or ""
