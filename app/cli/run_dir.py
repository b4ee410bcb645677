"""The run folder of one machine: who runs there, told by the files that the processes write themselves.

``pod.json`` and ``gateway.json`` are replaced whole by their owners and removed by them at the end. A process that was
killed leaves its file behind: a file is a claim, and ``is_running`` holds its pid against the process that has it now.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, TypeVar

import msgspec

from app.cli.errors import CliError
from workers.exit_codes import ExitCode
from workers.pod_files import POD_FILE, PodRecord

T = TypeVar("T")

GATEWAY_FILE: Final = "gateway.json"


class GatewayFile(msgspec.Struct, frozen=True, kw_only=True):
    """``gateway.json``."""

    pid: int
    host: str
    port: int
    tls_certificate: str | None = None
    """Path of the certificate that it shows; None: it speaks plain HTTP."""


def read_pods(run_dir: Path) -> list[PodRecord]:
    """Every pod with a ``pod.json``, by name.

    Raises:
        CliError: a file is there that this version cannot read.
    """
    found = [read_pod(path.parent) for path in run_dir.glob(f"*/{POD_FILE}")]
    return sorted((pod for pod in found if pod is not None), key=lambda pod: pod.pod)


def read_pod(pod_dir: Path) -> PodRecord | None:
    """The pod's file; None if there is none, or none yet."""
    return _read(pod_dir / POD_FILE, PodRecord)


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
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CliError(f"{path} cannot be read: {error.strerror}", code=ExitCode.ENGINE_DEAD) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CliError(
            f"{path} is not a file of this version of hotspare: {error}; remove it if nothing runs there",
            code=ExitCode.ENGINE_DEAD,
        ) from error
