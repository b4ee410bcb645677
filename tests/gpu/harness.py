"""Runs a case in a process of its own, within a time limit, on a GPU or on the fake one.

Nothing here loads the driver into the test's own process: a case that kills its context takes no other along.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from tests.gpu import report
from tests.gpu.driver import MIB
from tests.gpu.report import Fact, Report
from tests.support.fakecuda import FakeGpus

ROOT = Path(__file__).parents[2]
START_SECONDS = 60.0
"""For the first word of a process: on a machine that was just started, importing torch alone can take half of it."""
ANSWER_SECONDS = 30.0


class Budget:
    """The time that a run may take: no case starts after it."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        return self._end - time.monotonic()

    def check(self) -> None:
        """Skips the test if nothing is left."""
        if self.left() <= 0:
            pytest.skip("the time of this run is over")


class Actor:
    """A child that is told things and says things, line by line. Ended with what it has started by `close`."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=ROOT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        self.pid = self.process.pid
        self._buffer = b""

    def line(self, seconds: float = START_SECONDS) -> str:
        """Its next line. Fails the test if none comes in time, or the process has ended."""
        try:
            line = self.next_line(time.monotonic() + seconds)
        except TimeoutError:
            pytest.fail(f"the process said nothing for {seconds:g} s; its errors:\n{self.errors()}")
        assert line is not None, f"the process ended; its errors:\n{self.errors()}"
        return line

    def next_line(self, deadline: float) -> str | None:
        """None at the end of what it says. Raises TimeoutError."""
        assert self.process.stdout is not None
        while b"\n" not in self._buffer:
            if not select.select([self.process.stdout], [], [], max(deadline - time.monotonic(), 0))[0]:
                raise TimeoutError
            data = os.read(self.process.stdout.fileno(), 65536)
            if not data:
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def expect(self, word: str, seconds: float = START_SECONDS) -> None:
        found = self.line(seconds)
        assert found == word, f"expected {word!r}, the process said {found!r}; its errors:\n{self.errors()}"

    def json(self, seconds: float = ANSWER_SECONDS) -> Any:
        return json.loads(self.line(seconds))

    def tell(self, line: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def finish(self, seconds: float = ANSWER_SECONDS) -> None:
        """Ends its input; it must then end well."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(seconds) == 0, self.errors()

    def errors(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-4000:]

    def kill(self) -> float:
        """SIGKILL; returns the time by the clock that all processes share. Does not wait for the end."""
        at = time.monotonic()
        self.process.kill()
        return at

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self._log):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Machine:
    """The GPU of this run, real or fake, and where what is found on it is noted. `found` is what `tests.gpu.driver`
    says of it."""

    def __init__(self, found: dict[str, Any], notes: Report, budget: Budget, fake: FakeGpus | None) -> None:
        self.uuid: str = found["uuid"]
        self.free_bytes: int = found["free_bytes"]
        self.unit: int = found["granularity"]
        self.report = notes
        self.budget = budget
        self.fake = fake

    def environment(self, log: str = "case", **settings: object) -> dict[str, str]:
        """For a subprocess; `settings` are the fake driver's."""
        return {} if self.fake is None else self.fake.environment(log, **settings)

    def share(self, size_bytes: int, small_bytes: int) -> int:
        """`size_bytes`, or less if the GPU has not that much to spare; `small_bytes` on the fake, whose memory is the
        host's. A multiple of 2 MiB."""
        if self.fake is not None:
            return small_bytes
        return min(size_bytes, self.free_bytes * 9 // 10) // (2 * MIB) * (2 * MIB)

    def actor(self, module: str, *arguments: object, **settings: object) -> Actor:
        return Actor(["-m", module, *map(str, arguments)], self.environment(module, **settings))

    def case(self, module: str, *arguments: object, seconds: float = 60.0, rude: bool = False) -> None:
        """Runs `python -m module arguments` and notes each line that it says. Fails the test if that fails, or finds
        something that the code relies on to be otherwise. What is `rude` misuses the driver to see what comes of it."""
        name = " ".join(map(str, [module.rpartition(".")[2], *arguments[:1]]))
        log = f"case-{name.replace(' ', '-')}"
        environment = self.environment(log, strict=int(not rude))
        broken: list[Fact] = []
        limit = min(seconds, max(self.budget.left(), 1.0))
        with Actor(["-m", module, *map(str, arguments)], environment) as actor:
            try:
                deadline = time.monotonic() + limit
                while (line := actor.next_line(deadline)) is not None:
                    found = report.decode(line)
                    self.report.add(found)
                    if isinstance(found, Fact) and not found.holds:
                        broken.append(found)
                code = actor.process.wait(ANSWER_SECONDS)
                ended = f"ended with {code}" if code else ""
            except (TimeoutError, subprocess.TimeoutExpired):
                ended = f"took longer than {limit:g} s"
            if ended:
                self.report.add(Fact(f"the case {name}", ended, "an ordinary end"))
                pytest.fail(f"the case {name} {ended}; its errors:\n{actor.errors()}")
        assert not broken, "\n".join(f"{fact.question}: {fact.found}, not {fact.relied}" for fact in broken)
        if self.fake is not None and not rude:
            assert not self.fake.complaints(log)
