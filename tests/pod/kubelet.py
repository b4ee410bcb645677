"""What a kubelet does for a pod, done with podman: starts its containers in order, probes them, starts them again when
they end, and ends them all in order. Containers, namespaces, limits and signals are the kernel's, the manifest the
chart's.

Where it differs from a kubelet: it looks with pidfds instead of once a second, and so starts a container again sooner
(the first time at once, as a kubelet does; then after ``BACKOFF_SECONDS``, doubled each time, where a kubelet begins
with ten seconds); and a container that is started again is the same one, not another of the same image.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.pod.manifests import Document, PodManifest, cores, environment, expand, port_of, quantity
from tests.pod.podman import Podman, PodmanError
from tests.pod.probing import Probe
from tests.pod.volumes import EMPTY_DIRS, Volumes
from tests.support.processes import DEADLINE_SECONDS, MS, until

BACKOFF_SECONDS = 2.0
MOST_BACKOFF_SECONDS = 60.0
STARTED_SECONDS = 120_000 * MS


@dataclass(frozen=True)
class Event:
    """Something that the kubelet did or saw."""

    at: float
    container: str
    what: str


@dataclass
class Container:
    """One container of a pod."""

    spec: Document
    podman_name: str
    sidecar: bool
    pid: int = 0
    """Of its process 1, as it is known on this machine."""
    restarts: int = 0
    started: bool = False
    ready: bool = False
    exit_codes: list[int] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    """It has ended for good."""

    @property
    def name(self) -> str:
        return str(self.spec["name"])


class Pod:
    """A running pod. Its threads end with ``stop`` or ``kill``."""

    def __init__(self, podman: Podman, manifest: PodManifest, network: str) -> None:
        self.manifest = manifest
        self._podman = podman
        self._network = network
        self._volumes = Volumes(EMPTY_DIRS / manifest.name, group=manifest.spec["securityContext"]["fsGroup"])
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self.events: list[Event] = []
        self.address = ""
        make = lambda spec, sidecar: Container(spec, f"{manifest.name}-{spec['name']}", sidecar)  # noqa: E731
        self.containers = {
            container.name: container
            for container in (
                *(make(spec, True) for spec in manifest.sidecars),
                *(make(spec, False) for spec in manifest.containers),
            )
        }

    # --- the life of a pod

    def start(self) -> None:
        """Make everything, and start the containers: each sidecar when the one before it is up, then all others."""
        manifest = self.manifest
        names = [word for alias in manifest.aliases for word in ("--network-alias", alias)]
        self._podman("pod", "create", "--name", manifest.name, "--network", self._network, *names)
        for volume in manifest.spec.get("volumes", ()):
            self._volumes.make(volume)
        for container in self.containers.values():
            self._create(container)
        for container in (one for one in self.containers.values() if one.sidecar):
            self._run(container)
            self._until_started(container)
        others = [one for one in self.containers.values() if not one.sidecar]
        with ThreadPoolExecutor(len(others)) as pool:
            list(pool.map(self._run, others))

    def until_ready(self, *, seconds: float = STARTED_SECONDS) -> None:
        """Until every readiness probe succeeds."""
        with self._explained():
            until(
                lambda: all(one.ready for one in self.containers.values()),
                saying=f"{self.manifest.name} is ready",
                seconds=seconds,
            )

    def stop(self) -> dict[str, int]:
        """As a deletion: hooks, SIGTERM to all but the sidecars, and those when the others have ended; SIGKILL when the
        pod's grace period is over. Returns the exit codes."""
        deadline = time.monotonic() + self.manifest.grace_seconds
        self._stopping.set()
        sidecars = [one for one in reversed(self.containers.values()) if one.sidecar]
        others = [one for one in self.containers.values() if not one.sidecar]
        with ThreadPoolExecutor(len(others)) as pool:
            list(pool.map(lambda container: self._end(container, deadline), others))
        for container in sidecars:
            self._end(container, deadline)
        self._join()
        return {container.name: container.exit_codes[-1] for container in self.containers.values()}

    def remove(self) -> None:
        """Leave nothing, whatever state it is in."""
        self._stopping.set()
        with contextlib.suppress(PodmanError):
            self._podman("pod", "rm", "--force", "--time", "0", self.manifest.name)
        self._join()
        self._volumes.remove()

    # --- what tests look at

    def container(self, name: str) -> Container:
        return self.containers[name]

    def log(self, name: str) -> list[str]:
        return self._podman.logs(self.containers[name].podman_name)

    def exec(self, name: str, *words: str, seconds: float = DEADLINE_SECONDS) -> Any:
        return self._podman.exec(self.containers[name].podman_name, *words, seconds=seconds)

    def get(self, port: int, path: str) -> dict[str, Any] | None:
        """A JSON document from inside the pod's network; None if nobody answers."""
        try:
            return dict(httpx.get(f"http://{self.address}:{port}{path}", timeout=2, trust_env=False).json())
        except (httpx.TransportError, json.JSONDecodeError):
            return None

    def state(self, engine: str) -> dict[str, Any] | None:
        """``/state`` of the engine in the container of that name."""
        container = self.containers[engine]
        return self.get(port_of(container.spec, container.spec["livenessProbe"]["httpGet"]["port"]), "/state")

    def role(self, engine: str) -> str | None:
        state = self.state(engine)
        return state and str(state["role"])

    def until_role(self, engine: str, role: str, *, seconds: float = DEADLINE_SECONDS) -> dict[str, Any]:
        """The engine's state once it has this role."""

        def ask() -> dict[str, Any] | None:
            state = self.state(engine)
            return state if state and state["role"] == role else None

        with self._explained():
            return until(ask, saying=f"{engine} of {self.manifest.name} is {role}", seconds=seconds)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except AssertionError as error:
            lines = [f"{event.at:.2f} {event.container}: {event.what}" for event in self.events]
            for container in self.containers.values():
                lines += [f"--- {container.name}", *self.log(container.name)[-25:]]
            raise AssertionError("\n".join((str(error), *lines))) from None

    # --- one container

    def _create(self, container: Container) -> None:
        spec, pod = container.spec, self.manifest.spec
        variables = environment(spec, self.manifest)
        words = ["container", "create", "--pod", self.manifest.name, "--name", container.podman_name, "--pull=never"]
        words += _security({**pod.get("securityContext", {}), **spec.get("securityContext", {})})
        limits = spec.get("resources", {}).get("limits", {})
        if "memory" in limits:
            words += ["--memory", str(quantity(limits["memory"])), "--memory-swap", str(quantity(limits["memory"]))]
        if "cpu" in limits:
            words += ["--cpus", str(cores(limits["cpu"]))]
        for name, value in variables.items():
            words += ["--env", f"{name}={value}"]
        for mount in spec.get("volumeMounts", ()):
            words += [
                "--volume",
                f"{self._volumes.path(mount['name'])}:{mount['mountPath']}{':ro' if mount.get('readOnly') else ''}",
            ]
        if "command" in spec:
            words += ["--entrypoint", json.dumps([expand(word, variables) for word in spec["command"]])]
        self._podman(*words, str(spec["image"]), *(expand(word, variables) for word in spec.get("args", ())))

    def _run(self, container: Container) -> None:
        self._start_process(container)
        for work in (self._restart, self._probe):
            thread = threading.Thread(target=work, args=(container,), name=f"{container.podman_name}-{work.__name__}")
            self._threads.append(thread)
            thread.start()

    def _start_process(self, container: Container) -> None:
        self._podman("container", "start", container.podman_name)
        inspected = self._podman.inspect(container.podman_name)
        container.pid = int(inspected["State"]["Pid"])
        if not self.address:
            self.address = self._podman(
                "container", "inspect", "--format", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}",
                self._podman("pod", "inspect", "--format", "{{.InfraContainerID}}", self.manifest.name),
            )  # fmt: skip
        self._say(container, f"started, process {container.pid}")

    def _restart(self, container: Container) -> None:
        """Wait for its end, again and again, and start it anew."""
        try:
            while True:
                _await_end(container.pid)
                container.ready = container.started = False
                code = int(self._podman("wait", "--interval", "100ms", container.podman_name))
                container.exit_codes.append(code)
                self._say(container, f"ended with {code}")
                delay = BACKOFF_SECONDS * 2 ** (container.restarts - 1) if container.restarts else 0.0
                if self._stopping.wait(min(delay, MOST_BACKOFF_SECONDS)):
                    return
                container.restarts += 1
                self._start_process(container)
        except PodmanError:
            if not self._stopping.is_set():  # else it was taken away meanwhile
                raise
        finally:
            container.ended.set()

    def _until_started(self, container: Container) -> None:
        with self._explained():
            until(lambda: container.started, saying=f"{container.name} is started", seconds=STARTED_SECONDS)

    def _probe(self, container: Container) -> None:
        """One life after the other."""
        while not self._stopping.is_set():
            pid = container.pid
            self._probe_life(container, pid)
            while container.pid == pid and not self._stopping.wait(10 * MS):
                pass

    def _probe_life(self, container: Container, pid: int) -> None:
        """Startup until it succeeds, then liveness and readiness, until that process is to be killed or is another."""
        startup, liveness, readiness = (Probe.of(container.spec, kind) for kind in ("startup", "liveness", "readiness"))
        while startup is not None and startup.ask(self.address) is not True:
            if startup.failed or container.pid != pid:
                return self._kill_after(startup, container, pid)
            if self._stopping.wait(startup.period):
                return None
        container.started, container.ready = True, readiness is None
        while container.pid == pid and not self._stopping.wait(50 * MS):
            if liveness is not None and liveness.due and not liveness.ask(self.address) and liveness.failed:
                return self._kill_after(liveness, container, pid)
            if readiness is not None and readiness.due:
                ok = readiness.ask(self.address)
                if (ok or readiness.failed) and container.pid == pid:
                    container.ready = ok
        return None

    def _kill_after(self, probe: Probe, container: Container, pid: int) -> None:
        if probe.failed and container.pid == pid:
            self._say(container, f"{probe.kind} failed {probe.failures} times: killed")
            grace = self.manifest.grace_seconds if probe.grace is None else probe.grace
            self._kill(container, pid, grace)

    def _end(self, container: Container, deadline: float) -> None:
        hook = container.spec.get("lifecycle", {}).get("preStop")
        if hook:
            container.ended.wait(float(hook["sleep"]["seconds"]))
        self._kill(container, container.pid, max(1.0, deadline - time.monotonic()))
        assert container.ended.wait(DEADLINE_SECONDS), f"{container.name} did not end"

    def _kill(self, container: Container, pid: int, grace: float) -> None:
        """``podman stop``: SIGTERM, and SIGKILL after the grace period; to this life only."""
        if container.pid == pid:
            with contextlib.suppress(PodmanError):
                self._podman("stop", "--time", str(int(grace)), container.podman_name, seconds=grace + DEADLINE_SECONDS)

    def _say(self, container: Container, what: str) -> None:
        with self._lock:
            self.events.append(Event(time.monotonic(), container.name, what))

    def _join(self) -> None:
        for thread in self._threads:
            thread.join(DEADLINE_SECONDS)
            assert not thread.is_alive(), f"{thread.name} hangs"


def _security(context: Document) -> list[str]:
    """A security context as podman's options. The seccomp profile of the runtime is podman's default."""
    words = ["--user", f"{context['runAsUser']}:{context['runAsGroup']}", "--group-add", str(context["fsGroup"])]
    if context.get("runAsNonRoot") and context["runAsUser"] == 0:
        raise ValueError("runAsNonRoot, and the user is 0")
    if context.get("readOnlyRootFilesystem"):
        words += ["--read-only", "--read-only-tmpfs=false"]
    if not context.get("allowPrivilegeEscalation", True):
        words.append("--security-opt=no-new-privileges")
    words += [f"--cap-drop={name}" for name in context.get("capabilities", {}).get("drop", ())]
    if context.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        words.append("--security-opt=seccomp=unconfined")
    return words


def _await_end(pid: int) -> None:
    """Until no process has this pid any more; whoever started it buries it."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:  # gone already: 0 if it had ended before it was looked at
        return
    try:
        select.select([pidfd], [], [])
    finally:
        os.close(pidfd)
