"""``python -m app``: the gateway process.

Whatever is wrong with its settings or its surroundings is one sentence on standard error and exit code 2.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pydantic import ValidationError

from app import compiled
from app.exit_codes import BAD_CONFIGURATION, DRAINED
from app.processes.listener import BACKLOG, bind
from app.settings import GatewaySettings
from app.start_error import StartError

if TYPE_CHECKING:
    from app.processes.siblings import Place

_PR_SET_PDEATHSIG = 1


_SECRET = frozenset(("api_keys", "worker_token"))
"""Settings whose values are repeated nowhere."""


_PATHS = ("api_keys_file", "worker_token_file", "tls_certificate", "tls_key", "workers_file", "run_dir")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise StartError(f"{message}; see hotspare gateway --help")


def parser() -> argparse.ArgumentParser:
    """The flags. ``hotspare gateway --help`` explains them more fully, from the docstrings of the settings."""
    made = _Parser(prog="hotspare gateway", description="Hotspare's gateway: the OpenAI API.", allow_abbrev=False)
    for name, field in GatewaySettings.model_fields.items():
        flag, usage = f"--{name.replace('_', '-')}", f"overrides HOTSPARE_{name.upper()}"
        if name == "api_keys":
            made.add_argument("--api-key", dest=name, action="append", metavar="KEY", help=usage)
        elif field.annotation is bool:
            made.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=usage)
        elif name not in _SECRET:
            made.add_argument(flag, default=None, help=usage)
    return made


def read_settings(arguments: Sequence[str]) -> GatewaySettings:
    """Flags over environment over defaults.

    Raises:
        StartError: an unknown flag or a bad value.
    """
    given = {name: value for name, value in vars(parser().parse_args(arguments)).items() if value is not None}
    if empty := sorted(name for name in _PATHS if given.get(name) == ""):
        # As a variable that is no setting; in a flag, something that was to be there is not.
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in empty)
        raise StartError(f"{flags}: the path is empty; name a file, or leave the flag out")
    try:
        return GatewaySettings(**given)
    except ValidationError as error:
        raise StartError(
            "; ".join(_sentence(item["loc"], item["msg"], item["input"]) for item in error.errors())
        ) from None


def _sentence(location: tuple[int | str, ...], message: str, value: object) -> str:
    reason = message.removeprefix("Value error, ")
    if not location:
        return reason
    name = str(location[0])
    given = name if name in _SECRET else f"{name}={value}"
    if name == "worker_token":
        return f"{given}: {reason} (set it with HOTSPARE_WORKER_TOKEN or HOTSPARE_WORKER_TOKEN_FILE)"
    flag = "--api-key" if name == "api_keys" else f"--{name.replace('_', '-')}"
    return f"{given}: {reason} (set it with {flag} or HOTSPARE_{name.upper()})"


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, however that happens.

    Raises:
        StartError: the parent has gone already.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise StartError(f"cannot ask to die with the parent: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:
        raise StartError(f"the parent process {parent_pid} has ended already")


def raise_file_limit() -> None:
    """A stream has two connections, and the usual limit of 1024 open files would end at 500 of them."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextlib.contextmanager
def announced(run_dir: Path | None, host: str, port: int, *, certificate: Path | None = None) -> Iterator[Path | None]:
    """Have ``gateway.json`` in the run folder while the gateway runs; it appears whole or not at all.

    Raises:
        StartError: the folder cannot be written.
    """
    if run_dir is None:
        yield None
        return
    path = run_dir / "gateway.json"
    partial = run_dir / f".gateway.json.{os.getpid()}"
    document: dict[str, object] = {"pid": os.getpid(), "host": host, "port": port}
    if certificate is not None:  # by which commands know us
        document["tls_certificate"] = os.path.abspath(certificate)
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(partial, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(json.dumps(document))
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise StartError(f"cannot write {path}: {error.strerror}; check --run-dir") from None
    try:
        yield path
    finally:
        withdraw(path)


def withdraw(path: Path | None) -> None:
    """Remove ``gateway.json`` if it is still ours."""
    with contextlib.suppress(OSError, ValueError):
        if path is not None and json.loads(path.read_text()).get("pid") == os.getpid():
            path.unlink()


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Signals end the process properly while whoever serves has not taken them over yet."""

    def leave(number: int, frame: object) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # once is enough: what is being cleared away must not be interrupted
        raise SystemExit(DRAINED)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(settings: GatewaySettings, arguments: Sequence[str]) -> int:
    """Serve until drained; returns the exit code. ``arguments``: those the settings were read from."""
    if settings.parent_pid is not None:
        die_with_parent(settings.parent_pid)
    raise_file_limit()
    # What can fail quickly has been checked; the server's own imports take half a second.
    with stoppable(), contextlib.closing(bind(settings.host, settings.port)) as listener:
        host, port = listener.getsockname()[:2]
        if settings.processes > 1:
            listener.listen(BACKLOG)  # whoever reads the announcement may connect: it waits for the first process
        with announced(settings.run_dir, host, port, certificate=settings.tls_certificate) as announcement:
            if settings.processes > 1:
                return supervise(settings, listener, arguments)
            return serve(settings, listener, on_forced_exit=lambda: withdraw(announcement))


def serve(
    settings: GatewaySettings,
    listener: socket.socket,
    *,
    place: Place | None = None,
    on_listening: Callable[[], None] | None = None,
    on_forced_exit: Callable[[], None] | None = None,
) -> int:
    """Serve in this process until drained; returns the exit code. ``place``: it is one of several."""
    from app.telemetry.logs import configure_logging

    sink = configure_logging(settings.log_format, settings.log_level, with_pid=settings.processes > 1)
    compiled.use()
    from app.factory import create_app
    from app.server import GatewayServer

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    app = create_app(settings, sink, place, files=sys.maxsize if files == resource.RLIM_INFINITY else files)
    server = GatewayServer(app, on_listening=on_listening, on_forced_exit=on_forced_exit)
    # What is here now stays: the collector, which runs while requests wait, need not look at it again and again.
    gc.collect()
    gc.freeze()
    server.run(sockets=[listener])
    return server.exit_code


def supervise(settings: GatewaySettings, listener: socket.socket, arguments: Sequence[str]) -> int:
    """Have several processes serve from this socket until they are drained; returns the exit code."""
    from app.processes.supervisor import Supervisor, meeting_place
    from app.security.access import Access
    from app.telemetry.logs import configure_logging

    configure_logging(settings.log_format, settings.log_level, with_pid=settings.processes > 1)
    Access(settings)  # a file that cannot be used is said here, once, and not by each child
    with meeting_place() as folder:
        return Supervisor(
            listener,
            arguments,
            count=settings.processes,
            folder=folder,
            drain_seconds=settings.drain_timeout_seconds,
        ).run()


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    try:
        return run(read_settings(given), given)
    except StartError as error:
        print(f"hotspare gateway: {error}", file=sys.stderr)
        return BAD_CONFIGURATION


if __name__ == "__main__":
    sys.exit(main())
