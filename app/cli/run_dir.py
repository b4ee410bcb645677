"""The run folder of one machine: who runs there, told by the files that the processes write themselves.

``pod.json`` and ``gateway.json`` are replaced whole by their owners and removed by them at the end. A process that was
killed leaves its file behind: a file is a claim, and ``is_running`` holds its pid against the process that has it now.
In a container nobody writes ``pod.json``: there the files of the pod's engines take its place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, TypeVar

import msgspec

from app.cli.errors import CliError
from app.plain_file import read_small
from workers.exit_codes import ExitCode
from workers.pod_files import ENGINE_FILES, POD_FILE, EngineFile, PodRecord, own_pid_namespace, record_of

T = TypeVar("T")

GATEWAY_FILE: Final = "gateway.json"
MAX_FILE_BYTES: Final = 1 << 20


class GatewayFile(msgspec.Struct, frozen=True, kw_only=True):
    """``gateway.json``."""

    pid: int
    host: str
    port: int
    tls_certificate: str | None = None
    """Path of the certificate that it shows; None: it speaks plain HTTP."""


def read_pods(run_dir: Path) -> list[PodRecord]:
    """Every pod with a ``pod.json``, or with engines that say where they are, by name.

    Raises:
        CliError: a file is there that this version cannot read.
    """
    folders = {path.parent for name in (POD_FILE, ENGINE_FILES) for path in run_dir.glob(f"*/{name}")}
    found = [read_pod(folder) for folder in folders]
    return sorted((pod for pod in found if pod is not None), key=lambda pod: pod.pod)


def read_pod(pod_dir: Path) -> PodRecord | None:
    """The pod's file, or what its engines' files come to; None if there is none, or none yet."""
    return _read(pod_dir / POD_FILE, PodRecord) or _read_engines(pod_dir)


def _read_engines(pod_dir: Path) -> PodRecord | None:
    found: list[tuple[float, EngineFile]] = []
    for path in pod_dir.glob(ENGINE_FILES):
        try:
            written = path.stat().st_mtime
        except FileNotFoundError:
            continue
        if (file := _read(path, EngineFile)) is not None:
            found.append((written, file))
    if not found:
        return None
    found.sort(key=lambda entry: entry[0])
    record = record_of([file for _, file in found], pid_namespace=own_pid_namespace())
    return msgspec.structs.replace(record, engines=dict(sorted(record.engines.items())))


def find_pod(name: str | None, run_dir: Path) -> PodRecord:
    """The pod of this name; without one, the only pod there.

    Raises:
        CliError: there is none, or it cannot be told which one is meant.
    """
    if name is None:
        pods = read_pods(run_dir)
        if len(pods) == 1:
            return pods[0]
        known = ", ".join(pod.pod for pod in pods) or "none"
        raise CliError(f"name a pod (pods in {run_dir}: {known})", code=ExitCode.BAD_CONFIGURATION)
    pod = read_pod(run_dir / name) if name not in ("", ".", "..") and "/" not in name else None
    if pod is None:
        known = ", ".join(pod.pod for pod in read_pods(run_dir)) or "none"
        raise CliError(f"there is no pod {name!r} in {run_dir} (pods there: {known})", code=ExitCode.ENGINE_DEAD)
    return pod


def read_gateway(run_dir: Path) -> GatewayFile | None:
    """The gateway's file; None if there is none, or none yet."""
    return _read(run_dir / GATEWAY_FILE, GatewayFile)


def is_running(pid: int | None, *, module: str) -> bool:
    """Whether ``pid`` is a live process that runs ``python -m module ...``: a pid alone may be anybody's by now."""
    if pid is None:
        return False
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return module.encode() in command  # a zombie's command line is empty


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(read_small(path, MAX_FILE_BYTES), type=kind)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CliError(f"{path} cannot be read: {error.strerror}", code=ExitCode.ENGINE_DEAD) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CliError(
            f"{path} is not a file of this version of hotspare: {error}; remove it if nothing runs there",
            code=ExitCode.ENGINE_DEAD,
        ) from error
