"""``hotspare up``: a gateway and its pods on this machine, in the foreground.

It watches by asking (the processes' files, the engines' admin ports, the gateway's status) and holds no state that they
do not have. Signals, and children that end by themselves, resolve one future; what follows is one stop in order: the
gateway drains, then the pods go. A second signal kills. If ``up`` itself is killed, the kernel kills what it started.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from app.cli.children import Child
from app.cli.claim import LOGS, RunDirClaim
from app.cli.door import client_key, key_in_a_shell
from app.cli.errors import CliError
from app.cli.news import PodNews
from app.cli.observe import ask_gateway, ask_pod
from app.cli.plan import CHATTING, Limits, UpOptions, base_url, example_request
from app.cli.reports import Absence, EngineAnswer, GatewayReport
from app.cli.run_dir import GatewayFile, read_pod
from app.cli.screen import Screen
from app.cli.stages import Board, Stage, is_done, stages_of
from app.cli.starter import StartedPod, Starter
from app.cli.voice import Voice
from workers.exit_codes import ExitCode
from workers.pod_files import PodRecord
from workers.state import EngineState

STARTING_LOOK_SECONDS: Final = 0.1
STEADY_LOOK_SECONDS: Final = 0.25
ROUTES_LOOK_SECONDS: Final = 0.03
ROUTING_SECONDS: Final = 60.0
"""When every pod has an active engine, the gateway finds it within a second; ``Limits.start`` is for the rest."""
CONVERSION_STOP_SECONDS: Final = 5.0
NAMING_SECONDS: Final = 3.0
"""A stop that takes longer says what it waits for."""
STOPPED_LOOKS: Final = 3
"""So many looks in a row at a process that is stopped although it is to end, and it is killed."""
STOPPED_LOOK_SECONDS: Final = 1.0
FOLDER_LOOK_SECONDS: Final = 1.0
MODEL_STEP: Final = "model: conversion of the embedded SmolLM2"
GATEWAY_STEP: Final = "gateway"
ROUTES_STEP: Final = "gateway routes to every pod"


class Ending(NamedTuple):
    """Why ``up`` ends: a child that ended by itself with ``code``, an error, or else a signal."""

    child: Child | None = None
    code: int = 0
    error: CliError | None = None


class Up:
    """Watches what a ``Starter`` started. Build it in a running event loop."""

    def __init__(
        self,
        options: UpOptions,
        starter: Starter,
        *,
        screen: Screen,
        limits: Limits,
        began: float,
        environment: Mapping[str, str],
        claim: RunDirClaim | None = None,
    ) -> None:
        """``began`` is when the command was given, in seconds of the monotonic clock; ``claim`` is looked after."""
        self._claim = claim
        self._environment = environment
        self._certificate = environment.get("HOTSPARE_TLS_CERTIFICATE") or None
        self._options = options
        self._starter = starter
        self._screen = screen
        self._voice = Voice(screen)
        self._limits = limits
        self._began = began
        self._board = Board()
        self._ready = False
        self._parked: dict[str, int] = {}
        """Pod → how many of its spares were parked at the last look."""
        self._end: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self._forced = asyncio.Event()
        self._drained_seconds = 0.0
        """How long the gateway took to stop."""

    async def run(self, early_signals: Sequence[int]) -> int:
        """Until a signal asks to end; returns the exit code. ``early_signals`` came before there was a loop.

        Raises:
            CliError: the gateway, or every pod, ended by itself, or the start cannot go on. Everything else has been
                stopped, too.
        """
        with self._signals():
            for _ in early_signals:
                self._signalled()
            async with asyncio.TaskGroup() as group:
                logs = group.create_task(self._read_logs())
                folder = group.create_task(self._look_after_folder())
                watching = group.create_task(self._watch_while_it_goes())
                try:
                    ending = await self._end
                finally:
                    watching.cancel()
                    self._screen.finish()
                await asyncio.wait({watching})  # it waits for the same children that are about to be stopped
                code = await self._stop(ending)
                logs.cancel()
                folder.cancel()
        self._voice.read_logs(self._starter.children)
        if ending.error is not None:
            raise ending.error
        if ending.child is not None:
            raise CliError(self._why(ending.child, ending.code), code=code)
        return code

    # --- watching

    async def _watch_while_it_goes(self) -> None:
        """An error with a sentence ends ``up`` in order, as a signal does."""
        try:
            await self._watch()
        except* CliError as group:
            if not self._end.done():
                self._end.set_result(Ending(error=_first(group)))

    async def _watch(self) -> None:
        async with asyncio.TaskGroup() as group:
            if self._starter.gateway is None:
                raise RuntimeError("watching without a gateway")
            group.create_task(self._await_end(self._starter.gateway))
            self._board.begin(GATEWAY_STEP, now=self._began)
            if self._starter.model is not None:
                self._board.begin(MODEL_STEP, now=self._began)
                if code := await self._starter.model.ended():
                    self._ended_by_itself(self._starter.model, code)
                    return
                self._board.end(MODEL_STEP, now=time.monotonic())
                self._starter.start_pods()
            for pod in self._starter.pods:
                group.create_task(self._await_end(pod.child))
                group.create_task(self._look_at(pod))
            report = await self._until_routed()
            self._ready = True
            self._announce(report)

    async def _until_routed(self) -> GatewayReport:
        """Wait until the gateway routes to every pod.

        Raises:
            CliError: nothing happens any more.
        """
        wanted = {pod.plan.address for pod in self._starter.pods}
        file = GatewayFile(pid=0, host=self._options.host, port=self._starter.port, tls_certificate=self._certificate)
        while True:
            report = await ask_gateway(file, key=client_key(self._environment))
            now = time.monotonic()
            if report in (Absence.UNAUTHORIZED, Absence.WRONG_KEY):
                raise CliError(
                    "the gateway does not know the key that this command shows; "
                    "set HOTSPARE_API_KEY to one of its keys, or unset it",
                    code=ExitCode.BAD_CONFIGURATION,
                )
            if isinstance(report, GatewayReport):
                self._board.end(GATEWAY_STEP, now=now)
                self._board.begin(ROUTES_STEP, now=now)
                if wanted <= {worker.address for worker in report.workers if worker.routable}:
                    for pod in self._starter.pods:  # whose engines are active, then; nobody may have looked since
                        self._board.advance([(name, True) for name in self._steps_of(pod)], now=now)
                    self._board.end(ROUTES_STEP, now=now)
                    self._screen.show(self._board, now=now)
                    return report
            self._screen.show(self._board, now=now)
            self._lose_patience(now)
            await asyncio.sleep(ROUTES_LOOK_SECONDS)

    def _lose_patience(self, now: float) -> None:
        """After too long a time without a new step. What starts over and over again makes none."""
        pending = self._board.pending
        routing = all(step.name in (GATEWAY_STEP, ROUTES_STEP) for step in pending)
        quiet = now - self._board.changed
        if quiet <= (min(self._limits.start, ROUTING_SECONDS) if routing else self._limits.start):
            return
        steps = ", ".join(f"{step.name} ({step.note})" if step.note else step.name for step in pending)
        raise CliError(
            f"nothing has happened for {quiet:.0f} s, and this is not done: {steps}; "
            f"the logs in {self._options.run_dir / LOGS} may say why",
            code=ExitCode.ENGINE_DEAD,
        )

    def _announce(self, report: GatewayReport) -> None:
        self._screen.finish()
        url = base_url(self._options.host, self._starter.port, tls=self._certificate is not None)
        models = [model for worker in report.workers for model in worker.models]
        self._screen.say(f"ready after {time.monotonic() - self._began:.2f} s: {url}/v1", style="bold green")
        example = example_request(
            url,
            models[0] if models else "default",
            key=key_in_a_shell(self._environment),
            certificate=self._certificate,
            chats=self._options.engine in CHATTING,
        )
        self._screen.say(f"  {example}")
        if self._options.shadows:
            wanted = len(self._starter.pods) * self._options.shadows
            self._screen.say(
                spares_line(
                    parked=sum(self._parked.values()),
                    wanted=wanted,
                    bare=any(not self._parked.get(pod.plan.name) for pod in self._starter.pods),
                )
            )
        self._screen.say(f"Ctrl-C drains and stops; logs are in {self._options.run_dir / LOGS}")

    async def _look_at(self, pod: StartedPod) -> None:
        """One pod, until cancelled: its steps while it starts, then whatever changes."""
        news, complaint = PodNews(pod.plan.name), ""
        while True:
            try:
                file = read_pod(self._options.run_dir / pod.plan.name)
            except CliError as error:
                if not self._ready:
                    raise
                if str(error) != complaint:  # no reason to end what serves
                    self._voice.say(complaint := str(error), style="red")
                file = None
            if file is not None and file.pid == pod.child.pid:
                answers = await ask_pod(file)
                now = time.monotonic()
                self._advance(pod, file, answers, now)
                changes = news.look(answers, now=now)
                self._parked[pod.plan.name] = news.parked
                for item in changes:
                    self._voice.say(item.text, at=item.at)
            else:
                self._advance(pod, None, {}, time.monotonic())
            await asyncio.sleep(STEADY_LOOK_SECONDS if self._ready else STARTING_LOOK_SECONDS)

    def _advance(self, pod: StartedPod, file: PodRecord | None, answers: dict[str, EngineAnswer], now: float) -> None:
        if self._ready:
            return
        socket_is_there = False
        if file is not None and file.gms is not None:
            socket_is_there = (self._options.run_dir / pod.plan.name / file.gms.socket).exists()
        stages = [
            (name, is_done(stage, socket_is_there=socket_is_there, answers=answers))
            for name, stage in self._steps_of(pod).items()
        ]
        self._board.advance(stages, now=now)
        reports = [answer for answer in answers.values() if isinstance(answer, EngineState)]
        self._board.note(stages[-1][0], ", ".join(f"{report.engine} {report.role}" for report in reports))

    def _steps_of(self, pod: StartedPod) -> dict[str, Stage]:
        """Name on the board → stage, in order."""
        return {f"{pod.plan.name}: {stage}": stage for stage in stages_of(gms=self._options.gms)}

    async def _await_end(self, child: Child) -> None:
        self._ended_by_itself(child, await child.ended())

    def _ended_by_itself(self, child: Child, code: int) -> None:
        """While starting any end is the end of all; later, a pod may go while others are left."""
        others = any(pod.child.running for pod in self._starter.pods)
        if self._ready and others and child is not self._starter.gateway:
            self._voice.say(f"{self._why(child, code)}; the other pods go on", style="red")
        elif not self._end.done():
            self._end.set_result(Ending(child, code))

    def _why(self, child: Child, code: int) -> str:
        how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        self._voice.read_logs([child])
        if code == -signal.SIGKILL:  # what it said last has nothing to do with that
            return f"{child.name} ended by itself ({how}): somebody killed it, or the kernel did, for want of memory"
        return f"{child.name} ended by itself ({how}): {self._voice.last_words(child)}"

    async def _read_logs(self) -> None:
        while True:
            self._voice.read_logs(self._starter.children)
            await asyncio.sleep(STARTING_LOOK_SECONDS)

    async def _look_after_folder(self) -> None:
        """Somebody may remove the run folder: what is in it is written again by whoever has written it."""
        complaint = ""
        while self._claim is not None:
            await asyncio.sleep(FOLDER_LOOK_SECONDS)
            try:
                removed = self._claim.restore()
                for child in self._starter.children:
                    child.restore_log()
            except (CliError, OSError) as error:
                if str(error) != complaint:
                    self._voice.say(complaint := str(error), style="red")
                continue
            complaint = ""
            if removed:
                self._voice.say(
                    f"somebody removed {self._options.run_dir} or something in it while it is in use: the lock and "
                    "the logs are there again; nothing but hotspare may touch the run folder",
                    style="red",
                )

    # --- stopping

    async def _stop(self, ending: Ending) -> int:
        began = time.monotonic()
        if ending.child is None and ending.error is None:
            self._voice.say(
                f"stopping: the gateway drains for at most {self._limits.drain:g} s, then the pods end; "
                "another signal ends everything at once"
            )
        orderly = asyncio.ensure_future(self._stop_in_order())
        naming = asyncio.ensure_future(self._name_who_is_waited_for())
        forced = asyncio.ensure_future(self._forced.wait())
        try:
            await asyncio.wait({orderly, forced}, return_when=asyncio.FIRST_COMPLETED)
            clean = orderly.done() and orderly.result()
        finally:
            orderly.cancel()
            forced.cancel()
            naming.cancel()
        if not clean:
            self._starter.kill_all()
        seconds = time.monotonic() - began
        if ending.error is not None:
            return ending.error.code
        if ending.child is not None:
            return ending.code if ending.code > 0 else ExitCode.ENGINE_DEAD
        if not clean:
            self._voice.say(f"stopped by force after {seconds:.1f} s", style="red")
            return ExitCode.FORCED
        self._voice.read_logs(self._starter.children)
        cut = cut_off_words(self._voice.cut_off, in_time=self._drained_seconds < self._limits.drain)
        self._voice.say(f"stopped after {seconds:.1f} s{cut}", style="yellow" if self._voice.cut_off else "")
        return ExitCode.DRAINED

    async def _stop_in_order(self) -> bool:
        """The gateway first, since it needs the pods to drain. Whether everything ended as asked and in time."""
        if (model := self._starter.model) is not None:
            await self._stop_one(model, CONVERSION_STOP_SECONDS)
        clean = True
        if (gateway := self._starter.gateway) is not None:
            began = time.monotonic()
            clean = await self._stop_one(gateway, self._limits.gateway)
            self._drained_seconds = time.monotonic() - began
        stopping = (self._stop_one(pod.child, self._limits.pod) for pod in self._starter.pods)
        return all([clean, *await asyncio.gather(*stopping)])

    async def _stop_one(self, child: Child, limit_seconds: float) -> bool:
        if not child.running:
            return True
        child.terminate()
        try:
            async with asyncio.timeout(limit_seconds), asyncio.TaskGroup() as group:
                looking = group.create_task(self._kill_if_stopped(child))
                code = await child.ended()
                looking.cancel()
        except TimeoutError:
            self._voice.say(f"{child.name} did not end within {limit_seconds:g} s and is killed", style="red")
            child.signal(signal.SIGKILL)
            await child.ended()
            return False
        if code == -signal.SIGTERM and not self._ready:
            return True  # asked before it had got as far as listening to signals
        if code:
            self._voice.say(f"{child.name} ended with exit code {code}", style="red")
        return code == 0

    async def _kill_if_stopped(self, child: Child) -> None:
        """One that does not run (SIGSTOP) never ends, and nothing that it was asked for goes on in it."""
        looks = 0
        while looks < STOPPED_LOOKS:
            await asyncio.sleep(STOPPED_LOOK_SECONDS)
            looks = looks + 1 if child.stopped else 0
        self._voice.say(f"{child.name} (process {child.pid}) is stopped (SIGSTOP), and is killed", style="red")
        child.signal(signal.SIGKILL)

    async def _name_who_is_waited_for(self) -> None:
        """A stop that takes a while says what it waits for, and again when that has changed."""
        began, told = time.monotonic(), ""
        await asyncio.sleep(NAMING_SECONDS)
        while True:
            waiting = self._still_running()
            if waiting and waiting != told:
                told = waiting
                self._voice.say(
                    f"waiting for {waiting} for {time.monotonic() - began:.0f} s; "
                    "another signal ends everything at once"
                )
            await asyncio.sleep(STOPPED_LOOK_SECONDS)

    def _still_running(self) -> str:
        """The children that are asked to end now: the gateway, or after it the pods and what they say of theirs."""
        for child in (self._starter.model, self._starter.gateway):
            if child is not None and child.running:
                return f"{child.name} (process {child.pid})"
        return ", ".join(self._left_in(pod) for pod in self._starter.pods if pod.child.running)

    def _left_in(self, pod: StartedPod) -> str:
        own = f"{pod.plan.name} (process {pod.child.pid})"
        try:
            record = read_pod(self._options.run_dir / pod.plan.name)
        except CliError:
            return own
        if record is None:
            return own
        left = [f"engine {name} (process {engine.pid})" for name, engine in record.engines.items() if engine.pid]
        if not left and record.gms is not None and record.gms.pid:
            left = [f"its memory service (process {record.gms.pid})"]
        return f"{pod.plan.name}'s {', '.join(left)}" if left else own

    @contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, self._signalled)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _signalled(self) -> None:
        if self._end.done():
            self._forced.set()
        else:
            self._end.set_result(Ending())


def spares_line(*, parked: int, wanted: int, bare: bool) -> str:
    """What the ready message says about redundancy; ``bare``: some pod has no spare yet. Pure."""
    if parked >= wanted:
        return "redundancy stands: " + ("the spare is parked" if wanted == 1 else f"all {wanted} spares are parked")
    missing = "the spare is" if wanted == 1 else f"{wanted - parked} of {wanted} spares are"
    said = f"{missing} still being parked, a line will tell"
    return f"{said}; until a pod has one, a failover there waits for an engine to start" if bare else said


def cut_off_words(count: int, *, in_time: bool) -> str:
    """What the last line says about requests. A gateway that cut some off ends well and says so in its log, unless it
    is to log errors only: so nothing is claimed if it was not done before its drain time was over. Pure."""
    if count:
        return f", {count} {'request was' if count == 1 else 'requests were'} cut off"
    return ", nothing was cut off" if in_time else ""


def _first(group: BaseExceptionGroup[CliError]) -> CliError:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
