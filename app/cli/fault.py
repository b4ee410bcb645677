"""``hotspare fault``: break one process on purpose, and be sure that it is the one that was meant.

A pid read from somewhere may be somebody else's a moment later. So: open a pidfd, *then* have the process behind it
prove who it is, then signal through the pidfd, which cannot hit anybody else.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from app.cli.errors import CliError
from app.cli.observe import ask_engine, ask_pod
from app.cli.reports import EngineAnswer
from app.cli.run_dir import find_pod
from workers.contract import Role
from workers.exit_codes import ExitCode
from workers.pod_files import PodRecord
from workers.state import EngineState

_PEER_SECONDS: Final = 1.0


class Fault(StrEnum):
    """What can be done to a pod."""

    KILL_ACTIVE = "kill-active"
    KILL_SHADOW = "kill-shadow"
    KILL_GMS = "kill-gms"
    STOP_ACTIVE = "stop-active"
    STOP_SHADOW = "stop-shadow"
    STOP_GMS = "stop-gms"


_TARGETS: Final = {
    Fault.KILL_ACTIVE: Role.ACTIVE,
    Fault.KILL_SHADOW: Role.STANDBY,
    Fault.STOP_ACTIVE: Role.ACTIVE,
    Fault.STOP_SHADOW: Role.STANDBY,
}
_OF_SERVICE: Final = frozenset({Fault.KILL_GMS, Fault.STOP_GMS})
_STOPS: Final = frozenset({Fault.STOP_ACTIVE, Fault.STOP_SHADOW, Fault.STOP_GMS})


def inject(fault: Fault, pod_name: str, run_dir: Path, *, device: str | None = None) -> str:
    """Do it; returns what was done. ``device``: whose memory service, where a pod has several; None: the first's.

    Raises:
        CliError: there is no such pod, or nobody in it has that role; nothing was done.
    """
    pod = find_pod(pod_name, run_dir)
    if fault in _OF_SERVICE:
        return _signal_gms(fault, _with_service_of(device, pod), run_dir)
    if device is not None:
        raise CliError(
            f"--device is for kill-gms and stop-gms; {fault} means an engine by its role",
            code=ExitCode.BAD_CONFIGURATION,
        )
    return asyncio.run(_signal_engine(fault, pod))


def engine_with(role: Role, answers: Mapping[str, EngineAnswer]) -> EngineState | None:
    """The engine that is ``role``, the newest epoch first. Pure."""
    reports = [answer for answer in answers.values() if isinstance(answer, EngineState) and answer.role is role]
    return max(reports, key=lambda report: report.epoch, default=None)


async def _signal_engine(fault: Fault, pod: PodRecord) -> str:
    role = _TARGETS[fault]
    answers = await ask_pod(pod)
    report = engine_with(role, answers)
    if report is None:
        seen = ", ".join(
            f"{name} is {answer.role if isinstance(answer, EngineState) else answer}"
            for name, answer in answers.items()
        )
        raise _cannot(f"no engine of {pod.pod} is {role} now ({seen}); nothing was done")
    if pod.engines[report.engine].apart:
        raise _cannot(
            f"engine {report.engine} of {pod.pod} ({role}) is in a container of its own, whose processes cannot be "
            "reached from here; nothing was done. Run the command in that container"
        )
    with _pidfd(report.pid) as pidfd:
        again = await ask_engine(pod, report.engine)
        if not isinstance(again, EngineState) or (again.pid, again.role) != (report.pid, role):
            raise _cannot(
                f"engine {report.engine} of {pod.pod} changed while it was looked at; nothing was done, try again"
            )
        return _send(fault, pidfd, f"engine {report.engine} ({role}, epoch {report.epoch}) of {pod.pod}", report.pid)


def _signal_gms(fault: Fault, pod: PodRecord, run_dir: Path) -> str:
    if pod.gms is None:
        raise _cannot(f"{pod.pod} runs without a memory service; nothing was done")
    # Who listens is the one, whatever pod.json says: with a full disk it may tell of what was before.
    path = run_dir / pod.pod / pod.gms.socket
    pid = _listener(path)
    if pid is None:
        raise _cannot(f"the memory service of {pod.pod} does not run now; nothing was done, try again")
    if not pid:
        raise _cannot(
            f"the memory service of {pod.pod} is in a container of its own, whose processes cannot be reached from "
            "here; nothing was done"
        )
    with _pidfd(pid) as pidfd:
        if _listener(path) != pid:
            raise _cannot(
                f"the memory service of {pod.pod} was followed by another just now; nothing was done, try again"
            )
        return _send(fault, pidfd, f"the memory service of {pod.pod}", pid)


def _with_service_of(device: str | None, pod: PodRecord) -> PodRecord:
    """The pod as if that device's memory service were its only one."""
    if device is None or pod.gms is None:
        return pod
    records = [pod.gms, *(pod.more_gms or {}).values()]
    name = f"gms-{device.replace(':', '-')}.sock"
    found = [record for record in records if Path(record.socket).name == name]
    if not found:
        known = ", ".join(Path(record.socket).stem.removeprefix("gms-").replace("-", ":") for record in records)
        raise _cannot(f"{pod.pod} has no memory service for {device} (it has them for {known}); nothing was done")
    return msgspec.structs.replace(pod, gms=found[0])


def _listener(path: Path) -> int | None:
    """The pid of who listens on a Unix socket, told by the kernel (unix(7), SO_PEERCRED)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_PEER_SECONDS)
        try:
            connection.connect(str(path))
        except OSError:
            return None
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid: int = struct.unpack("3i", raw)[0]
        return pid


@contextmanager
def _pidfd(pid: int) -> Iterator[int]:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        raise _cannot(f"process {pid} is gone already; nothing was done, try again") from None
    try:
        yield pidfd
    finally:
        os.close(pidfd)


def _send(fault: Fault, pidfd: int, target: str, pid: int) -> str:
    number = signal.SIGSTOP if fault in _STOPS else signal.SIGKILL
    if pid == 1:  # of this container, which is always meant to be here
        raise _cannot(f"{target} is process 1 here, and the kernel lets nobody in its own container end or stop that")
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        raise _cannot(f"{target}, process {pid}, ended by itself just now") from None
    except PermissionError:
        raise _cannot(f"{target}, process {pid}, belongs to another user; nothing was done") from None
    return f"sent {number.name} to {target}, process {pid}"


def _cannot(sentence: str) -> CliError:
    return CliError(sentence, code=ExitCode.ENGINE_DEAD)
