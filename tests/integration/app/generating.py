"""Fake workers that write token notes, frame whole answers, and go on with answers that others had begun.

What they answer is a *story*: units of events, one output of the engine each. They are strict about resumes: the notes
must be those that a worker wrote, and count and checksum those of the units that the client has; else it is a 409.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from tests.integration.app.fake_worker import (
    DONE,
    MODEL,
    STREAM_HEAD,
    Behaviour,
    Call,
    answers,
    chunk,
    event,
    head,
    wait_for_either,
)
from workers.resume import (
    CODE_RESUME_UNSUPPORTED,
    RESUME_CONTENT_TYPE,
    Resume,
    crc32,
    decode_resume,
    encode_framed,
    encode_outputs,
    note,
)

NOTED_HEAD = STREAM_HEAD[:-2] + b"x-hotspare-stream: 1\r\n\r\n"
FRAMED_HEAD = head(
    200,
    content_type="text/event-stream",
    cache_control="no-cache",
    x_hotspare_stream="body",
    transfer_encoding="chunked",
)


def refuses(status: int = 409, code: str = CODE_RESUME_UNSUPPORTED) -> Behaviour:
    error = {"message": "no", "type": "invalid_request_error", "param": None, "code": code}
    return answers(status, {"error": error})


def is_resume(call: Call) -> bool:
    return call.headers.get("content-type") == RESUME_CONTENT_TYPE


class Story:
    def __init__(self, units: Sequence[Sequence[bytes]] | None = None, *, end: bytes = DONE, said: str = "") -> None:
        """``said``: what stands in each note after its tokens."""
        given = units if units is not None else ([event("a")], [event("b"), event("c")], [], [event("d")], [event("e")])
        self.units = [b"".join(unit) for unit in given] + [end]
        self._counts = [len(unit) for unit in given] + [1]
        self._said = said

    @property
    def stream(self) -> bytes:
        return b"".join(self.units)

    @property
    def document(self) -> bytes:
        message = {"role": "assistant", "content": f"{len(self.units)} units"}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        return json.dumps({"id": "c-1", "object": "chat.completion", "model": MODEL, "choices": choices}).encode()

    def tokens(self, number: int) -> str:
        return encode_outputs([[(0, [1000 + number, 7])]])

    def _rest(self, number: int) -> str:
        words = [f"g={self.tokens(number)}"] + (["t=1764450000 p=3"] if not number else [])
        return " ".join(words + ([self._said] if self._said else []))

    def unit(self, number: int) -> bytes:
        """With its note, as a worker sends it. One without events has none: its tokens are in the next note."""
        sent = b"".join(self.units[: number + 1])
        events = sum(self._counts[: number + 1])
        if not self._counts[number]:
            return b""
        rest = self._rest(number)
        if number and not self._counts[number - 1]:
            rest = rest.replace("g=", f"g={self.tokens(number - 1)}|", 1)
        return note(events=events, new=self._counts[number], crc=crc32(sent), rest=rest) + self.units[number]

    def begins_at(self, resume: Resume) -> int | None:
        """With which unit to go on; ``None`` if the client has something else."""
        outputs = len(resume.outputs)
        expected = [[(0, [1000 + number, 7])] for number in range(outputs)]
        sent = b"".join(self.units[:outputs])
        if resume.outputs != expected or resume.created != 1764450000:
            return None
        if resume.events and (resume.events, resume.crc) != (sum(self._counts[:outputs]), crc32(sent)):
            return None
        return outputs

    def told(self, *, cut: int | None = None, wait: int | None = None, reset: bool = False, half: int = 0) -> Behaviour:
        """Tell it, from where it is asked to. ``cut``: break off after so many units of the story (and ``half`` bytes
        of the next one); ``wait``: until the test says so, after so many."""

        async def behave(call: Call) -> None:
            begin, body = 0, call.body
            if is_resume(call):
                resume, body = decode_resume(call.body)
                found = self.begins_at(resume)
                if found is None:
                    await refuses()(call)
                    return
                begin = found
            streaming = json.loads(body).get("stream", False)
            await call.send(NOTED_HEAD if streaming else FRAMED_HEAD)
            for number in range(begin, len(self.units) + 1):
                if number == wait:
                    await wait_for_either(call.go, call.closed)
                if number == cut:
                    if half:
                        await call.send(chunk(self.unit(number)[:half]))
                    call.cut(reset=reset)
                    return
                if call.closed.is_set():
                    return
                if number < len(self.units):
                    piece = self.unit(number) if streaming else self._note(number)
                    if piece:
                        await call.send(chunk(piece))
            if not streaming:
                headers = [(b"content-type", b"application/json"), (b"x-from", call.worker.name.encode())]
                await call.send(chunk(encode_framed(200, headers, self.document)))
            await call.send(b"0\r\n\r\n")

        return behave

    def _note(self, number: int) -> bytes:
        return note(events=0, new=0, crc=0, rest=self._rest(number))
