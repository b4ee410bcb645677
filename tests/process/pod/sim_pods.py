"""A whole pod of sim engines: the supervisor over the real memory service, and what a test can see of it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from gms.client import GmsClient
from gms.protocol import PoolStatus, Status
from tests.support.processes import RESTART_SECONDS, Process, running, state_of, until

PROMPT, COUNT = "hello there", 20


class SimPod:
    def __init__(self, run_dir: Path, ports: list[int]) -> None:
        self.folder = run_dir / "pod-0"
        self.serving, *self.admin = ports
        self.settings = {
            "HOTSPARE_RUN_DIR": str(run_dir),
            "HOTSPARE_ENGINE": "sim",
            "HOTSPARE_SERVING_PORT": str(self.serving),
            "HOTSPARE_ADMIN_PORTS": ",".join(str(port) for port in self.admin),
            "HOTSPARE_GMS_METRICS_PORT": "0",
            "HOTSPARE_DRAIN_TIMEOUT_SECONDS": "1",
            "HOTSPARE_SIM_TTFT_SECONDS": "0",
            "HOTSPARE_SIM_TOKEN_SECONDS": "0.001",
            "HOTSPARE_SIM_RESTART_SECONDS": RESTART_SECONDS,
        }

    def record(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "pod.json").read_bytes()))

    def active(self) -> dict[str, Any] | None:
        states = [state for port in self.admin if (state := state_of(port))]
        return next((state for state in states if state["role"] == "ACTIVE"), None)

    def until_pair(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The active engine and the parked one."""

        def look() -> tuple[dict[str, Any], dict[str, Any]] | None:
            states = {state["role"]: state for port in self.admin if (state := state_of(port))}
            return (states["ACTIVE"], states["STANDBY"]) if set(states) == {"ACTIVE", "STANDBY"} else None

        return until(look, saying="one engine is active and the other is parked")

    def gms_pid(self) -> int | None:
        """None while it is between two lives."""
        pid = self.record()["gms"]["pid"]
        return None if pid is None else int(pid)

    def connect(self) -> GmsClient:
        """To the memory service."""
        return GmsClient.connect(self.folder / "gms-cpu-0.sock", engine="test", instance="test", client="test")

    def memory(self) -> Status:
        with self.connect() as client:
            return client.status()

    def pool(self, kind: str) -> PoolStatus:
        """The memory service's pool of this kind: ``weights`` or ``kv``."""
        (pool,) = (pool for pool in self.memory().pools if pool.name.partition("/")[0] == kind)
        return pool

    def complete(self) -> str:
        body = {"prompt": PROMPT, "max_tokens": COUNT}
        answer = httpx.post(f"http://127.0.0.1:{self.serving}/v1/completions", json=body, timeout=10, trust_env=False)
        return str(answer.json()["choices"][0]["text"])


@contextlib.contextmanager
def supervised(pod: SimPod, tmp_path: Path, **env: str) -> Iterator[Process]:
    with running("pod", "workers", "pod", log_dir=tmp_path, env={**pod.settings, **env}) as process:
        try:
            yield process
        except BaseException:
            print(process.output())
            raise
