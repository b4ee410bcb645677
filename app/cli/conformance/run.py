"""The parent of the engines under test: it imports what they need, forks one for each life, and hears of each check.

As a keeper does: one thread, no event loop, so that what the engine's ``preload`` may not do shows here, too. A child
that dies or falls silent is a result like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec
import uvloop

from app.cli.conformance.checks import Check, Life
from app.cli.conformance.leftovers import children
from app.cli.conformance.lives import LIVES
from app.cli.conformance.outcomes import Failed, Outcome, Report, Result, Skipped, short
from app.cli.conformance.subject import State, Subject, warm_up
from app.cli.launch import module_command, safe_environment
from workers import factory
from workers.engine import EngineConfigError
from workers.engines import catalogue
from workers.lifeline import adopting_orphans, die_with_parent
from workers.memory import MemoryService
from workers.settings import EngineSettings

SERVICE_SECONDS: Final = 15.0
_REFUSED: Final = b"refused: "
"""Begins the line of a child whose engine is not for these settings; all other lines are results."""
_POLL_SECONDS: Final = 0.01

Heard = Callable[[Result], None]
Waits = Callable[[Check, float], None]
"""Told of a check that is not over, and for how many seconds it has been waited for."""


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """How long an engine is waited for, beyond the deadlines of the calls themselves."""

    silence_seconds: float = 15.0
    """A child may be late with a check by so much before it counts as hung: its own deadline did not end it."""
    settle_seconds: float = 15.0
    """For what an engine does soon after, and not in, a call: ending a request whose client has left."""
    progress_seconds: float = 10.0
    """Between two words about a check that is not over."""


class CannotTry(Exception):
    """The engine cannot be tried at all; a sentence."""


def conform(
    settings: EngineSettings,
    *,
    heard: Heard = lambda _: None,
    waits: Waits = lambda _check, _seconds: None,
    lives: Sequence[Life] = LIVES,
    patience: Patience | None = None,
) -> Report:
    """Drive the engine that ``settings`` name through all lives. ``settings.gms``: over a memory service, which is
    started for it. ``heard`` is told of each result as it comes, ``waits`` of what does not come.

    Raises:
        CannotTry: there is no such engine, it does not fit, or it is not for these settings.
    """
    patience = patience or Patience()
    if settings.tensor_parallel_size != 1:
        raise CannotTry("engines of one rank are tried: set HOTSPARE_TENSOR_PARALLEL_SIZE to 1")
    found = catalogue.find(settings.engine)
    with _folder() as folder, adopting_orphans():
        settings = settings.model_copy(update={"run_dir": folder, "pod": "pod"})
        settings.pod_dir.mkdir(mode=0o700)
        try:
            factory.preload(settings)
        except EngineConfigError as error:
            raise CannotTry(str(error)) from error
        results: list[Result] = []
        with _service(settings) as service:
            for life in lives:
                for result in _live(life, settings, service, folder, patience, waits):
                    results.append(result)
                    heard(result)
    return Report(
        engine=found.name,
        target=found.target,
        package=found.package,
        caveat=str(getattr(catalogue.load(found), "caveat", "")),
        memory_service=service is not None,
        results=results,
    )


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """For sockets, and for what engines put into their temporary folder; short, since socket paths are."""
    folder = Path(tempfile.mkdtemp(prefix="hsc-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _service(settings: EngineSettings) -> Iterator[MemoryService | None]:
    if not settings.gms:
        yield None
        return
    log = settings.run_dir / "gms.log"
    arguments = ["--socket", str(settings.gms_socket), "--device", settings.device, "--metrics-port", "0"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            module_command("gms", *arguments),
            env={**safe_environment(os.environ), "HOTSPARE_PARENT_PID": str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + SERVICE_SECONDS
        while not settings.gms_socket.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise CannotTry(f"the memory service does not start: {log.read_text(errors='replace')[-400:]}")
            time.sleep(_POLL_SECONDS)
        (service,) = factory.memory_services(settings)
        yield service
    finally:
        process.kill()
        process.wait()


def _live(
    life: Life,
    settings: EngineSettings,
    service: MemoryService | None,
    folder: Path,
    patience: Patience,
    waits: Waits,
) -> Iterator[Result]:
    """One child's results, and for what it did not come to, why not."""
    runtime_dir = folder / life.name
    temporary = folder / f"{life.name}-tmp"
    for made in (runtime_dir, temporary):
        made.mkdir(mode=0o700)
    read, write = os.pipe2(os.O_CLOEXEC)
    ours = frozenset(children())
    pid = _fork(life, settings, service, runtime_dir, temporary, write, read, patience)
    os.close(write)
    left = list(life.checks)
    why = ""
    try:
        for line in _lines(
            read,
            lambda: patience.silence_seconds + (left[0].seconds if left else 0.0),
            every=patience.progress_seconds,
            tell=lambda seconds: waits(left[0], seconds) if left else None,
        ):
            if line.startswith(_REFUSED):
                raise CannotTry(line.removeprefix(_REFUSED).decode())
            result = msgspec.json.decode(line, type=Result)
            left.pop(0)
            yield result
    except TimeoutError as error:
        why = str(error)
    finally:
        os.close(read)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        _end_orphans(ours)
    if left:
        code = os.waitstatus_to_exitcode(status)
        ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        yield _not_run(left[0], Outcome.FAIL, why or f"its process ended in it ({ended})")
        for check in left[1:]:
            yield _not_run(check, Outcome.SKIP, f"the engine's process was gone after {left[0].name}")


def _end_orphans(ours: frozenset[int]) -> None:
    """What an engine's process has left behind is this one's now; each of them may have children in turn."""
    while orphans := frozenset(children()) - ours:
        for orphan in orphans:
            os.kill(orphan, signal.SIGKILL)
            os.waitpid(orphan, 0)


def _not_run(check: Check, outcome: Outcome, reason: str) -> Result:
    return Result(check=check.name, promise=check.promise, outcome=outcome, reason=short(reason))


def _lines(fd: int, patience: Callable[[], float], *, every: float, tell: Callable[[float], None]) -> Iterator[bytes]:
    """Whole lines until the other end closes; ``tell`` is told now and then for how long none has come.

    Raises:
        TimeoutError: nothing came for so long.
    """
    rest = b""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    while True:
        seconds, began = patience(), time.monotonic()
        while not poller.poll(max(0.0, min(every, began + seconds - time.monotonic())) * 1000):
            waited = time.monotonic() - began
            if waited >= seconds:
                raise TimeoutError(f"its event loop gave no sign for {seconds:g} s, and only SIGKILL ends it")
            tell(waited)
        if not (data := os.read(fd, 65536)):
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from lines


def _fork(
    life: Life,
    settings: EngineSettings,
    service: MemoryService | None,
    runtime_dir: Path,
    temporary: Path,
    write: int,
    read: int,
    patience: Patience,
) -> int:
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise CannotTry(f"this process has {threads} threads, and must have one to fork an engine")
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.close(read)
        die_with_parent(parent)

        def make() -> Subject:
            return Subject(
                lambda: factory.build_engine(settings, service, runtime_dir=runtime_dir),
                settings,
                service,
                settle_seconds=patience.settle_seconds,
            )

        os.environ["TMPDIR"] = str(temporary)
        tempfile.tempdir = None
        with adopting_orphans():  # so that a check finds a child of a child that has left it
            uvloop.run(_checked(life, make, write))
        code = 0
    except BaseException:  # the process ends here in any case, and must say why
        traceback.print_exc()
    finally:
        _end(code)


def _end(code: int) -> NoReturn:
    """A fork: the parent's clean-up handlers and stack are not its to run."""
    logging.shutdown()
    os._exit(code)


async def _checked(life: Life, make: Callable[[], Subject], write: int) -> None:
    await warm_up()
    try:
        subject = make()
        for check in life.checks:
            result = await _check(check, subject)
            os.write(write, msgspec.json.encode(result) + b"\n")
    except EngineConfigError as error:
        os.write(write, _REFUSED + " ".join(str(error).split()).encode() + b"\n")


async def _check(check: Check, subject: Subject) -> Result:
    """Raises:
    EngineConfigError: the engine says so before it is initialised; from one that was, it is a failure like others.
    """
    began = time.monotonic()
    said: Any = None
    try:
        async with asyncio.timeout(check.seconds):
            await subject.to(check.needs)
            said = await check.run(subject)
        outcome, reason = Outcome.PASS, said or ""
    except Skipped as skipped:
        outcome, reason = Outcome.SKIP, str(skipped)
    except Failed as failed:
        outcome, reason = Outcome.FAIL, str(failed)
    except TimeoutError:
        outcome, reason = Outcome.FAIL, f"it took more than {check.seconds:g} s"
    except Exception as error:
        if isinstance(error, EngineConfigError) and subject.state is State.NEW:
            raise
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}, line {where.lineno}"
        outcome, reason = Outcome.FAIL, f"{type(error).__name__}: {error} ({place})"
    subject.note_shared_memory()
    return Result(
        check=check.name,
        promise=check.promise,
        outcome=outcome,
        reason=short(reason),
        seconds=round(time.monotonic() - began, 3),
    )
