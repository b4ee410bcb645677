"""The engine under test, with what every check needs of it: its state, calls that have a deadline, requests to its app.

Checks say in which state they want the engine, and leave it in any: the next one has it brought where it wants it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from enum import StrEnum
from typing import Any, Final, TypeVar

import httpx
import msgspec

from app.cli.conformance import leftovers
from app.cli.conformance.leftovers import Held
from app.cli.conformance.outcomes import Failed, Skipped
from gms.protocol import PoolStatus
from workers.asgi import Receive, Scope, Send, respond
from workers.engine import ASGIApp, Engine
from workers.http_server import serve_http
from workers.memory import KV_POOL, MemoryService
from workers.settings import EngineSettings
from workers.threads import in_daemon_thread

T = TypeVar("T")

CALL_SECONDS: Final = 30.0
"""For each call of the protocol but ``initialize``; a long prefill may be under way."""
ANSWER_SECONDS: Final = 60.0
POLL_SECONDS: Final = 0.01
QUIET_SECONDS: Final = 0.25
"""An engine that makes no step for so long makes none: one token takes less."""
SHORT_TOKENS: Final = 8
LONG_TOKENS: Final = 4000
"""Of a request that is to be running still while something else happens to the engine."""

Json = dict[str, Any]


class State(StrEnum):
    NEW = "new"
    PARKED = "parked"
    AWAKE = "awake"
    ENDED = "ended"


class Subject:
    """One engine in one process."""

    def __init__(
        self,
        make: Callable[[], Engine],
        settings: EngineSettings,
        service: MemoryService | None,
        *,
        settle_seconds: float,
    ) -> None:
        """``settle_seconds``: for what an engine does soon after, and not in, a call."""
        self.before = leftovers.look()
        """What this process held before the engine was made."""
        self._shared_before = leftovers.shared_memory()
        self._shared: set[str] = set()
        self.engine = make()
        self.settings = settings
        self.service = service
        self.settle_seconds = settle_seconds
        self.state = State.NEW
        self.longest_pause = 0.0
        """Between two turns of the event loop while it was initialised, in seconds."""
        self._epoch = 0
        self._extra: Json | None = None
        self._broken: str = ""
        """Why it cannot be brought into a state any more."""

    # --- the calls of its life

    async def within(self, what: str, call: Awaitable[T], *, seconds: float = CALL_SECONDS) -> T:
        """The result of a call of the protocol."""
        try:
            async with asyncio.timeout(seconds):
                return await call
        except TimeoutError:
            raise Failed(f"{what} did not return within {seconds:g} s") from None

    async def initialize(self) -> None:
        before, longest = asyncio.get_running_loop().time(), 0.0

        async def turns() -> None:
            nonlocal before, longest
            while True:
                await asyncio.sleep(POLL_SECONDS)
                now = asyncio.get_running_loop().time()
                longest, before = max(longest, now - before), now

        turning = asyncio.ensure_future(turns())
        try:
            await self.engine.initialize()
        finally:
            longest = max(longest, asyncio.get_running_loop().time() - before)
            turning.cancel()
            await asyncio.wait({turning})
            self.longest_pause = longest
        self.state = State.PARKED

    async def next_epoch(self) -> int:
        fence = 0
        if self.service is not None:
            fence = await in_daemon_thread(self.service.kv_fence, name="kv-fence")
        self._epoch = max(self._epoch, fence) + 1
        return self._epoch

    async def wake(self) -> None:
        await self.within("wake()", self.engine.wake(epoch=await self.next_epoch()))
        self.state = State.AWAKE

    async def park(self) -> None:
        await self.within("park()", self.engine.park())
        self.state = State.PARKED

    async def shutdown(self) -> None:
        self.state = State.ENDED
        await self.within("shutdown()", self.engine.shutdown())

    async def to(self, wanted: State) -> None:
        """Bring it there.

        Raises:
            Skipped: it could not be brought there, which another check is about.
        """
        if self._broken:
            raise Skipped(self._broken)
        order = [State.NEW, State.PARKED, State.AWAKE]
        try:
            if self.state is wanted:
                return
            if State.ENDED in (self.state, wanted) or wanted is State.NEW:
                raise Skipped(f"the engine is {self.state}, and this is about one that is {wanted}")
            if self.state is State.NEW:
                raise Failed("it was not initialised")
            if order.index(wanted) > order.index(self.state):
                await self.wake()
            else:
                await self.park()
        except Skipped:
            raise
        except Exception as error:
            self._broken = f"the engine could not be made {wanted} for it: {error}"
            raise Skipped(self._broken) from error

    # --- what the memory service says

    async def kv_pool(self) -> PoolStatus | None:
        """The KV pool as the service has it; None without one, or before anybody used it."""
        if self.service is None:
            return None
        service = self.service

        def ask() -> PoolStatus | None:
            with service.connect() as client:
                return next((pool for pool in client.status().pools if pool.name == KV_POOL), None)

        return await in_daemon_thread(ask, name="status")

    async def nothing_since(self, held: Held, saying: str, *, but: Sequence[str] = ()) -> list[str]:
        """Until nothing is left that was not held then, ``but`` what these expressions match; returns what those were.

        Raises:
            Failed: something is left all the same; says what.
        """

        def left() -> list[str]:
            found = [*leftovers.look().since(held), *self._shared_left()]
            return [what for what in found if not any(re.fullmatch(known, what) for known in but)]

        try:
            async with asyncio.timeout(self.settle_seconds):
                while left():  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise Failed(f"{saying} {leftovers.in_words(left())}") from None
        return leftovers.look().since(held)

    def note_shared_memory(self) -> None:
        """What the engine holds in /dev/shm now must be gone when it has been shut down."""
        self._shared.update(leftovers.shared_memory() - self._shared_before)

    def _shared_left(self) -> list[str]:
        if self.state is not State.ENDED:
            return []
        return [f"file {path}" for path in sorted(self._shared) if os.path.exists(path)]

    async def require_no_kv(self, when: str) -> None:
        """Raises Failed if KV pages are mapped or leased."""
        if self.engine.memory().kv_mapped:
            raise Failed(f"memory() says that KV pages are mapped {when}")
        pool = await self.kv_pool()
        if pool is not None and pool.leases:
            raise Failed(f"the memory service has a lease on its KV pages {when}")

    # --- requests

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        """Its application, served as it is while the engine is active."""
        async with _client_of(self.engine.app()) as client:
            yield client

    async def completion(self, client: httpx.AsyncClient, *, tokens: int, stream: bool) -> Json:
        """A body for /v1/completions that has the engine make ``tokens`` tokens, if it can be told to."""
        if self._extra is None:
            said = ""
            for extra in ({"ignore_eos": True}, {}):
                self._extra = extra
                answer = await client.post("/v1/completions", json=self._body(tokens=1, stream=False))
                if answer.status_code == httpx.codes.OK:
                    break
                said = f"{answer.status_code}: {answer.text}"
            else:
                self._extra = None
                raise Failed(f"/v1/completions answers {said}")
        return self._body(tokens=tokens, stream=stream)

    def _body(self, *, tokens: int, stream: bool) -> Json:
        room = max(1, min(tokens, self.engine.max_model_len - 64)) if self.engine.max_model_len else tokens
        fixed = {"model": self.engine.models[0], "prompt": PROMPT, "max_tokens": room, "temperature": 0}
        return {**fixed, "stream": stream, **(self._extra or {})}

    @contextlib.asynccontextmanager
    async def running_stream(self, client: httpx.AsyncClient) -> AsyncIterator[AsyncIterator[bytes]]:
        """A long stream whose first bytes have come; yields the rest."""
        body = await self.completion(client, tokens=LONG_TOKENS, stream=True)
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                raise Failed(f"a stream is answered with {answer.status_code}")
            rest = answer.aiter_raw()
            await anext(rest)
            yield rest

    async def until_quiet(self, saying: str) -> None:
        """Raises Failed with ``saying`` unless it stops to make steps: the one under way may still end."""
        try:
            async with asyncio.timeout(self.settle_seconds):
                while True:
                    steps = self.engine.steps
                    await asyncio.sleep(QUIET_SECONDS)
                    if self.engine.steps == steps:
                        return
        except TimeoutError:
            raise Failed(f"{saying}, {self.settle_seconds:g} s later") from None

    async def until(self, what: Callable[[], bool], saying: str) -> None:
        """Raises Failed with ``saying`` unless ``what`` becomes true. An engine tells nobody when it does."""
        try:
            async with asyncio.timeout(self.settle_seconds):
                while not what():  # noqa: ASYNC110 - as said
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise Failed(f"{saying}, {self.settle_seconds:g} s later") from None


async def warm_up() -> None:
    """What server and client open once for all is then no leftover of an engine's."""

    async def nothing(_scope: Scope, _receive: Receive, send: Send) -> None:
        await respond(send, httpx.codes.NO_CONTENT, b"")

    async with _client_of(nothing) as client:
        await client.get("/")


@contextlib.asynccontextmanager
async def _client_of(app: ASGIApp) -> AsyncIterator[httpx.AsyncClient]:
    sock = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    async with (
        serve_http(app, sock),
        httpx.AsyncClient(base_url=url, timeout=ANSWER_SECONDS, trust_env=False) as client,
    ):
        yield client


PROMPT: Final = "Once upon a time, in a small village by the sea,"


def document(raw: bytes) -> Json:
    """A JSON object.

    Raises:
        Failed: it is none.
    """
    try:
        return msgspec.json.decode(raw, type=Json)
    except msgspec.DecodeError as error:
        raise Failed(f"an answer is no JSON object ({error}): {raw[:80]!r}") from None
