"""One generated answer: tokens as they come, turned into text, written in the request's form, streamed or whole.

What is pulled from the batch at once is one output, and the events made of it are one unit (:mod:`workers.recorder`).
Events are a function of the tokens alone, so an answer that another engine began is gone on with by writing its tokens
first: they are what this engine would have generated itself, or it refuses.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from typing import Any, Final

from workers.contract import HEADER_RESELECT
from workers.engine import EngineDeadError
from workers.engines.sim import tokens
from workers.engines.sim.api import ApiError, Form, Job
from workers.engines.sim.scheduler import Generation
from workers.engines.sim.stops import StopFilter
from workers.recorder import Recorder, ResumeRefusedError
from workers.resume import Choices

logger = logging.getLogger(__name__)

Event = MutableMapping[str, Any]
Send = Callable[[Event], Awaitable[None]]
Submit = Callable[..., Generation]
"""(generated=) → the generation that goes on after these tokens."""
TokenAt = Callable[[int, int], int]
"""(the prompt's digest, index) → the token that this engine generates there."""

JSON: Final = b"application/json"
EVENT_STREAM: Final = b"text/event-stream; charset=utf-8"

REPLAY_TOKENS: Final = 1000
"""So many are replayed at a time; then others have their turn."""


class ClientGone(Exception):
    """The client disconnected: there is nobody to answer."""


async def stream(text: TextOut, form: Form, send: Send, recorder: Recorder | None) -> None:
    """The head goes out with the first token, so that whatever fails before it has a real status."""
    try:
        parts = await text.pull()
    except EngineDeadError as error:
        raise _gone(error) from None
    await send(head(200, EVENT_STREAM, ((b"cache-control", b"no-cache"),)))
    events = [form.opening()]
    try:
        while True:
            events += [form.last(*part) if part[1] else form.text(part[0]) for part in parts]
            if text.finish:
                form.cached_tokens = text.cached
                events.append(form.closing(text.count))
            await send({"type": "http.response.body", "body": b"".join(events), "more_body": not text.finish})
            if text.finish:
                return
            events = []
            if recorder is not None:
                await recorder.end_unit()
            parts = await text.pull()
    except EngineDeadError as error:
        # The stream is left without its end marker and without its last chunk: a cut that nobody takes for an end.
        logger.warning("a stream was cut: %s", error)


async def whole(text: TextOut, form: Form, send: Send, recorder: Recorder | None) -> None:
    """One document, once all of it is there; what it has so far is noted meanwhile."""
    shown: list[str] = []
    try:
        while not text.finish:
            shown += [part for part, _ in await text.pull()]
            if recorder is not None:
                await recorder.note_alone()
    except EngineDeadError as error:
        if recorder is not None and recorder.begun:  # notes have left, and whoever has them can go on
            logger.warning("a whole answer was cut: %s", error)
            return
        raise _gone(error) from None
    if recorder is not None:
        await recorder.replayed()  # if the other engine had all of it
    form.cached_tokens = text.cached
    await respond(send, 200, form.document("".join(shown), text.finish, text.count))


class Pieces:
    """Tokens to text: stop strings, finish reason and the count that usage shows."""

    def __init__(self, job: Job) -> None:
        self._max_tokens = job.max_tokens
        self._filter = StopFilter(job.stops)
        self.count = 0
        self.finish = ""
        """``stop`` or ``length``, once it is finished."""

    def push(self, new: Iterable[int]) -> list[tuple[str, str]]:
        """The (text, finish reason) pairs of new tokens, one for each that shows something; the last one carries the
        reason, and what comes after it is dropped."""
        shown: list[tuple[str, str]] = []
        for token in new:
            self.count += 1
            text = self._filter.push(tokens.PIECES[token].decode())
            if self._filter.stopped:
                self.finish = "stop"
            elif self.count == self._max_tokens:
                self.finish = "length"
                text += self._filter.flush()
            if text or self.finish:
                shown.append((text, self.finish))
            if self.finish:
                break
        return shown


class TextOut:
    """One request's tokens as text, those of another engine first. Close it, whatever happened."""

    def __init__(self, job: Job, *, submit: Submit, token_at: TokenAt, recorder: Recorder | None = None) -> None:
        self._job = job
        self._submit = submit
        self._token_at = token_at
        self._recorder = recorder
        resume = recorder.resume if recorder is not None else None
        self._before: Iterator[Choices] = iter(resume.outputs if resume is not None else ())
        """Outputs of the engine that had this request before, which are written first."""
        self._given: list[int] = []
        """Their tokens."""
        self._digest: int | None = None
        self._pieces = Pieces(job)
        self._generation: Generation | None = None
        self._closed = False
        self._told = recorder is not None and recorder.resume is not None
        """Whether notes say how much of the prompt was cached."""
        self._cached = 0

    @property
    def count(self) -> int:
        return self._pieces.count

    @property
    def finish(self) -> str:
        return self._pieces.finish

    @property
    def cached(self) -> int:
        """How many of the prompt's tokens the first engine that had this request found in its prefix cache."""
        resume = self._recorder.resume if self._recorder is not None else None
        if resume is not None:
            return resume.cached_tokens or 0
        return self._cached

    def close(self) -> None:
        """Stop generating, and end a ``pull`` that waits."""
        self._closed = True
        if self._generation is not None:
            self._generation.close()

    async def pull(self) -> list[tuple[str, str]]:
        """What the next output shows (``Pieces.push``). Not to be asked again once it is finished.

        Raises:
            EngineDeadError: the engine failed.
            ClientGone: nobody listens any more.
            ResumeRefusedError: what the other engine said is not what this one would have.
        """
        output = next(self._before, None) if self._generation is None else None
        if output is not None:
            return self._pieces.push(await self._replayed(output))
        recorder = self._recorder
        if self._generation is None:
            if recorder is not None:
                await recorder.replayed()
            if self._closed:
                raise ClientGone
            self._generation = self._submit(generated=self._given)
        new = await self._generation.pull()
        if not new:
            raise ClientGone
        first = 0
        if not self._told:  # later it may be preempted, and find more
            self._told = True
            first = self._cached = min(self._generation.request.cached, len(self._job.prompt))
        if recorder is not None:
            recorder.output([(0, new)], cached_tokens=first or None)
        shown = self._pieces.push(new)
        if self.finish:
            self.close()  # before its slot makes another one
        return shown

    async def _replayed(self, output: Choices) -> list[int]:
        """The tokens of an output of the other engine: they are this one's own, too, and within what was asked for."""
        if len(output) != 1 or output[0][0] != 0:
            raise ResumeRefusedError("its notes are not those of one choice")
        new, index = output[0][1], len(self._given)
        if not new:
            raise ResumeRefusedError("its notes have an output without a token")
        if index + len(new) > self._job.max_tokens:
            raise ResumeRefusedError("its notes have more tokens than were asked for")
        if self._digest is None:
            self._check_first()
            self._digest = tokens.prompt_digest(self._job.prompt)
        for at, token in enumerate(new, index):
            if token != self._token_at(self._digest, at):
                raise ResumeRefusedError(f"token {at} is not the one that this engine generates there")
        self._given += new
        if index // REPLAY_TOKENS != len(self._given) // REPLAY_TOKENS:
            await asyncio.sleep(0)
        return new

    def _check_first(self) -> None:
        """What notes may say beside tokens."""
        resume = self._recorder.resume if self._recorder is not None else None
        if resume is not None and resume.logprobs:
            raise ResumeRefusedError("its notes have logprobs that were not asked for")
        if resume is not None and (resume.cached_tokens or 0) > len(self._job.prompt):
            raise ResumeRefusedError("its notes have more cached tokens than its prompt has tokens")


def _gone(error: EngineDeadError) -> ApiError:
    """Nothing was delivered, so another worker may start over."""
    reselect = ((HEADER_RESELECT.encode(), b"1"),)
    return ApiError(503, f"the engine is gone: {error}", code="engine_dead", kind="server_error", headers=reselect)


def head(status: int, content_type: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()) -> Event:
    return {
        "type": "http.response.start",
        "status": status,
        "headers": [(b"content-type", content_type), *headers],
    }


async def respond(send: Send, status: int, body: bytes, *, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
    await send(head(status, JSON, ((b"content-length", str(len(body)).encode()), *headers)))
    await send({"type": "http.response.body", "body": body})
