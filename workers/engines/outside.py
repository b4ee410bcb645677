"""What adapters share for engines that do their work in processes of their own, behind one object.

Such an engine keeps weights and KV cache to itself: nothing of it lies in the memory service, no cache is carried over
a promotion, and no answer is gone on with exactly. Each of these is refused by name and never half done.

Requests are counted, and cancelled, where they enter the engine's own application: each is a task here, and a park or a
shutdown cancels those tasks before it touches the engine. A fatal error is only said (``EngineDeadError``), and
``workers.life`` ends the process at once: the spare waits for the lock that this process holds, and with it every
request. Nothing is lost by it: the engine's own processes die with the thread that started them, and the kernel and
the driver take back what they held, as they must after any other death.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

from gms.custody_phases import CustodyState
from workers.asgi import Message, Receive, Scope, Send, respond_error
from workers.engine import ASGIApp, EngineConfigError, EngineDeadError, EngineMemory
from workers.engines.envelope import enveloped
from workers.memory import MemoryService
from workers.resume import CODE_RESUME_UNSUPPORTED, RESUME_CONTENT_TYPE
from workers.settings import EngineSettings
from workers.threads import OwnThread

logger = logging.getLogger(__name__)

T = TypeVar("T")

NOT_RUN: Final = "this adapter was written against the engine's published interface and was not run on hardware"
ABORT_SECONDS: Final = 30.0
"""For the requests that a park ends: the step that runs must end first."""

_RESUME: Final = RESUME_CONTENT_TYPE.encode()


class OutsideEngine:
    """Implements ``workers.engine.Engine`` over a few calls that each adapter has for its engine."""

    caveat: ClassVar[str] = NOT_RUN
    title: ClassVar[str]
    """What people call the engine."""

    def __init__(self, settings: EngineSettings, service: MemoryService | None, runtime_dir: Path) -> None:
        """Raises:
        EngineConfigError: something is asked for that the engine cannot do.
        """
        if service is not None:
            raise EngineConfigError(
                f"{self.title} keeps weights and KV cache to itself: nothing of them can lie in the memory service, "
                "and no KV cache is carried over; go without one (--no-gms, HOTSPARE_GMS=false)"
            )
        if settings.model is None:
            raise EngineConfigError(f"{self.title} has no embedded model: name one with --model or HOTSPARE_MODEL")
        self._settings = settings
        self._model = settings.model
        self.models: tuple[str, ...] = ()
        self.max_model_len = 0
        self._parts = 0
        self._engine: Any = None
        self._thread: OwnThread | None = None
        self._starting: asyncio.Future[Any] | None = None
        self._app: ASGIApp | None = None
        self._awake = False
        self._failure = ""
        self._consuming: set[asyncio.Task[None]] = set()

    # --- what each adapter has

    def start(self) -> Any:
        """The engine, loaded. Blocks; runs in a thread.

        Raises:
            EngineConfigError: not installed, too old, or settings that it does not take.
        """
        raise NotImplementedError

    async def ready(self, engine: Any) -> ASGIApp:
        """What is still to be done on the event loop; the engine's own application."""
        raise NotImplementedError

    async def abort(self, engine: Any) -> None:
        """End every request in the engine, and wait until it has none."""
        raise NotImplementedError

    async def release_kv(self, engine: Any) -> None:
        raise NotImplementedError

    async def resume_kv(self, engine: Any) -> None:
        raise NotImplementedError

    def problem(self, engine: Any) -> str:
        """Why it can serve no more, or ""."""
        raise NotImplementedError

    def stop(self, engine: Any) -> None:
        """Its own shutdown. Blocks; runs in a thread."""
        raise NotImplementedError

    # --- workers.engine.Engine

    def progress(self, engine: Any) -> int:
        """A count that advances while it works and nothing leaves, where the engine has one."""
        return 0

    @property
    def steps(self) -> int:
        """Parts of answers that have left, and what the engine says of its progress besides."""
        return self._parts + (self.progress(self._engine) if self._engine is not None else 0)

    @property
    def busy(self) -> bool:
        return bool(self._consuming)

    @property
    def dead(self) -> bool:
        return bool(self._failure)

    async def initialize(self) -> None:
        self._thread = OwnThread(self.title)  # its processes die with the thread that started them
        self._starting = asyncio.ensure_future(self._thread.call(self.start))
        self._engine = await asyncio.shield(self._starting)
        self._starting = None
        self._app = await self.ready(self._engine)
        self.models = (self._settings.served_model_name or self._model.resolve().name,)
        self.max_model_len = self._settings.max_model_len
        self._awake = True
        await self.park()

    async def wake(self, *, epoch: int) -> None:
        if self._awake:
            raise RuntimeError("the engine is awake already")
        await self.resume_kv(self._running)
        self._awake = True

    async def park(self) -> None:
        engine = self._running
        if not self._awake:
            return
        await self._cancel_consuming()
        try:
            async with asyncio.timeout(ABORT_SECONDS):
                await self.abort(engine)
        except TimeoutError:
            raise EngineDeadError(f"{self.title} did not end its requests within {ABORT_SECONDS:g} s") from None
        await self.release_kv(engine)
        self._awake = False

    async def self_test(self) -> None:
        """Its KV cache is away, so that no forward can be run: that its processes live is all that can be seen."""
        await self.check_health()

    async def quiesce(self, *, timeout_seconds: float) -> None:
        """Its requests cannot be kept without its KV cache: it serves on, and who hands over waits for them."""
        raise TimeoutError(f"{self.title} cannot keep requests while its KV cache is away")

    def app(self) -> ASGIApp:
        if self._app is None:
            raise RuntimeError("the engine is not initialised")
        return self._counted

    async def check_health(self) -> None:
        if self._engine is None and not self._failure:
            raise EngineDeadError(f"{self.title} is not running")
        self._look()
        if self._failure:
            raise EngineDeadError(self._failure)

    def kv_usage(self) -> float:
        """Not published by these engines in a form that costs nothing: 0."""
        return 0.0

    def memory(self) -> EngineMemory:
        """Sizes are the engine's own and not known here: 0."""
        return EngineMemory(
            weights_bytes=0, weights_outside_gms_bytes=0, weights_role="private", kv_bytes=0, kv_mapped=self._awake
        )

    def custody(self) -> tuple[CustodyState, ...]:
        return ()

    async def shutdown(self) -> None:
        await self._cancel_consuming()
        starting, self._starting = self._starting, None
        if starting is not None:
            # Stopped while it started: what comes of that is waited for, and stopped, too.
            await asyncio.wait({starting})
            if starting.exception() is None:
                self._engine = starting.result()
        engine, self._engine = self._engine, None
        self._app, self._awake = None, False
        thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            if engine is not None:
                await thread.call(lambda: self.stop(engine))
        except Exception:
            logger.exception("%s: its shutdown failed", self.title)
        finally:
            thread.end()

    # ---

    def _look(self) -> None:
        """From a fatal error on the engine is dead, for good."""
        if not self._failure and self._engine is not None and (reason := self.problem(self._engine)):
            self._failure = f"{self.title}: {reason}"

    async def _cancel_consuming(self) -> None:
        tasks = tuple(self._consuming)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if app is None:
            return  # shut down: without an answer, the connection ends
        if scope["type"] == "http" and any(
            name == b"content-type" and value.startswith(_RESUME) for name, value in scope["headers"]
        ):
            await respond_error(
                send,
                409,
                message=f"{self.title} cannot go on with an answer exactly",
                kind="invalid_request_error",
                code=CODE_RESUME_UNSUPPORTED,
            )
            return

        async def sent(message: Message) -> None:
            if message.get("body"):
                self._parts += 1
            elif message.get("status", 0) >= 500:
                self._look()  # before it leaves: the engine's death would be no answer to this request
            await send(message)

        task = asyncio.ensure_future(_run(app, scope, receive, enveloped(sent)))
        self._consuming.add(task)
        task.add_done_callback(self._consuming.discard)
        try:
            await asyncio.wait({task})
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        if task.cancelled():
            return
        if task.exception() is not None:
            self._look()
        task.result()

    @property
    def _running(self) -> Any:
        if self._engine is None:
            raise EngineDeadError(self._failure or f"{self.title} is not running")
        return self._engine


async def _run(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    await app(scope, receive, send)


def published(name: str, load: Callable[[], T], *, title: str) -> T:
    """What ``load`` imports of an engine's published interface.

    Raises:
        EngineConfigError: it is not installed, or has another interface; says which part is missing.
    """
    try:
        return load()
    except (ImportError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            raise EngineConfigError(f"{title} is not installed here: there is no package {name}") from None
        raise EngineConfigError(
            f"this version of {title} has another interface than the adapter needs: {error}"
        ) from None
