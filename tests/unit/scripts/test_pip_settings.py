"""pip's configuration, said again for uv."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "pip_settings.py"


@pytest.fixture(scope="module")
def pip_settings() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pip_settings", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_nothing_configured_means_nothing_passed_on(pip_settings: ModuleType) -> None:
    assert pip_settings.translate({}, {}) == {}


def test_settings_are_translated(pip_settings: ModuleType) -> None:
    settings = {
        "index-url": "https://user:secret@mirror.example/simple",
        "extra-index-url": "file:///disk/simple https://more.example/simple",
        "cert": "/etc/ca.pem",
        "find-links": "/wheels /more-wheels",
        "timeout": "90",
    }
    assert pip_settings.translate(settings, {}) == {
        "UV_DEFAULT_INDEX": "https://user:secret@mirror.example/simple",
        "UV_INDEX": "https://more.example/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "SSL_CERT_FILE": "/etc/ca.pem",
        "UV_FIND_LINKS": "/wheels,/more-wheels",
        "UV_HTTP_TIMEOUT": "90",
    }


@pytest.mark.parametrize("already", ["UV_DEFAULT_INDEX", "UV_INDEX_URL"])
def test_what_uv_was_told_itself_wins(pip_settings: ModuleType, already: str) -> None:
    assert pip_settings.translate({"index-url": "https://a.example"}, {already: "https://b.example"}) == {}


def test_torch_comes_from_a_configured_wheel_folder_that_has_it(
    pip_settings: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UV_FIND_LINKS", raising=False)
    assert pip_settings.torch_source({"find-links": str(tmp_path)}) == ["--torch-backend=cpu"]
    (tmp_path / "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl").touch()
    assert pip_settings.torch_source({"find-links": str(tmp_path)}) == []
    assert pip_settings.torch_source({"find-links": tmp_path.as_uri()}) == []
