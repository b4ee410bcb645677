"""PodSupervisor: what the kubelet does for a pod, on this machine and for one pod.

One queue of events (signals, ends of processes, hung engines, timers), one loop that takes them in order: the plan
(``workers.pod_plan``) decides, this module acts. Callbacks do nothing but put an event on the queue. Processes start at
the same time and wait for nobody; engines try the memory service's socket until it is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Final

import msgspec

from gms.client import GmsClient, GmsError
from gms.protocol import ErrorCode
from workers.children import Child, LogSink, label_line
from workers.contract import Role
from workers.exit_codes import ExitCode
from workers.first_process import bury_strays
from workers.hosts import reachable
from workers.http_get import GetFailed, http_get
from workers.keeper_state import why_not_forking
from workers.pod_commands import (
    ENGINE_PREFIX,
    SERVICE,
    admin_ports,
    command_lines,
    environment,
    metrics_ports,
    services,
)
from workers.pod_files import EngineRecord, MemoryServiceRecord, PodFolder, PodFolderError, PodRecord
from workers.pod_plan import Action, Deadline, Kill, Phase, PodPlan, Start, Terminate
from workers.probes import Liveness, LivenessVerdict, Sighting
from workers.process_state import is_stopped, parent_of
from workers.settings import PodSettings
from workers.tasks import told_of_failure
from workers.threads import in_daemon_thread

logger = logging.getLogger(__name__)

SERVICE_GRACE_SECONDS: Final = 2.0
"""SIGTERM to SIGKILL for the memory service; the engines are gone by then."""
REAP_SECONDS: Final = 5.0
RECORD_AGAIN_SECONDS: Final = 1.0
"""Between two tries to write pod.json: on a disk that was full there may be room again."""
FOLDER_LOOK_SECONDS: Final = 1.0
"""Between two looks at whether the pod's folder is as it was."""
_ALIVE: Final = frozenset({ErrorCode.TOO_MANY, ErrorCode.BUSY})
"""Answers of a memory service that has more to do than it can: killing it would help nobody."""
STOPPED_LOOKS: Final = 3
"""So many looks in a row at a process that is stopped while its pod ends, ``STOPPED_LOOK_SECONDS`` apart, and it is
killed."""
STOPPED_LOOK_SECONDS: Final = 1.0
SERVICE_PROBE_SECONDS: Final = 1.0
SERVICE_PROBE_FAILURES: Final = 3
SERVICE_START_SECONDS: Final = 10.0
"""The memory service answers within milliseconds and starts in half a second; while it hangs no engine can follow
another, and requests do not wait for ever. What an engine needs to load a model is no measure for it."""
STDOUT: Final = 1
FAILED_TO_START: Final = 127
"""The code a shell gives for a command it could not run."""


class _Signalled(msgspec.Struct, frozen=True):
    number: int


class _Ended(msgspec.Struct, frozen=True):
    name: str
    pid: int
    """0: it could not be started."""


class _Hung(msgspec.Struct, frozen=True):
    name: str
    pid: int
    why: str


class _Failed(msgspec.Struct, frozen=True):
    """Something of this supervisor's own ended on an error that nothing expected."""

    what: str
    pid: int
    """Of the process that it was about; 0: of none."""
    error: Exception


class _Ready(msgspec.Struct, frozen=True):
    name: str


class _StartDue(msgspec.Struct, frozen=True):
    name: str


class _DeadlinePassed(msgspec.Struct, frozen=True):
    phase: Phase


class _Live(msgspec.Struct, frozen=True):
    """The part of ``/live``'s body that matters here."""

    pid: int = 0
    role: str = ""


class _RecordDue(msgspec.Struct, frozen=True):
    """pod.json could not be written and is tried again, or is not there any more."""


_Event = _Signalled | _Ended | _Hung | _Failed | _Ready | _StartDue | _DeadlinePassed | _RecordDue


async def run_pod(settings: PodSettings) -> int:
    """Run one pod until told to stop; returns the exit code, whose reason has been logged.

    0: stopped in order; 2: the folder cannot be used or nothing can start; 70: a second signal, or something had to be
    killed. Call it from the main thread: children die with the thread that started them.
    """
    return await PodSupervisor(settings).run()


class PodSupervisor:
    """Runs one pod, once. ``commands`` (process name → argv) replaces what is started, for tests."""

    def __init__(self, settings: PodSettings, *, commands: Mapping[str, Sequence[str]] | None = None) -> None:
        self._settings = settings
        self._admin_ports = admin_ports(settings)
        self._services = services(settings)
        self._metrics_ports = metrics_ports(settings)
        self._commands = commands if commands is not None else command_lines(settings)
        self._plan = PodPlan(
            service=SERVICE if settings.gms else None,
            engines=tuple(self._admin_ports),
            grace_seconds=settings.engine_stop_seconds,
            service_grace_seconds=SERVICE_GRACE_SECONDS,
            kept=settings.keeper,
            more_services=[name for name in self._services if name != SERVICE],
        )
        self._folder = PodFolder(settings.pod_dir)
        self._events: asyncio.Queue[_Event] = asyncio.Queue()
        self._children: dict[str, Child] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._told = asyncio.Event()
        """To stop."""
        self._looking: asyncio.Task[None] | None = None
        """After the pod's folder."""
        self._sink: LogSink | None = None
        self._record_is_old = False
        """pod.json could not be written, and says what was before."""
        self._record_due = False

    async def run(self) -> int:
        """See ``run_pod``."""
        try:
            self._folder.open()
        except PodFolderError as error:
            logger.error("%s", error)
            return ExitCode.BAD_CONFIGURATION
        loop = asyncio.get_running_loop()
        sink = self._sink = LogSink(STDOUT)
        try:
            with sink.takes_logging():
                for number in (signal.SIGTERM, signal.SIGINT):
                    loop.add_signal_handler(number, self._events.put_nowait, _Signalled(number))
                loop.add_signal_handler(signal.SIGCHLD, self._bury_strays)
                try:
                    await self._supervise()
                finally:
                    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
                        loop.remove_signal_handler(number)
                    self._kill_what_is_left()
                    await self._end_tasks()
                self._folder.clean()
                code = self._plan.exit_code
                logger.info("pod %s exits with %d (%s)", self._settings.pod, code, code.name)
                return code
        finally:
            self._folder.close()
            sink.close()

    # --- events in, actions out

    async def _supervise(self) -> None:
        self._perform(self._plan.begin())
        self._begin_looking()
        while not self._plan.finished:
            event = await self._events.get()
            actions = self._handle(event)
            if self._plan.phase is not Phase.RUNNING:
                self._begin_to_stop()
            self._perform(actions)
            self._bury_strays()

    def _begin_to_stop(self) -> None:
        """What somebody has stopped (SIGSTOP) is to hear that it shall end, and the engines need the memory service."""
        if self._told.is_set():
            return
        self._told.set()
        for child in self._children.values():
            child.resume()

    def _bury_strays(self) -> None:
        bury_strays([child.pid for child in self._children.values()])

    def _handle(self, event: _Event) -> list[Action]:
        match event:
            case _Signalled(number):
                logger.info("%s: the pod stops%s", signal.Signals(number).name, self._how_it_stops())
                return self._plan.stop()
            case _Ended(name, pid):
                return self._handle_end(name, pid)
            case _Hung(name, pid, why):
                child = self._children.get(name)
                if child is None or child.pid != pid:
                    return []
                actions = self._plan.hung(name)
                if actions:
                    logger.error("%s is not alive: %s", name, why)
                return actions
            case _Failed(what, pid, error):
                self._begin_anew(what, pid, error)
                return []
            case _Ready(name):
                self._plan.ready(name)
                return []
            case _StartDue(name):
                return [Start(name)] if self._plan.start_due(name) else []
            case _DeadlinePassed(phase):
                return self._plan.deadline_passed(phase)
            case _RecordDue():
                self._record_due = False
                return []  # after each event it is written

    def _begin_anew(self, what: str, pid: int, error: Exception) -> None:
        """A process that nobody asks whether it is alive would hang unseen; the mistake is this supervisor's, and no
        reason to end a pod that serves."""
        logger.error("%s ended on an error that nothing expected, and begins anew", what, exc_info=error)
        if not pid:
            self._begin_looking()
            return
        for name, child in self._children.items():
            if child.pid == pid:
                self._begin_probing(name, pid)

    def _handle_end(self, name: str, pid: int) -> list[Action]:
        code, complaint = FAILED_TO_START, ""
        if pid:
            child = self._children.pop(name)
            code, complaint = child.reap(), child.complaint
            if probe := self._probes.pop(name, None):
                probe.cancel()
        was_running = self._plan.phase is Phase.RUNNING
        actions = self._plan.exited(name, code, now=time.monotonic())
        if was_running and self._plan.phase is not Phase.RUNNING:
            logger.error(
                "the pod cannot start with this configuration; %s says: %s", name, complaint or "nothing (see above)"
            )
        elif was_running and code == ExitCode.DRAINED:
            logger.info("%s was told to stop, and is started again%s", name, _when(actions))
        elif was_running:
            logger.warning("%s is gone (%s) and is started again%s", name, _describe(code), _when(actions))
        else:
            logger.info("%s has ended (%s)", name, _describe(code))
        return actions

    def _perform(self, actions: Sequence[Action]) -> None:
        loop = asyncio.get_running_loop()
        self._keep_folder()
        for action in actions:
            match action:
                case Start(name, delay) if delay:
                    loop.call_later(delay, self._events.put_nowait, _StartDue(name))
                case Start(name):
                    self._start(name)
                case Terminate(name):
                    if child := self._children.get(name):
                        child.terminate()
                case Kill(name):
                    if child := self._children.get(name):
                        logger.warning("%s (process %d) is killed", name, child.pid)
                        child.kill()
                case Deadline(phase, seconds):
                    loop.call_later(seconds, self._events.put_nowait, _DeadlinePassed(phase))
        self._write_record()

    # --- processes

    def _start(self, name: str) -> None:
        now = time.monotonic()
        self._plan.started(name, now=now)
        label = f"{self._settings.pod}/{name}"

        def say(line: bytes) -> None:
            if self._sink is not None:
                form = self._settings.log_format
                self._sink.put(label_line(label, line, form=form, pid=child.pid, now=time.time()))

        def ended() -> None:
            self._events.put_nowait(_Ended(name, child.pid))

        try:
            env = environment(self._settings, name, inherited=os.environ)
            child = Child(self._commands[name], env=env, on_line=say, on_exit=ended)
        except OSError as error:
            logger.error("%s cannot be started: %s", name, error)
            self._events.put_nowait(_Ended(name, 0))
            return
        self._children[name] = child
        logger.debug("%s is process %d", name, child.pid)
        self._begin_probing(name, child.pid)

    def _begin_probing(self, name: str, pid: int) -> None:
        self._probes[name] = self._observed(self._probe(name, pid, time.monotonic()), f"the probe of {name}", pid)

    def _begin_looking(self) -> None:
        self._looking = self._observed(self._look_after_folder(), "the look after the pod's folder", 0)

    def _observed(self, work: Coroutine[Any, Any, None], what: str, pid: int) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=what)
        told_of_failure(task, lambda error: self._events.put_nowait(_Failed(what, pid, error)))
        return task

    async def _probe(self, name: str, pid: int, started: float) -> None:
        """Ask one life of a process whether it is alive, until it is not.

        While the pod stops, one that is stopped itself (SIGSTOP) has a few looks, for no drain goes on in it; one that
        runs and is silent may be giving back what it holds, for which engines have ``engine_shutdown_seconds``.
        """
        settings = self._settings
        host = reachable(settings.host)
        startup, period, failures = (
            (SERVICE_START_SECONDS, SERVICE_PROBE_SECONDS, SERVICE_PROBE_FAILURES)
            if name in self._services
            else (settings.startup_timeout_seconds, settings.liveness_period_seconds, settings.liveness_failures)
        )
        liveness = Liveness(started=started, startup_seconds=startup, failures=failures)
        told_ready, stopped, silent_since = False, 0, 0.0
        while True:
            await self._until_next_look(period)
            stopping = self._told.is_set()
            stopped = stopped + 1 if is_stopped(pid) else 0
            if stopping and stopped:
                if stopped >= STOPPED_LOOKS:
                    self._events.put_nowait(_Hung(name, pid, "it is stopped (SIGSTOP), and is to end"))
                    return
                continue
            if device := self._services.get(name):
                why, seen = await self._ask_service(device)
            else:
                why, seen = await self._ask_if_alive(host, self._admin_ports[name])
                if seen.refused and (obstacle := why_not_forking(pid)) is not None:
                    why, seen = obstacle, msgspec.structs.replace(seen, stuck=True)
                if seen.ok and not seen.initialising and not told_ready and pid in (seen.pid, parent_of(seen.pid)):
                    told_ready = True
                    self._events.put_nowait(_Ready(name))
            now = time.monotonic()
            verdict = liveness.observe(msgspec.structs.replace(seen, stopped=stopped > 0), now=now)
            if verdict is LivenessVerdict.KEEP:
                silent_since = 0.0
            elif stopping and now - (silent_since := silent_since or now) < settings.engine_shutdown_seconds:
                continue
            else:
                if verdict is LivenessVerdict.KILL_NEVER_STARTED:
                    why = f"it was not alive within {liveness.allowed_seconds:g} s ({why})"
                self._events.put_nowait(_Hung(name, pid, why))
                return

    async def _until_next_look(self, period: float) -> None:
        """A stop is a reason to look at once, and then more often."""
        if self._told.is_set():
            await asyncio.sleep(min(period, STOPPED_LOOK_SECONDS))
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(period):
                await self._told.wait()

    async def _ask_if_alive(self, host: str, port: int) -> tuple[str, Sighting]:
        """``/live`` of one engine, and what is wrong with the answer."""
        try:
            status, body = await http_get(host, port, "/live", timeout_seconds=self._settings.liveness_timeout_seconds)
        except GetFailed as error:
            refused = self._settings.keeper and isinstance(error.__cause__, ConnectionRefusedError)
            return str(error), Sighting(ok=False, refused=refused)
        try:
            live = msgspec.json.decode(body, type=_Live)
        except msgspec.DecodeError:
            live = _Live()  # the status is what counts
        why = "" if status == 200 else f"its admin port answers /live with {status}"
        return why, Sighting(ok=not why, pid=live.pid, initialising=live.role == Role.INIT)

    async def _ask_service(self, device: str) -> tuple[str, Sighting]:
        """Whether a device's memory service does what engines need of it: answer on its socket."""
        settings = self._settings

        def ask() -> None:
            timeout = SERVICE_PROBE_SECONDS
            with GmsClient.connect(
                settings.gms_socket_of(device),
                engine="none",
                instance=settings.instance,
                device=device,
                client="probe",
                timeout_seconds=timeout,
            ) as client:
                client.status(timeout_seconds=timeout)

        try:
            await in_daemon_thread(ask, name="probe-gms")
        except GmsError as error:
            return str(error), Sighting(ok=error.code in _ALIVE)
        return "", Sighting(ok=True)

    def _kill_what_is_left(self) -> None:
        """Nothing, unless this supervisor is cancelled or fails."""
        for child in self._children.values():
            child.kill()
        for name, child in self._children.items():
            try:
                child.reap(timeout_seconds=REAP_SECONDS)
            except subprocess.TimeoutExpired:
                logger.error("%s (process %d) does not end even on SIGKILL", name, child.pid)
        self._children.clear()

    async def _end_tasks(self) -> None:
        tasks = [*self._probes.values(), *(() if self._looking is None else (self._looking,))]
        self._probes.clear()
        self._looking = None
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # --- what others see

    def _keep_folder(self) -> None:
        """What is started now, and whoever asks about the pod, needs its folder."""
        if self._plan.finished:
            return
        try:
            if self._folder.restore():
                logger.error(
                    "somebody removed the pod's folder %s or its lock while the pod runs: it is there again; nothing "
                    "but hotspare may touch the run folder",
                    self._settings.pod_dir,
                )
        except PodFolderError as error:
            logger.error("%s", error)

    async def _look_after_folder(self) -> None:
        """Somebody may remove it while nothing else happens."""
        while True:
            await asyncio.sleep(FOLDER_LOOK_SECONDS)
            if not self._folder.intact:
                self._events.put_nowait(_RecordDue())

    def _write_record(self) -> None:
        settings = self._settings
        pids = {name: child.pid for name, child in self._children.items()}
        records = {
            name: MemoryServiceRecord(
                pid=pids.get(name),
                socket=str(settings.gms_socket_of(device)),
                metrics_port=self._metrics_ports[name],
            )
            for name, device in self._services.items()
        }
        engines = {
            name.removeprefix(ENGINE_PREFIX): EngineRecord(
                pid=pids.get(name), admin_port=port, restarts=self._plan.restarts(name)
            )
            for name, port in self._admin_ports.items()
        }
        record = PodRecord(
            pod=settings.pod,
            instance=settings.instance,
            pid=os.getpid(),
            host=settings.host,
            serving_port=settings.serving_port,
            gms=records.pop(SERVICE, None),
            engines=engines,
            more_gms=records or msgspec.UNSET,
        )
        try:
            self._folder.write(record)
        except OSError as error:
            if not self._record_is_old:
                logger.error("pod.json cannot be written, and stays as it was until it can: %s", error)
            self._record_is_old = True
            if not self._record_due:
                self._record_due = True
                asyncio.get_running_loop().call_later(RECORD_AGAIN_SECONDS, self._events.put_nowait, _RecordDue())
            return
        if self._record_is_old:
            self._record_is_old = False
            logger.warning("pod.json is written again")

    def _how_it_stops(self) -> str:
        match self._plan.phase:
            case Phase.RUNNING:
                return f", its engines have {self._settings.engine_stop_seconds:g} s"
            case Phase.STOPPING_ENGINES | Phase.STOPPING_SERVICE:
                return " at once"
            case _:
                return " already"


def _when(actions: Sequence[Action]) -> str:
    delay = next((action.delay_seconds for action in actions if isinstance(action, Start)), 0.0)
    return f" in {delay:g} s" if delay else " at once"


def _describe(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
