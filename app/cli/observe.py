"""What the processes of a run folder say about themselves right now: asked side by side, each with a deadline.

Nothing here raises because somebody is dead or silent: that is an answer too.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from app.cli.door import key_headers, trust_only
from app.cli.reports import Absence, EngineAnswer, GatewayReport
from app.cli.run_dir import GatewayFile
from workers.hosts import reachable
from workers.http_get import GetFailed, http_get
from workers.pod_files import PodRecord
from workers.state import EngineState

DEADLINE_SECONDS: Final = 1.0

T = TypeVar("T")


async def ask_engine(pod: PodRecord, engine: str, *, timeout_seconds: float = DEADLINE_SECONDS) -> EngineAnswer:
    """``/state`` of one engine. Another pod's engine on that port is not it: a stale file names ports of anybody."""
    port = pod.engines[engine].admin_port
    answer = await _ask(reachable(pod.host), port, "/state", EngineState, timeout_seconds)
    if isinstance(answer, EngineState) and (answer.instance, answer.engine) != (pod.instance, engine):
        return Absence.GONE
    return answer


async def ask_gateway(
    file: GatewayFile, *, key: str | None, timeout_seconds: float = DEADLINE_SECONDS
) -> GatewayReport | Absence:
    """``/status`` of the gateway. ``key``: the API key to show, if any."""
    try:
        tls = trust_only(Path(file.tls_certificate)) if file.tls_certificate else None
    except OSError:
        return Absence.UNTRUSTED
    host = reachable(file.host)
    return await _ask(host, file.port, "/status", GatewayReport, timeout_seconds, headers=key_headers(key), tls=tls)


async def ask_pod(pod: PodRecord, *, timeout_seconds: float = DEADLINE_SECONDS) -> dict[str, EngineAnswer]:
    """Every engine of one pod, at the same time."""
    asked = (ask_engine(pod, engine, timeout_seconds=timeout_seconds) for engine in pod.engines)
    return dict(zip(pod.engines, await asyncio.gather(*asked), strict=True))


def private_bytes(pid: int) -> int | None:
    """Memory that would be free without this process: its private pages, those of the memory service not counted.

    The service's pages are memfd mappings; while one engine alone has them mapped the kernel counts them as private to
    it, though they outlive it. So the mappings are added up one by one. None: the process is gone or not ours to see.
    """
    try:
        smaps = Path(f"/proc/{pid}/smaps").read_bytes()
    except OSError:
        return None
    return sum_private(smaps)


def sum_private(smaps: bytes) -> int:
    """Sum of the ``Private_`` lines of ``/proc/PID/smaps``, memfd mappings left out; bytes. Pure."""
    total, counted = 0, True
    for line in smaps.splitlines():
        if line.startswith(b"Private_"):
            if counted:
                total += int(line.split()[1]) * 1024
        elif b"-" in line.partition(b" ")[0]:  # "7f12-7f34 rw-s ... /memfd:gms:kv (deleted)" begins a mapping
            counted = b" /memfd:gms" not in line
    return total


async def _ask(
    host: str,
    port: int,
    path: str,
    kind: type[T],
    timeout_seconds: float,
    *,
    headers: Mapping[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
) -> T | Absence:
    try:
        status, body = await http_get(host, port, path, timeout_seconds=timeout_seconds, headers=headers, tls=tls)
        if status == 401:
            return Absence.WRONG_KEY if headers else Absence.UNAUTHORIZED
        return msgspec.json.decode(body, type=kind)
    except GetFailed as error:
        if isinstance(error.__cause__, ssl.SSLError):
            return Absence.UNTRUSTED
        refused = isinstance(error.__cause__, ConnectionRefusedError | ConnectionResetError)
        return Absence.GONE if refused else Absence.SILENT
    except msgspec.DecodeError:
        return Absence.SILENT
