"""The process tests' bench on the GPU of this run, with a service that needs nothing but `gms` and msgspec."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Final

from tests.gpu.harness import Machine
from tests.process.gms.bench import Bench, Device
from tests.process.gms.processes import Process

ON_THE_HOST: Final = {"actor", "client", "serve", "service", "socket_path", "spawn"}
"""What fixtures of the process tests give to those that are about host memory."""


def described(machine: Machine, driver: Path | None) -> Device:
    """`driver` is the folder with the fake one, None for a real GPU."""
    return Device("cuda:0", machine.uuid, machine.unit, zeroed=False, sealed=False, hashed=False, driver=driver)


class GpuBench(Bench):
    """As its parent; `--chunk-size` and the like are in bytes."""

    def start(self, *flags: str, **settings: object) -> Process:
        arguments = ["-m", "tests.gpu.serve", "--socket", str(self.path), "--device", self.device.name, *flags]
        self.service = Process(arguments, self._environment("service", no_context=1, **settings), "stderr")
        self._services.append(self.service)
        self.connect("start").close()
        return self.service


def on_bench(module: ModuleType) -> dict[str, Callable[..., None]]:
    """The tests of a module that ask for a bench, and for nothing of the host."""
    tests = {name: value for name, value in vars(module).items() if name.startswith("test_") and callable(value)}
    asked = {name: set(inspect.signature(test).parameters) for name, test in tests.items()}
    return {name: tests[name] for name, names in asked.items() if "bench" in names and not names & ON_THE_HOST}
