"""A memory service of this run: `tests.gpu.serve` in a process of its own, on a socket of its own."""

from __future__ import annotations

import signal
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from gms.client import GmsClient, PoolStatus
from tests.gpu.harness import ANSWER_SECONDS, START_SECONDS, Actor, Machine


class Service:
    """Listens once it is entered, and must end well at the end. `flags` are those of `tests.gpu.serve`."""

    def __init__(self, machine: Machine, device: str, *flags: str) -> None:
        self._machine = machine
        self._device = device
        self._flags = flags
        self._stack = ExitStack()

    def _start(self) -> None:
        arguments = ["-m", "tests.gpu.serve", "--socket", self.path, "--device", self._device, *self._flags]
        environment = self._machine.environment("service", no_context=1)
        self._process = self._stack.enter_context(Actor(arguments, environment))
        self.connect(START_SECONDS).close()

    def connect(self, seconds: float = ANSWER_SECONDS) -> GmsClient:
        """From the test's own process, which maps nothing."""
        identity = self._device if self._device.startswith("cpu:") else self._machine.uuid
        return GmsClient.connect(
            self.path,
            engine="test",
            instance="test",
            device=self._device,
            device_id=identity,
            timeout_seconds=seconds,
        )

    def pool(self, name: str) -> PoolStatus | None:
        with self.connect() as client:
            return next((pool for pool in client.status().pools if pool.name == name), None)

    def until_waiting(self, name: str) -> None:
        """Until somebody waits for a lease on the pool."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while (pool := self.pool(name)) is None or not pool.waiting:
            assert time.monotonic() < deadline, f"nobody waits for {name}"
            time.sleep(0.005)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gms-"))
            self.path = str(Path(folder) / "gms.sock")
            self._stack = stack
            self._start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._stack:
            process = self._process.process
            if kind is None and process.poll() is None:
                process.send_signal(signal.SIGTERM)
                assert process.wait(ANSWER_SECONDS) == 0, self._process.errors()
            if self._machine.fake is not None:
                assert not self._machine.fake.complaints("service")
