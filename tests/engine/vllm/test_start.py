"""Starts of one engine: without a service, and the ways in which one is refused."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

import httpx
import pytest

from tests.engine.vllm.harness import Driver, EngineProcess
from tests.support.processes import until
from workers.memory import MemoryService

pytestmark = [pytest.mark.engine, pytest.mark.timeout(120)]


def test_an_engine_without_a_service(driver: Driver) -> None:
    before = shared_and_temporary()
    engine = driver.fork("private", gms=False)
    try:
        engine.wake(1)
        assert "Paris" in engine.ask("What is the capital of France?")
        memory = engine.status()["memory"]
        assert memory["weights_role"] == "private"
        assert memory["weights_outside_gms_bytes"] == memory["weights_bytes"]
        engine.park()
        made = shared_and_temporary() - before
        left = made - of_others(made, engine.pid)
    finally:
        engine.kill()
    until(lambda: not left & shared_and_temporary(), saying=f"nothing of it is left: {left}", seconds=60)


def shared_and_temporary() -> set[Path]:
    """What is in shared memory, but for the fake driver's, which stays for long; and vLLM's in the temporary folder."""
    shared = {path for path in Path("/dev/shm").iterdir() if not path.name.startswith("fakecuda-")}
    temporary = Path(tempfile.gettempdir()).iterdir()
    return shared | {path for path in temporary if "vllm" in path.name or "torch" in path.name}


def of_others(paths: set[Path], engine: int) -> set[Path]:
    """Those that processes of other sessions have open or mapped: tests that run meanwhile."""
    held: set[Path] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it is gone, or not ours to look at
            if os.getsid(int(process.name)) != os.getsid(engine):
                maps = [line.split(maxsplit=5) for line in (process / "maps").read_text().splitlines()]
                held |= {Path(fields[5]) for fields in maps if len(fields) > 5}
                held |= {fd.readlink() for fd in (process / "fd").iterdir()}
    return {path for path in paths if any(path == other or path in other.parents for other in held)}


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("missing", {"model": "/nowhere/model"}, "there is no model folder /nowhere/model"),
        ("unknown", {"engine_args": ["--no-such-thing"]}, "unrecognized arguments: --no-such-thing"),
        ("wrong", {"engine_args": ["--max-num-seqs=many"]}, "--max-num-seqs"),
        ("ours", {"engine_args": ["--model=/other"]}, "must not hold --model"),
        ("toolong", {"max_model_len": 1 << 20}, "max_model_len"),
    ],
)
def test_wrong_settings_are_refused_in_a_sentence(
    driver: Driver, name: str, settings: dict[str, object], sentence: str
) -> None:
    _, report, _ = driver.try_fork(name, gms=False, **settings)
    assert report.error == "EngineConfigError"
    assert sentence in report.message
    assert "\n" not in report.message


@pytest.mark.parametrize("content", [None, "{", "[]", '{"architectures": ["NoSuchModel"], "model_type": "llama"}'])
def test_a_broken_model_folder_is_refused(driver: Driver, tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    _, report, _ = driver.try_fork(f"broken-{len(content or '')}", gms=False, model=str(tmp_path))
    assert report.error == "EngineConfigError", report


def test_a_truncated_checkpoint_ends_the_start(
    driver: Driver, service: MemoryService, model_folder: Path, tmp_path: Path
) -> None:
    for path in model_folder.iterdir():
        (tmp_path / path.name).symlink_to(path.resolve())
    for name, content in (
        ("config.json", (model_folder / "config.json").read_bytes() + b"\n"),  # another layout than the pair's
        ("model.safetensors", b"not safetensors"),
    ):
        (tmp_path / name).unlink()
        (tmp_path / name).write_bytes(content)
    _, report, _ = driver.try_fork("truncated", service, model=str(tmp_path))
    assert report.error == "EngineConfigError"
    assert "\n" not in report.message
    # Nothing was committed: with the file repaired the next engine becomes the writer.
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to((model_folder / "model.safetensors").resolve())
    engine: EngineProcess = driver.fork("repaired", service, model=str(tmp_path))
    try:
        assert engine.status()["memory"]["weights_role"] == "writer"
        # And, since this engine is not needed any more: a memory fault ends an engine, nothing catches it.
        with pytest.raises(httpx.TransportError):
            engine.control("fault")
        engine.wait_gone()
    finally:
        engine.kill()
