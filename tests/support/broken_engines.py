"""Engines that break one promise each, and are sims in all else: what ``hotspare conformance`` must find."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import threading
import time
from typing import Any

import msgspec

from workers.asgi import Message, Receive, Scope, Send
from workers.engine import ASGIApp, EngineConfigError, EngineDeadError, EngineMemory
from workers.engines.sim import SimEngine
from workers.lifeline import die_with_parent
from workers.resume import RESUME_CONTENT_TYPE
from workers.threads import in_daemon_thread


class NeverInitializes(SimEngine):
    async def initialize(self) -> None:
        raise RuntimeError("no start today")


class NeverReady(SimEngine):
    async def initialize(self) -> None:
        await asyncio.Event().wait()


class NeverGivesUp(SimEngine):
    """Is not initialised, and does not hear that it is cancelled."""

    async def initialize(self) -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()


class NotForThese(SimEngine):
    async def initialize(self) -> None:
        raise EngineConfigError("there is no model here;\nset HOTSPARE_MODEL")


class BlocksTheLoop(SimEngine):
    async def initialize(self) -> None:
        await super().initialize()
        time.sleep(self._settings.beat_timeout_seconds + 0.1)  # noqa: ASYNC251 - the fault


class NoModels(SimEngine):
    async def initialize(self) -> None:
        await super().initialize()
        self.models = ()


class ClaimsToShare(SimEngine):
    def memory(self) -> EngineMemory:
        return msgspec.structs.replace(super().memory(), weights_outside_gms_bytes=super().memory().weights_bytes)


class WakesAtOnce(SimEngine):
    async def initialize(self) -> None:
        await super().initialize()
        await super().wake(epoch=1)


class FailsItsTest(SimEngine):
    async def self_test(self) -> None:
        raise EngineDeadError("could not wake")


class WakesWhenCancelled(SimEngine):
    async def self_test(self) -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            await super().wake(epoch=1)
            raise


class BreaksInTheMiddle(SimEngine):
    """Whose self-test may be cancelled at its beginning, and not while it holds something."""

    async def self_test(self) -> None:
        await asyncio.sleep(0.02)
        try:
            await asyncio.sleep(0.2)
        except asyncio.CancelledError:
            self._scheduler.fail(EngineDeadError("left half way"))
            raise


class WakesToNothing(SimEngine):
    async def wake(self, *, epoch: int) -> None:
        pass


class DiesAwake(SimEngine):
    async def wake(self, *, epoch: int) -> None:
        os._exit(3)


class HangsAwake(SimEngine):
    async def wake(self, *, epoch: int) -> None:
        time.sleep(3600)  # noqa: ASYNC251 - the fault


class NeverReturns(SimEngine):
    async def wake(self, *, epoch: int) -> None:
        await asyncio.Event().wait()


class HidesCustody(SimEngine):
    def custody(self) -> tuple[Any, ...]:
        return ()


class StandsStill(SimEngine):
    @property
    def steps(self) -> int:
        return 7


class NeverBusy(SimEngine):
    @property
    def busy(self) -> bool:
        return False


class OtherApp(SimEngine):
    """Whose application is the sim's, seen through ``changed``."""

    def app(self) -> ASGIApp:
        inner = super().app()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await inner(scope, receive, send)
                return
            await self.changed(inner, scope, receive, send)

        return app

    async def changed(self, inner: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        async def replaced(message: Message) -> None:
            await send(self.said(message))

        await inner(scope, receive, replaced)

    def said(self, message: Message) -> Message:
        return message


class CutsStreams(OtherApp):
    def said(self, message: Message) -> Message:
        return {**message, "body": message["body"].replace(b"data: [DONE]\n\n", b"")} if "body" in message else message


class NoEvents(OtherApp):
    def said(self, message: Message) -> Message:
        return {**message, "body": message["body"].replace(b"data: {", b"{")} if "body" in message else message


class KeepsGoing(OtherApp):
    async def changed(self, inner: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        async def deaf() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect":
                await asyncio.Event().wait()
            return message

        await inner(scope, deaf, send)


class PlainErrors(OtherApp):
    def said(self, message: Message) -> Message:
        if b'{"error":' in message.get("body", b""):
            length = len(message["body"])
            return {**message, "body": b'{"detail":"no"}'.ljust(length)}
        return message


class WrongNotes(OtherApp):
    def said(self, message: Message) -> Message:
        return {**message, "body": message["body"].replace(b" c=", b" c=1")} if "body" in message else message


class BeginsAgain(OtherApp):
    async def changed(self, inner: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        if (b"content-type", RESUME_CONTENT_TYPE.encode()) not in scope["headers"]:
            await inner(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": b": nothing more to say\n\n"})


class NoFrame(OtherApp):
    def said(self, message: Message) -> Message:
        if "headers" not in message:
            return message
        return {**message, "headers": [(name, value.replace(b"body", b"1")) for name, value in message["headers"]]}


class WakesTwice(SimEngine):
    async def wake(self, *, epoch: int) -> None:
        with contextlib.suppress(RuntimeError):
            await super().wake(epoch=epoch)


class ForgetsWhenQuiesced(SimEngine):
    async def quiesce(self, *, timeout_seconds: float) -> None:
        await super().quiesce(timeout_seconds=timeout_seconds)
        for generation in tuple(self._scheduler._generations.values()):
            generation.close()


class StepsAfterPark(SimEngine):
    async def park(self) -> None:
        await super().park()
        self._scheduler.resume()


class RefusesToParkAgain(SimEngine):
    async def park(self) -> None:
        if not self.memory().kv_mapped:
            raise RuntimeError("it is parked already")
        await super().park()


class LeaksWithEachWake(SimEngine):
    async def wake(self, *, epoch: int) -> None:
        os.open(os.devnull, os.O_RDONLY)
        await super().wake(epoch=epoch)


class OwnEpochs(SimEngine):
    async def wake(self, *, epoch: int) -> None:
        self.own = getattr(self, "own", 1000) + 1
        await super().wake(epoch=self.own)


class SlowToEnd(SimEngine):
    async def shutdown(self) -> None:
        await asyncio.sleep(self._settings.engine_shutdown_seconds + 0.5)
        await super().shutdown()


class EndsOnce(SimEngine):
    ended = False

    async def shutdown(self) -> None:
        if self.ended:
            raise RuntimeError("it was shut down already")
        self.ended = True
        await super().shutdown()


class AlwaysWell(SimEngine):
    async def check_health(self) -> None:
        pass


class LeavesThread(SimEngine):
    async def shutdown(self) -> None:
        threading.Thread(target=threading.Event().wait, name="left-behind", daemon=True).start()
        await super().shutdown()


class LeavesChild(SimEngine):
    async def shutdown(self) -> None:
        parent = os.getpid()
        if os.fork() == 0:
            die_with_parent(parent)
            signal.pause()
        await super().shutdown()


class LeavesDaemon(SimEngine):
    """A process that is nobody's child and in nobody's session."""

    async def shutdown(self) -> None:
        if (between := os.fork()) == 0:
            os.setsid()
            if os.fork() == 0:
                signal.pause()
            os._exit(0)
        os.waitpid(between, 0)  # noqa: ASYNC222 - it is ending
        await super().shutdown()


class LeavesSharedMemory(SimEngine):
    async def initialize(self) -> None:
        self.shared = os.open(f"/dev/shm/hotspare-left-{os.getppid()}", os.O_CREAT | os.O_RDWR)
        await super().initialize()

    async def shutdown(self) -> None:
        os.close(self.shared)
        await super().shutdown()


class LeavesFolder(SimEngine):
    async def shutdown(self) -> None:
        tempfile.mkdtemp(prefix="left-")
        await super().shutdown()


class KeepsItsLease(SimEngine):
    async def shutdown(self) -> None:
        self._scheduler.fail(EngineDeadError("the engine was shut down"))


class OpensWhenMade(SimEngine):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        tempfile.mkdtemp(prefix="made-")


class NeedsToBeInitialized(SimEngine):
    async def shutdown(self) -> None:
        if self._loop_task is None:
            raise RuntimeError("it was not initialised")
        await super().shutdown()


class LeavesWhenInterrupted(SimEngine):
    async def initialize(self) -> None:
        folder = tempfile.mkdtemp(prefix="starting-")
        await super().initialize()
        os.rmdir(folder)


class ForgetsItsRequests(SimEngine):
    async def shutdown(self) -> None:
        task, self._loop_task = self._loop_task, None
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))
        if self._kv is not None:
            await in_daemon_thread(self._kv.close, name="sim-kv")
