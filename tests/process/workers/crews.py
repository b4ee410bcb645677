"""Any number of sim engines over one lock and, if wanted, a memory service, without a supervisor."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.support.processes import Process, running, state_of, until, until_in_line
from workers.ports import PortReservation

BREAKABLE = """
import asyncio, errno, os, sys
from pathlib import Path
from workers import factory
from workers.engines.sim.engine import SimEngine
from workers.logs import configure_logging
from workers.settings import EngineSettings

broken = Path(sys.argv[1])

class BreakableEngine(SimEngine):
    async def wake(self, *, epoch):
        if (broken / "wake").exists():
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        while (broken / "hang").exists():
            await asyncio.sleep(3600)
        await super().wake(epoch=epoch)

    def app(self):
        answer = super().app()
        async def app(scope, receive, send):
            if (broken / "silent").exists():
                await asyncio.sleep(3600)
            if (broken / "raises").exists():
                raise RuntimeError("the application is broken")
            await answer(scope, receive, send)
        return app

factory.build_engine = lambda settings, service, *, runtime_dir: BreakableEngine(settings, service, runtime_dir)
configure_logging(form="console", level="info")
sys.exit(factory.run_engine_process(EngineSettings()))
"""
"""An engine that is broken in one way or another for as long as a file of that name is in the folder."""


class Crew:
    def __init__(self, run_dir: Path, names: str, stack: contextlib.ExitStack) -> None:
        self.run_dir, self.stack = run_dir, stack
        self.serving, *admin = (stack.enter_context(PortReservation("127.0.0.1")).port for _ in range(len(names) + 1))
        self.admin = dict(zip(names, admin, strict=True))
        self.broken = run_dir / "broken"
        self.broken.mkdir()
        self.pod_dir = run_dir / "pod-0"
        self.pod_dir.mkdir(mode=0o700)
        self.env = {
            "HOTSPARE_RUN_DIR": str(run_dir),
            "HOTSPARE_ENGINE": "sim",
            "HOTSPARE_INSTANCE": "test-instance",
            "HOTSPARE_SERVING_PORT": str(self.serving),
            "HOTSPARE_HEARTBEAT_SECONDS": "0.2",
            "HOTSPARE_SIM_WEIGHTS_BYTES": "1048576",
            "HOTSPARE_SIM_KV_BYTES": "1048576",
        }
        self._lives = 0

    def gms(self, *flags: str, device: int = 0) -> Process:
        self._lives += 1
        arguments = ["--socket", str(self.pod_dir / f"gms-cpu-{device}.sock"), "--device", f"cpu:{device}", *flags]
        return self.stack.enter_context(running(f"gms-{self._lives}", "gms", *arguments, log_dir=self.run_dir))

    def engine(self, name: str, *flags: str, **env: str) -> Process:
        arguments = ["engine", "--engine-id", name, "--admin-port", str(self.admin[name]), *flags]
        return self.stack.enter_context(
            running(f"engine-{name}", "workers", *arguments, log_dir=self.run_dir, env={**self.env, **env})
        )

    def breakable(self, name: str, **env: str) -> Process:
        """See ``BREAKABLE``."""
        return self.script(name, BREAKABLE, str(self.broken), **env)

    def script(self, name: str, script: str, *arguments: str, **env: str) -> Process:
        """An engine that a script runs."""
        env = {**self.env, "HOTSPARE_ENGINE_ID": name, "HOTSPARE_ADMIN_PORT": str(self.admin[name]), **env}
        command = [sys.executable, "-c", script, *arguments]
        process = Process(name, command, env=env, log=self.run_dir / f"{name}.log")
        self.stack.callback(process.end)
        return process

    def break_(self, how: str) -> None:
        (self.broken / how).touch()

    def mend(self, how: str) -> None:
        (self.broken / how).unlink()

    def state(self, name: str) -> dict[str, Any] | None:
        return state_of(self.admin[name])

    def known(self, name: str) -> dict[str, Any]:
        """The state of an engine that answers, though perhaps not at once."""
        return until(lambda: self.state(name), saying=f"{name} says what it is")

    def active(self) -> str | None:
        return next((n for n in self.admin if (s := self.state(n)) and s["role"] == "ACTIVE"), None)

    def until_active(self) -> dict[str, Any]:
        states = (self.state(name) for name in itertools.cycle(self.admin))
        return until(lambda: s if (s := next(states)) and s["role"] == "ACTIVE" else None, saying="an engine is active")

    def until_in_line(self, name: str) -> dict[str, Any]:
        return until_in_line(self.admin[name])

    def complete(self) -> str:
        answer = httpx.post(
            f"http://127.0.0.1:{self.serving}/v1/completions",
            json={"prompt": "hello", "max_tokens": 8},
            timeout=20,
            trust_env=False,
        )
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def metric(self, name: str, line: str) -> float:
        """The value on the line of an engine's metrics that begins so; 0 if there is none."""
        text = httpx.get(f"http://127.0.0.1:{self.admin[name]}/metrics", timeout=20, trust_env=False).text
        return next((float(at.split()[-1]) for at in text.splitlines() if at.startswith(line)), 0.0)


@contextlib.contextmanager
def crew(run_dir: Path, names: str) -> Iterator[Crew]:
    with contextlib.ExitStack() as stack:
        yield Crew(run_dir, names, stack)
