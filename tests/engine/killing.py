"""What tests need that kill engines under real answers: who is active, the moment to kill, and what the client got.

A kill is due at a moment that follows from what the client has received, or, before it has received anything, from what
the engine says of itself; never after some time. Whether it came in the middle is in the gateway's access line. An
answer that was quicker than its kill shows nothing, and is asked for again.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from app.openai.sse import KEEPALIVE
from app.telemetry.access_log import LOGGER
from tests.support.machine import Machine
from tests.support.processes import MS, until
from workers.contract import Role

DEADLINE_SECONDS = 60_000 * MS

Moment = Callable[[bytes], bool]
"""Of what the client has: whether this is when to kill."""


def after_events(count: int) -> Moment:
    return lambda seen: seen.count(b"\n\n") >= count


def after_tokens(count: int) -> Moment:
    """For answers that tell in every event how many there were."""
    return lambda seen: b'"completion_tokens":%d' % count in seen


@dataclass
class Stream:
    """One answer as its client sees it. Iterating reads on."""

    response: httpx.Response
    seen: bytes = b""
    _parts: Iterator[bytes] | None = field(default=None)

    @property
    def request_id(self) -> str:
        return self.response.headers["x-request-id"]

    def read_until(self, moment: Moment) -> None:
        """Or to its end: on a busy machine vLLM puts several tokens in one event, and a moment may never come."""
        while not moment(self.seen) and self._read():
            pass

    def read_on(self) -> bytes:
        """To the end; all that was received."""
        while self._read():
            pass
        return self.seen

    def _read(self) -> bool:
        if self._parts is None:
            self._parts = self.response.iter_raw()
        part = next(self._parts, b"")
        self.seen = (self.seen + part).replace(KEEPALIVE, b"")
        return bool(part)


@dataclass
class Engine:
    """One engine's word on itself."""

    pod: str
    admin_port: int
    state: dict[str, Any]

    def kill(self) -> None:
        os.kill(self.state["pid"], signal.SIGKILL)


class Fleet:
    """``hotspare up`` with real engines, for clients and for whoever kills."""

    def __init__(self, machine: Machine) -> None:
        self.url = machine.until_ready()
        self.client = httpx.Client(base_url=self.url, timeout=DEADLINE_SECONDS, trust_env=False)
        self._log = machine.run_dir / "logs" / "gateway.log"
        self._ports = {
            pod["pod"]: [engine["admin_port"] for engine in pod["engines"].values()] for pod in machine.status()["pods"]
        }
        self.kills = 0

    @contextmanager
    def stream(self, path: str, body: dict[str, Any]) -> Iterator[Stream]:
        with self.client.stream("POST", path, json=body) as response:
            assert response.status_code == 200, response.read()
            yield Stream(response)

    # --- engines

    def engines(self) -> list[Engine]:
        return [
            Engine(pod, port, state)
            for pod, ports in self._ports.items()
            for port in ports
            if (state := self._state(port)) is not None
        ]

    def _state(self, port: int) -> dict[str, Any] | None:
        try:
            return dict(self.client.get(f"http://127.0.0.1:{port}/state").json())
        except httpx.TransportError:
            return None

    def whole(self) -> list[Engine]:
        """Wait until every pod has an active engine and a parked one, and the gateway routes to it; the active ones."""

        def are() -> list[Engine] | None:
            found = self.engines()
            roles = sorted(engine.state["role"] for engine in found)
            active = [engine for engine in found if engine.state["role"] == Role.ACTIVE]
            wanted = sorted([Role.ACTIVE, Role.STANDBY] * len(self._ports))
            routed = {(worker["worker"], worker["epoch"]) for worker in self.status()["workers"] if worker["routable"]}
            return active if roles == wanted and {(a.pod, a.state["epoch"]) for a in active} == routed else None

        return until(are, saying="every pod has an active engine and a spare", seconds=DEADLINE_SECONDS)

    def serving(self, *, other_than: tuple[int, ...] = ()) -> Engine | None:
        """Wait for the active engine that has a request, not a process of ``other_than``; None if there is no request
        any more."""

        def has() -> list[Engine] | None:
            over = not self.status()["inflight"]
            found = [
                engine
                for engine in self.engines()
                if engine.state["role"] == Role.ACTIVE
                and engine.state["inflight"]
                and engine.state["pid"] not in other_than
            ]
            return found if found or over else None

        found = until(has, saying="an engine has the request", seconds=DEADLINE_SECONDS)
        return found[0] if found else None

    def kill(self, engine: Engine) -> None:
        self.kills += 1
        engine.kill()

    # --- what the gateway says

    def status(self) -> dict[str, Any]:
        return dict(self.client.get("/status").json())

    def line(self, request_id: str) -> dict[str, Any]:
        """The request's line in the access log."""

        def written() -> dict[str, Any] | None:
            for line in self._log.read_text().splitlines():
                found = json.loads(line) if request_id in line else {}
                if found.get("logger") == LOGGER and found["request_id"] == request_id:
                    return dict(found)
            return None

        return until(written, saying=f"the access line of {request_id}", seconds=DEADLINE_SECONDS)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of all series that have these labels."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(
            float(line.split()[-1])
            for line in self.client.get("/metrics").text.splitlines()
            if re.match(rf"{name}[{{ ]", line) and all(label in line for label in wanted)
        )


def alike(raw: bytes) -> bytes:
    """Without what differs between two requests: ids, each named by when it comes first, and the time.

    Both must be one throughout an answer: a resume that took another id, or was made a second time, still differs.
    """
    names: dict[bytes, bytes] = {}

    def renamed(match: re.Match[bytes]) -> bytes:
        name = names.setdefault(match[2], b"name-%d" % len(names))
        return match[1] + name + b'"'

    raw = re.sub(rb'("(?:\w+_)?id":")([^"]+)"', renamed, raw)
    times = set(re.findall(rb'"created(?:_at)?":(\d+)', raw))
    assert len(times) <= 1, times
    return re.sub(rb'("created(?:_at)?"):\d+', rb"\1:0", raw)
