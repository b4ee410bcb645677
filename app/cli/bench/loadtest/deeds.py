"""What a scenario's events do to the pods of a fleet that was started for it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any, Final

from app.cli.bench.loadtest.scenario import Event
from app.cli.bench.pods import active_of
from app.cli.bench.system import ended
from app.cli.errors import CliError
from app.cli.fault import Fault, inject
from app.cli.handover import hand_over
from app.cli.plan import pod_name
from app.cli.roll import roll
from app.cli.run_dir import find_pod, is_running, read_pod
from workers.handover import Asked

POD_MODULE: Final = "workers"
RETRY_SECONDS: Final = 0.05
PATIENCE_SECONDS: Final = 60.0
"""So long an event waits for somebody with the role that it is meant for."""
END_SECONDS: Final = 120.0
START_SECONDS: Final = 300.0
KILL_SECONDS: Final = 15.0

ASKED: Final = Asked()
"""As `hotspare handover` does without options."""

Say = Callable[[str], None]


class Deeds:
    """Does the events of a run, each at its time; none waits for another. Leaving it ends what it has started."""

    def __init__(self, run_dir: Path, events: Sequence[Event], say: Say) -> None:
        self._run_dir = run_dir
        self._events = events
        self._say = say
        self._stack = AsyncExitStack()
        self._commands: dict[str, tuple[list[bytes], dict[bytes, bytes]]] = {}
        """Of pods that have ended: how they were started."""
        self.done: list[dict[str, Any]] = []

    async def __aenter__(self) -> Deeds:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def run(self, began: float) -> None:
        """All of them. ``began``: when the first phase did, by ``time.monotonic()``."""
        async with asyncio.TaskGroup() as group:
            for event in self._events:
                group.create_task(self._at_its_time(event, began))

    async def _at_its_time(self, event: Event, began: float) -> None:
        await asyncio.sleep(max(0.0, began + event.at - time.monotonic()))
        pod, since = pod_name(event.pod), time.monotonic()
        problem, told = "", ""
        try:
            told = await self._do(event.do, pod)
            self._say(told)
        except CliError as error:
            problem = str(error)
            self._say(f"{event.do} of {pod}: {problem}")
        self.done.append(
            {
                "at": event.at,
                "do": event.do,
                "pod": event.pod,
                "began_at": round(since - began, 3),
                "took_seconds": round(time.monotonic() - since, 3),
                "told": told,
                "problem": problem,
            }
        )
        self.done.sort(key=lambda one: one["began_at"])

    async def _do(self, what: str, pod: str) -> str:
        if what in {fault.value for fault in Fault}:
            return await self._once_it_can(lambda: inject(Fault(what), pod, self._run_dir))
        if what == "handover":
            return await self._once_it_can(lambda: hand_over(pod, self._run_dir, ASKED, progress=self._say))
        if what == "roll":
            return await self._once_it_can(lambda: self._roll(pod))
        if what == "start-pod":
            return await self._start(pod)
        if what == "lose-pod":
            return await self._lose(pod)
        told = await self._stop(pod)
        return told if what == "stop-pod" else f"{told}; {await self._start(pod)}"

    async def _once_it_can(self, deed: Callable[[], str]) -> str:
        """A pod that is just now between two engines has them again in a moment."""
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return await asyncio.to_thread(deed)
            except CliError:
                if time.monotonic() > until:
                    raise
            await asyncio.sleep(RETRY_SECONDS)

    def _roll(self, pod: str) -> str:
        roll(pod, self._run_dir, ASKED, say=self._say, progress=self._say)
        return f"{pod}: every engine and keeper is another one"

    def _running(self, pod: str) -> int:
        """The pid of the pod's supervisor."""
        pid = find_pod(pod, self._run_dir).pid
        if pid is None or not is_running(pid, module=POD_MODULE):
            raise CliError(f"{pod} does not run", code=1)
        self._commands[pod] = _started_by(pid)
        return pid

    async def _stop(self, pod: str) -> str:
        """As the kubelet does, and ``hotspare up`` at its end."""
        pid = self._running(pod)
        with ExitStack() as stack:
            pidfd = os.pidfd_open(pid)
            stack.callback(os.close, pidfd)
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
            if not await _gone(pidfd, END_SECONDS):
                raise CliError(f"{pod} did not end within {END_SECONDS:g} s", code=1)
        return f"{pod} was told to stop, and ended"

    async def _lose(self, pod: str) -> str:
        """All of its processes at one stroke, as when a node is gone; but here connections are reset at once."""
        supervisor = self._running(pod)
        with ExitStack() as stack:
            pidfds = []
            for pid in [supervisor, *_descendants(supervisor)]:
                try:
                    pidfds.append(os.pidfd_open(pid))
                except ProcessLookupError:
                    continue
                stack.callback(os.close, pidfds[-1])
            for pidfd in pidfds:
                try:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            for pidfd in pidfds:
                if not await _gone(pidfd, KILL_SECONDS):
                    raise CliError(f"a process of {pod} did not end within {KILL_SECONDS:g} s of its SIGKILL", code=1)
        return f"{pod} is lost: SIGKILL to all of its {len(pidfds)} processes"

    async def _start(self, pod: str) -> str:
        """As it was started before, on the same ports, and wait until it has an active engine and a spare."""
        if pod not in self._commands:
            raise CliError(f"{pod} was not stopped, so it is not started", code=1)
        began = time.monotonic()
        command, environment = self._commands.pop(pod)
        environment[b"HOTSPARE_PARENT_PID"] = str(os.getpid()).encode()
        with (self._run_dir / f"{pod}-again.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        await self._stack.enter_async_context(ended(process, stop_seconds=END_SECONDS))
        while not await _complete(self._run_dir / pod, process.pid):
            if process.returncode is not None:
                raise CliError(f"{pod} ended with {process.returncode} instead of starting again", code=1)
            if time.monotonic() - began > START_SECONDS:
                raise CliError(f"{pod} has no active engine and spare {START_SECONDS:g} s after its start", code=1)
            await asyncio.sleep(RETRY_SECONDS)
        return f"{pod} is there again after {time.monotonic() - began:.1f} s"


async def _complete(folder: Path, pid: int) -> bool:
    record = read_pod(folder)
    return record is not None and record.pid == pid and await active_of(record) is not None


async def _gone(pidfd: int, seconds: float) -> bool:
    """Whether the process ends in time."""
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(pidfd, over.set)
    try:
        async with asyncio.timeout(seconds):
            await over.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(pidfd)
    return True


def _started_by(pid: int) -> tuple[list[bytes], dict[bytes, bytes]]:
    """Command line and environment of a process, as the kernel has them (proc(5))."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
        pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError as error:
        raise CliError(f"process {pid} cannot be looked at: {error.strerror}", code=1) from error
    return command, {name: value for name, is_there, value in (pair.partition(b"=") for pair in pairs) if is_there}


def _descendants(pid: int) -> Iterator[int]:
    """Its children, theirs, and so on, as of now."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path(f"/proc/{entry}/stat").read_text()
            except OSError:
                continue
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry))
    found = [pid]
    while found:
        for child in children.get(found.pop(), []):
            found.append(child)
            yield child
