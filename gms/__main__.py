"""`hotspare gms`, `python -m gms`: runs the memory service of one device until SIGTERM or SIGINT.

Exit codes: 0 ended as asked, 1 the device failed, 2 bad configuration (one sentence on stderr says which).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gms.settings import GmsSettings

STOPS = (signal.SIGTERM, signal.SIGINT)
EXIT_DEVICE_FAILED = 1
EXIT_BAD_CONFIGURATION = 2
MIN_FILES = 128
"""Each engine's connection has some, each piece of memory one."""
_FLAGS = {
    "socket": "PATH",
    "device": "KIND:N",
    "memory_limit": "SIZE",
    "chunk_size": "SIZE",
    "adopt_timeout_seconds": "S",
    "metrics_port": "PORT",
}
_ALIASES = {"HOTSPARE_GMS_LOG_LEVEL": "HOTSPARE_GMS_LOG_LEVEL or HOTSPARE_LOG_LEVEL"}
"""A problem is reported under the first name that could have been used."""


def main() -> int:
    flags = vars(parser().parse_args())
    gc.disable()  # the imports below make objects that stay: collecting among them costs a tenth of the start-up
    from pydantic import ValidationError

    from gms.legible import not_text
    from gms.settings import GmsSettings

    if sentences := not_text(os.environ, flags):
        return _refuse(f"{'; '.join(sentences)}.")
    try:
        settings = GmsSettings(**{name: value for name, value in flags.items() if value is not None})
    except ValidationError as error:
        return _refuse("; ".join(_sentence(item["loc"], item["msg"]) for item in error.errors(include_url=False)))
    if settings.parent_pid is not None:
        from gms.parent import die_with

        if not die_with(settings.parent_pid):
            return _refuse(
                f"The parent process {settings.parent_pid} (HOTSPARE_PARENT_PID) is gone, or is not the parent."
            )
    from gms import logs

    logs.configure(settings.log_level, settings.log_format)
    if problem := _allow_files():
        return _refuse(problem)
    _make_run_dir(settings)
    gc.freeze()
    gc.enable()
    return asyncio.run(_run(settings))


async def _run(settings: GmsSettings) -> int:
    from gms.factory import running
    from gms.socket_path import StartError

    stop = asyncio.Event()
    for number in STOPS:
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)  # `hotspare gms` has the kernel keep them until here
    if os.getpid() == 1:  # of a container: what others leave behind when they end is its to bury, and it has no child
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    log = logging.getLogger("gms")
    try:
        async with running(settings) as failure:
            limit = f"{settings.memory_limit} bytes at most" if settings.memory_limit else "no memory limit"
            log.info("memory service for %s listens on %s, %s", settings.device, settings.socket, limit)
            failure.add_done_callback(lambda _: stop.set())
            await stop.wait()
            if failure.done():
                log.critical("memory service for %s ends: %s", settings.device, failure.result())
                return EXIT_DEVICE_FAILED
            log.info("memory service for %s ends", settings.device)
    except StartError as error:
        if settings.parent_pid is None:
            return _refuse(str(error))
        log.error("%s", error)  # among a pod's lines it must have a time and a level, and be JSON where all are
        return EXIT_BAD_CONFIGURATION
    return 0


def parser() -> argparse.ArgumentParser:
    """The flags. ``hotspare gms --help`` explains them more fully, from the docstrings of the settings."""
    made = argparse.ArgumentParser(
        prog="hotspare gms", description="Hotspare's memory service: owns the pages of one device."
    )
    for name, metavar in _FLAGS.items():
        made.add_argument(f"--{name.replace('_', '-')}", metavar=metavar, help=f"overrides HOTSPARE_GMS_{name.upper()}")
    return made


def _make_run_dir(settings: GmsSettings) -> None:
    """Closed to others, as the pod's folder in it, which the server makes; the server tells what cannot be made."""
    run_dir = os.path.abspath(settings.run_dir)
    if settings.socket.startswith(f"{run_dir}/"):
        with contextlib.suppress(OSError):
            os.makedirs(run_dir, mode=0o700, exist_ok=True)


def _allow_files() -> str:
    """Each allocation is a descriptor; the usual soft limit of 1024 is for programs that use select(). A sentence if
    there are too few of them even so."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard == resource.RLIM_INFINITY or hard >= MIN_FILES:
        return ""
    return (
        f"This process may open {hard} files at a time and needs {MIN_FILES}; raise the limit "
        "(the hard limit, ulimit -Hn)."
    )


def _sentence(location: tuple[int | str, ...], message: str) -> str:
    name = str(location[0]) if location else "settings"
    variable = _ALIASES.get(name) or (name if name.isupper() else f"HOTSPARE_GMS_{name.upper()}")
    flag = f" or --{name.replace('_', '-')}" if name in _FLAGS else ""
    return f"{variable}{flag}: {message}."


def _refuse(sentence: str) -> int:
    print(f"gms: {sentence}", file=sys.stderr)
    return EXIT_BAD_CONFIGURATION


if __name__ == "__main__":
    sys.exit(main())
