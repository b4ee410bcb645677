"""Processes of a measurement: on cores of their own, with a log, accounted for as whole trees, and ended by pid."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Final, NamedTuple, Self

from app.cli.bench.system import BenchError

STOP_SECONDS: Final = 10.0
_LOG_TAIL_LINES: Final = 15


class Cores(NamedTuple):
    """Where things run: the gateway alone, workers and load together elsewhere."""

    gateway: frozenset[int]
    others: frozenset[int]

    @property
    def apart(self) -> bool:
        return not self.gateway & self.others


def choose_cores() -> Cores:
    """One core for the gateway and another for the rest; the same for both where there is only one."""
    first, *more = sorted(os.sched_getaffinity(0))
    return Cores(frozenset({more[0] if more else first}), frozenset({first}))


@contextlib.contextmanager
def own_cores(cores: frozenset[int]) -> Iterator[None]:
    """This process on these cores for a while."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def most_descriptors() -> Iterator[int]:
    """As many file descriptors as the hard limit allows, for this process and what it starts; how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Without settings of Hotspare and without proxies: what is measured must not depend on the caller's shell."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith("HOTSPARE_") and not name.lower().endswith("_proxy")
    }


class Child:
    """A process and its descendants, in a session of their own. Ended on leaving the context, and with this process."""

    def __init__(
        self,
        launcher: Path,
        command: Sequence[str],
        *,
        cores: frozenset[int],
        log: Path,
        env: Mapping[str, str],
        stdout: int | None = None,
    ) -> None:
        self.name = Path(command[0]).name
        self._log = log
        on = ",".join(map(str, sorted(cores)))
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [str(launcher), str(os.getpid()), on, *command],
                stdin=subprocess.DEVNULL,
                stdout=output if stdout is None else stdout,
                stderr=output,
                env=dict(env),
                start_new_session=True,
                text=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stdout(self) -> IO[str]:
        if self._process.stdout is None:
            raise RuntimeError("its output goes to the log")
        return self._process.stdout

    @property
    def code(self) -> int | None:
        """How it ended, or None while it runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> int:
        """Its exit code.

        Raises:
            BenchError: it does not end in time.
        """
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise BenchError(f"{self.name} did not end within {seconds:g} s") from None

    def log_tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:])

    def forget_log(self) -> None:
        """What it wrote so far takes no space any more."""
        os.truncate(self._log, 0)

    def end(self) -> None:
        """SIGTERM, then SIGKILL to whatever of its session is left. Idempotent."""
        if self._process.returncode is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def cpu_seconds(self) -> float:
        """On-CPU time of all threads of the tree, to the nanosecond where the kernel's clock has it."""
        spent = 0
        for pid in _tree(self.pid):
            for stat in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                with contextlib.suppress(OSError):  # a thread may end between the listing and the reading
                    spent += int(stat.read_text().split()[0])
        return spent / 1e9

    def pss_bytes(self) -> int:
        """Proportional set size of the tree."""
        total = 0
        for pid in _tree(self.pid):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                    if line.startswith("Pss:"):
                        total += int(line.split()[1]) * 1024
        return total


def _tree(root: int) -> list[int]:
    """The process and its descendants that are there now."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found
