"""An adapter's engine in a process of its own: it says what it is, serves, and ends its process when its own dies."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path

import httpx
import pytest

from tests.support.processes import gone, running, state_of, until, until_role
from workers.contract import Role
from workers.exit_codes import ExitCode
from workers.ports import PortReservation

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[3]


def ask(port: int, answered: list[object]) -> None:
    """For an answer that comes whole, at its end."""
    body = {"model": "model", "prompt": "hello", "max_tokens": 1900}
    try:
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=20, trust_env=False)
        answered.append((answer.status_code, answer.text))
    except (httpx.RemoteProtocolError, httpx.ReadError):
        answered.append("cut")


@pytest.mark.parametrize(("engine", "end"), [("sglang", signal.SIGKILL), ("trtllm", signal.SIGTERM)])
def test_an_adapters_engine_lives_and_ends(tmp_path: Path, engine: str, end: signal.Signals) -> None:
    """SIGKILL is for a process of the engine's own, SIGTERM for the worker."""
    model = tmp_path / "model"
    model.mkdir()
    with contextlib.ExitStack() as stack:
        serving, admin = (stack.enter_context(PortReservation("127.0.0.1")).port for _ in range(2))
        process = stack.enter_context(
            running(
                "engine",
                "workers",
                *("engine", "--engine", engine, "--no-gms", "--no-keeper", "--model", str(model)),
                *("--serving-port", str(serving), "--admin-port", str(admin)),
                log_dir=tmp_path,
                env={
                    "HOTSPARE_RUN_DIR": str(tmp_path),
                    "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support' / 'other_engines'}",
                },
            )
        )
        state = until_role(admin, Role.ACTIVE)
        assert state["memory"]["weights_role"] == "private"
        body = {"model": "model", "prompt": "hello", "max_tokens": 4}
        answer = httpx.post(f"http://127.0.0.1:{serving}/v1/completions", json=body, timeout=10, trust_env=False)
        assert answer.json()["choices"][0]["text"] == " word0 word1 word2 word3"
        tasks = Path(f"/proc/{process.pid}/task").iterdir()
        (child,) = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
        answered: list[object] = []
        held = threading.Thread(target=ask, args=(serving, answered), daemon=True)
        if end is signal.SIGKILL:
            held.start()
            until(lambda: (state_of(admin) or {}).get("inflight") == 1, saying="a request is held")
        os.kill(child if end is signal.SIGKILL else process.pid, end)
        assert process.wait() == (ExitCode.ENGINE_DEAD if end is signal.SIGKILL else ExitCode.DRAINED)
        assert gone(child)
        if end is signal.SIGKILL:
            held.join(timeout=10)
            assert answered == ["cut"]  # nothing in the engine's place: a gateway goes on elsewhere
        output = process.output()
        assert f"engine {engine}: this adapter was written against" in output
        assert "was not run on hardware" in output
        assert (f"SGLang: its process {child} has ended" in output) is (end is signal.SIGKILL)
