"""A gateway's part of a resume, for tests of the engine alone: notes are kept, a cut is a place between two units.

An answer is asked for once and read to its end; *cut after k units* is then what a gateway has after those: the bytes
of their events, and the log of their notes (``app.openai.units``). Another engine goes on from it.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from app.openai.units import NOTE, UnitSplitter
from tests.engine.vllm.harness import Driver, EngineProcess
from workers.contract import HEADER_REQUEST_ID, HEADER_STREAM
from workers.resume import FRAME_EVENT, RESUME_CONTENT_TYPE, ResumeHead, decode_framed, encode_resume

_EPOCHS = itertools.count(1000)


class Pair(NamedTuple):
    """Two engines that are awake at once."""

    first: EngineProcess
    second: EngineProcess


def fork_pair(driver: Driver, name: str, *arguments: str, scheduler: str = "") -> Iterator[Pair]:
    """Without a memory service, whose KV pages only one engine may have."""
    engines: list[EngineProcess] = []
    try:
        for which in "ab":
            engines.append(driver.fork(f"{name}-{which}", gms=False, engine_args=arguments, scheduler=scheduler))
            engines[-1].wake(1)
        yield Pair(*engines)
    finally:
        for engine in engines:
            engine.kill()


def cold(engine: EngineProcess) -> None:
    """Forget the prefix cache."""
    engine.park()
    engine.wake(next(_EPOCHS))


@dataclass(frozen=True)
class Answer:
    """An answer with notes, as it came."""

    status: int
    raw: bytes

    @property
    def units(self) -> list[bytes]:
        """Each with its note; joined they are the answer."""
        return [unit for unit in re.split(b"(?m)^(?=" + NOTE + b")", self.raw) if unit]

    @property
    def error(self) -> str:
        said: str = json.loads(self.raw)["error"]["message"]
        return said


class Client:
    """What a client has seen of one request, over several attempts."""

    def __init__(self, path: str, body: dict[str, Any], *, root: str) -> None:
        self.path = path
        self.body = json.dumps(body).encode()
        self.root = root
        self.splitter = UnitSplitter()
        self.seen = b""

    def headers(self, **more: str) -> dict[str, str]:
        return {HEADER_STREAM: "1", HEADER_REQUEST_ID: self.root, "x-request-id": self.root, **more}

    def ask(self, engine: EngineProcess) -> Answer:
        headers = self.headers(**{"content-type": "application/json"})
        answer = engine.client.post(self.path, content=self.body, headers=headers)
        return Answer(answer.status_code, answer.content)

    def read(self, *units: bytes) -> None:
        """Of an answer that is cut after these."""
        self.seen += self.splitter.feed(b"".join(units))

    def resume_body(self) -> bytes:
        log = self.splitter.log
        head = ResumeHead(events=log.events, crc=log.crc.decode(), notes=len(log.rest))
        return encode_resume(head, log.rest, self.body)

    def resume(self, engine: EngineProcess, raw: bytes | None = None) -> Answer:
        """Go on where this client is; ``raw`` instead of what is right for that."""
        answer = engine.client.post(
            self.path,
            content=self.resume_body() if raw is None else raw,
            headers=self.headers(**{"content-type": RESUME_CONTENT_TYPE}),
        )
        return Answer(answer.status_code, answer.content)


def difference(got: bytes, wanted: bytes) -> str:
    """Empty if they are the same, byte for byte; or but for how tokens that were still to come were put into events.

    When the event loop is late, vLLM puts several tokens in one event, and with several choices the order of their
    events is up to timing. Both are so without any resume, and say nothing of it. Numbers with a fraction are logprobs:
    of tokens after the cut they come from a prefill where the uncut answer has a step per token, and so may differ as
    they do between sizes of a batch.
    """
    if got == wanted:
        return ""
    one, other = _merged(got), _merged(wanted)
    if _alike(one, other):
        return ""
    where = next((at for at, parts in enumerate(zip(one, other, strict=False)) if not _alike(*parts)), len(one))
    return f"got {one[where : where + 1]}\nwanted {other[where : where + 1]}"


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < 1e-3
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(_alike(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other)


def same_document(got: bytes, wanted: bytes) -> bool:
    """Byte for byte, or but for logprobs as above."""
    return got == wanted or _alike(json.loads(got), json.loads(wanted))


Grown = dict[str, Any]
"""What of a part grows with each event: texts and lists."""


def _merged(raw: bytes) -> list[Any]:
    """All events, deltas of one thing joined into one, choice by choice."""
    found: list[tuple[str, Any, Grown]] = []
    places: dict[str, int] = {}
    for text in raw.decode().split("\n\n"):
        data = text.partition("data: ")[2]
        if not data:
            continue
        for place, fixed, grown in _parts(json.loads(data) if data.startswith("{") else data):
            at = places.get(place) if place else None
            if at is None:
                places[place] = len(found)
                found.append((place, fixed, grown))
            else:
                before = found[at]
                assert before[1] == fixed
                found[at] = (place, fixed, {name: before[2][name] + grown[name] for name in grown})
    return sorted(found, key=lambda part: part[0])


def _parts(event: Any) -> list[tuple[str, Any, Grown]]:
    """(which thing it is a part of, empty: none; what is the same in all its parts; what grows)."""
    if not isinstance(event, dict):
        return [("", event, {})]
    event = {name: value for name, value in event.items() if name != "sequence_number"}
    if event.get("choices"):
        fixed = [event["id"], event["created"], event["model"]]
        return [(f"choice {choice['index']}", fixed, _choice(choice)) for choice in event["choices"]]
    delta = event.pop("delta", None)
    if isinstance(delta, str):
        logprobs = event.pop("logprobs", None) or []
        return [(f"{event['type']} {event['item_id']}", event, {"delta": delta, "logprobs": logprobs})]
    if isinstance(delta, dict) and event["type"] == "content_block_delta":
        grown = "".join(delta.get(name, "") for name in ("text", "thinking", "partial_json"))
        return [(f"{event['type']} {event['index']}", event, {"delta": grown})]
    return [("", [event, delta], {})]


def _choice(choice: dict[str, Any]) -> Grown:
    delta = choice.get("delta") or {}
    calls = delta.get("tool_calls") or ()
    return {
        "text": (choice.get("text") or "") + (delta.get("content") or ""),
        "reasoning": delta.get("reasoning") or "",
        "calls": [[call["id"], call["function"].get("name")] for call in calls if call.get("id")],
        "arguments": "".join(call["function"].get("arguments") or "" for call in calls),
        "logprobs": _logprobs(choice.get("logprobs")),
        "token_ids": choice.get("token_ids") or [],
        "end": [[choice["finish_reason"], choice.get("stop_reason")]] if choice.get("finish_reason") else [],
    }


def _logprobs(logprobs: dict[str, Any] | None) -> list[Any]:
    if not logprobs:
        return []
    if "content" in logprobs:
        return list(logprobs["content"])
    return [
        list(of) for of in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    ]


def framed_body(raw: bytes) -> tuple[list[bytes], bytes]:
    """A whole answer → its notes, and the document. It comes without a frame if nothing had to be noted before it."""
    if raw.startswith(b"{"):
        return [], raw
    notes, _, event = raw.partition(FRAME_EVENT)
    status, _, body = decode_framed(FRAME_EVENT + event)
    assert status == 200, body
    return [line + b"\n" for line in notes.splitlines()], body
