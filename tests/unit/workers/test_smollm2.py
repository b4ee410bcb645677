"""The parts of the model converter that need no model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from workers.engine import EngineConfigError, EngineDeadError
from workers.engines.vllm import smollm2
from workers.engines.vllm.arguments import model_folder
from workers.settings import EngineSettings


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HOTSPARE_MODEL_CACHE": "/models", "XDG_CACHE_HOME": "/cache"}, "/models"),
        ({"XDG_CACHE_HOME": "/cache"}, "/cache/hotspare/models"),
    ],
)
def test_cache_folder_comes_from_the_environment(environment: dict[str, str], expected: str) -> None:
    assert smollm2.cache_dir(environment) == Path(expected)


def test_folder_name_tells_converter_version_and_dtype() -> None:
    name = f"smollm2-135m-instruct-{smollm2.CONVERTER_VERSION}-bfloat16"
    assert smollm2.default_model_dir({"HOTSPARE_MODEL_CACHE": "/m"}) == Path("/m") / name


def test_a_finished_folder_is_returned_without_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    program = (
        "import sys; from pathlib import Path; from workers.engines.vllm.smollm2 import ensure_embedded_model;"
        f"print(ensure_embedded_model(Path({str(tmp_path)!r})));"
        "print([name for name in ('torch', 'numpy', 'transformers') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines() == [str(tmp_path), "[]"]


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    with pytest.raises(smollm2.EmbeddedModelError, match="is not empty and holds no model"):
        smollm2.ensure_embedded_model(folder)
    assert (folder / "thesis.txt").read_text() == "mine"


def test_an_engine_refuses_a_place_that_holds_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSPARE_MODEL_CACHE", str(tmp_path))
    folder = smollm2.default_model_dir()
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    with pytest.raises(EngineConfigError, match="is not empty and holds no model"):
        model_folder(EngineSettings())


def test_an_engine_tries_again_to_write_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("HOTSPARE_MODEL_CACHE", str(file))
    with pytest.raises(EngineDeadError, match=r"cannot be written: .*(Not a directory|File exists)"):
        model_folder(EngineSettings())


def test_a_failed_conversion_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Path, destination: Path) -> None:
        (destination / "model.safetensors").write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(smollm2, "convert", fail)
    with pytest.raises(OSError, match="disk full"):
        smollm2.ensure_embedded_model(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model.lock"]


def test_what_a_killed_conversion_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    abandoned = tmp_path / ".model.draft-x1"
    abandoned.mkdir()
    monkeypatch.setattr(smollm2, "convert", lambda _, destination: (destination / "config.json").write_text("{}"))
    assert smollm2.ensure_embedded_model(tmp_path / "model") == tmp_path / "model"
    assert not abandoned.exists()


def test_bfloat16_rounds_to_nearest_even() -> None:
    # 1.0 and its neighbours: bfloat16 has 7 bits of fraction, so one unit is 2**-7.
    unit = 2.0**-7
    values = np.array([1.0, 1 + unit * 0.49, 1 + unit * 0.5, 1 + unit * 1.5, -2.5, 0.0], dtype=np.float32)
    expected = np.array([1.0, 1.0, 1.0, 1 + unit * 2, -2.5, 0.0], dtype=np.float32)
    widened = smollm2.to_bfloat16(values).astype(np.uint32) << 16
    np.testing.assert_array_equal(widened.view(np.float32), expected)


def test_unpermute_puts_the_halves_of_each_head_together() -> None:
    # Two heads of four rows; GGUF has each head's rows in the order 0 2 1 3.
    interleaved = np.array([[0], [2], [1], [3], [10], [12], [11], [13]], dtype=np.float32)
    restored = smollm2.unpermute(interleaved, heads=2)
    assert restored[:, 0].tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


@pytest.mark.parametrize(
    ("gguf_name", "expected"),
    [
        ("token_embd.weight", ("model.embed_tokens.weight", "")),
        ("blk.7.attn_q.weight", ("model.layers.7.self_attn.q_proj.weight", "attn_q")),
        ("blk.29.ffn_norm.weight", ("model.layers.29.post_attention_layernorm.weight", "ffn_norm")),
    ],
)
def test_tensor_names(gguf_name: str, expected: tuple[str, str]) -> None:
    assert smollm2.hf_name(gguf_name) == expected


@pytest.mark.parametrize("gguf_name", ["output.weight", "blk.0.attn_q.bias", "blk.0.ssm_in.weight"])
def test_an_unknown_tensor_is_refused(gguf_name: str) -> None:
    with pytest.raises(smollm2.EmbeddedModelError, match=gguf_name):
        smollm2.hf_name(gguf_name)
