"""Starts the processes of ``hotspare up``. Imports little: the children should run before anything is explained."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from app.cli.children import Child
from app.cli.errors import CliError
from app.cli.launch import PASSED_ON, module_command, safe_environment
from app.cli.plan import (
    PodPlan,
    UpOptions,
    child_environment,
    gateway_arguments,
    pod_arguments,
    pod_environment,
)
from workers.exit_codes import ExitCode

MODEL_MODULE = "workers.engines.vllm.smollm2"


class StartedPod(NamedTuple):
    """A pod's plan, and its supervisor."""

    plan: PodPlan
    child: Child


class Starter:
    """Holds every child; whoever builds it calls ``close`` in the end."""

    def __init__(
        self, options: UpOptions, *, port: int, pods: list[PodPlan], logs: Path, environment: Mapping[str, str]
    ) -> None:
        self.port = port
        self.gateway: Child | None = None
        self.model: Child | None = None
        self.pods: list[StartedPod] = []
        self._options = options
        self._plans = pods
        self._logs = logs
        self._environment = safe_environment(
            child_environment(
                environment,
                run_dir=options.run_dir,
                parent_pid=os.getpid(),
                model=options.model,
                worker_token=secrets.token_urlsafe(32),
            )
        )

    def start(self) -> None:
        """Everything that can start now: all of it, unless the embedded model has to be converted first.

        Raises:
            CliError: the system would not start a process.
        """
        module = PASSED_ON["gateway"].module
        arguments = gateway_arguments(self._options, self.port, self._plans)
        self.gateway = self._start("gateway", *module, *arguments)
        if _needs_conversion(self._options):
            self.model = self._start("model", MODEL_MODULE)
        else:
            self.start_pods()

    def start_pods(self) -> None:
        """All pods.

        Raises:
            CliError: the system would not start a process.
        """
        for plan in self._plans:
            child = self._start(plan.name, *PASSED_ON["pod"].module, *pod_arguments(self._options, plan))
            self.pods.append(StartedPod(plan, child))

    @property
    def children(self) -> list[Child]:
        """Every process started so far."""
        return [child for child in (self.gateway, self.model, *(pod.child for pod in self.pods)) if child]

    def kill_all(self) -> None:
        """Kill and reap what still runs. The children's own children die with them (HOTSPARE_PARENT_PID)."""
        for child in self.children:
            child.signal(signal.SIGKILL)
        for child in self.children:
            child.reap()

    def close(self) -> None:
        """``kill_all``, and give everything back. Once."""
        self.kill_all()
        for child in self.children:
            child.close()

    def _start(self, name: str, module: str, *arguments: str) -> Child:
        command = module_command(module, *arguments)
        environment = self._environment if name == "gateway" else pod_environment(self._environment)
        try:
            return Child(name, command, environment=environment, log=self._logs / f"{name}.log")
        except OSError as error:
            raise CliError(f"{name} cannot be started: {error.strerror or error}", code=ExitCode.ENGINE_DEAD) from error


def _needs_conversion(options: UpOptions) -> bool:
    """Whether vLLM is to run the embedded model and no finished copy of it is there."""
    if options.engine != "vllm" or options.model is not None:
        return False
    from workers.engines.vllm.smollm2 import embedded_model_dir

    return embedded_model_dir() is None
